"""Write vit_jax/evals/imagenet_classes.tsv: the 1,000 classes of ILSVRC-2012 in their order.

Each line has the WordNet id of a class, the letters of ImageNet-A ("A") and ImageNet-R ("R") if
these have the class ("-": neither), and its WordNet lemmas. The ids and their order are from
tensorflow_datasets (datasets/imagenet2012/labels.txt). The lemmas and the lists of the 200 classes
of the two sets are from the package timm (data/_info).

    pip download --no-deps timm && unzip -q timm-*.whl -d timm
    python docs/imagenet_classes.py timm/timm/data/_info
"""

import pathlib
import sys

import tensorflow_datasets as tfds

TARGET = pathlib.Path(__file__).parents[1] / "vit_jax/evals/imagenet_classes.tsv"


def main(info: pathlib.Path) -> None:
    """Read the folder `info` of timm and write the file."""
    labels = pathlib.Path(tfds.core.tfds_path("datasets/imagenet2012/labels.txt"))
    ids = labels.read_text().split()
    assert ids == (info / "imagenet_synsets.txt").read_text().split()
    assert len(ids) == 1000

    lemmas = {}
    for line in (info / "imagenet_synset_to_lemma.txt").read_text().splitlines():
        wordnet_id, words = line.split("\t")
        lemmas[wordnet_id] = words
    members = {}
    for letter in "AR":
        file = info / f"imagenet_{letter.lower()}_synsets.txt"
        members[letter] = set(file.read_text().split())
        assert len(members[letter]) == 200
        assert members[letter] <= set(ids)

    text = ""
    for wordnet_id in ids:
        letters = ""
        for letter, classes in members.items():
            if wordnet_id in classes:
                letters += letter
        text += f"{wordnet_id}\t{letters or '-'}\t{lemmas[wordnet_id]}\n"
    TARGET.write_text(text)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
