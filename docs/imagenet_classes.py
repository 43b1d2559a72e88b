"""Write vit_jax/evals/imagenet_classes.tsv: the 1,000 classes of ILSVRC-2012 in their order.

One line a class: its WordNet id, whether ImageNet-A ("A") and ImageNet-R ("R") have it ("-":
neither), and its WordNet lemmas. The ids and their order are those of tensorflow_datasets
(datasets/imagenet2012/labels.txt); the lemmas and the two lists of 200 classes, which are those of
the releases of the two sets, are in the package timm (data/_info).

    pip download --no-deps timm && unzip -q timm-*.whl -d timm
    python docs/imagenet_classes.py timm/timm/data/_info
"""

import pathlib
import sys

import tensorflow_datasets as tfds

TARGET = pathlib.Path(__file__).parents[1] / "vit_jax/evals/imagenet_classes.tsv"


def main(info: pathlib.Path) -> None:
    """Reads timm's folder `info`."""
    ids = pathlib.Path(tfds.core.tfds_path("datasets/imagenet2012/labels.txt")).read_text().split()
    assert ids == (info / "imagenet_synsets.txt").read_text().split()
    assert len(ids) == 1000
    lemmas = dict(
        line.split("\t")
        for line in (info / "imagenet_synset_to_lemma.txt").read_text().splitlines()
    )
    members = {
        letter: set((info / f"imagenet_{letter.lower()}_synsets.txt").read_text().split())
        for letter in "AR"
    }
    assert all(len(members[letter]) == 200 and members[letter] <= set(ids) for letter in "AR")
    lines = []
    for wordnet_id in ids:
        letters = "".join(letter for letter in "AR" if wordnet_id in members[letter])
        lines.append(f"{wordnet_id}\t{letters or '-'}\t{lemmas[wordnet_id]}\n")
    TARGET.write_text("".join(lines))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
