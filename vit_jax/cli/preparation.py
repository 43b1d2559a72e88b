"""The verb that writes data in the form that training reads: prepare."""

import os
import sys
from typing import NoReturn

from vit_jax.cli.outputs import output_folder
from vit_jax.cli.verb import verb
from vit_jax.cli.words import Given, UsageError, whole

_ARGUMENTS = {
    "DATASET…": "a name in the TFDS catalogue, folder:PATH, or tar:FILE, tar:'FILES*.tar' or tar:-, one or several",
    "[--data_dir=FOLDER]": "of TFDS datasets",
    "[--manual_dir=FOLDER]": "TFDS: files of a dataset that it cannot download",
    "[--output=FOLDER]": "folder: where the copy is written",
    "[--short_side=N]": "folder, tar: make larger images smaller, to this shorter side in pixels",
    "[--quality=90]": "folder, tar: of the smaller images' JPEGs, from 1 to 100",
    "[--name=NAME]": "tar: of the dataset, which is read as tfds:NAME",
    "[--seed=0]": "tar: of the order of the records",
    "[--classes=FILE]": "tar: class names in the order of their numbers, one a line; otherwise the sorted names found",
    "[--number_names=FILE]": "tar: class names that numbers in .cls and .json files mean; of --classes by default",
    "[--other_classes=reject|skip]": "tar: what is done with classes that are not in the file; reject by default",
    "[--min_side=32]": "tar: leave out images with a shorter side than this, in pixels",
    "[--min_class_images=1]": "tar: leave out classes with fewer images",
    "[--holdout_per_class=0]": "tar: images of each class, at most half of it, for a split validation",
    "[--shards=N]": "tar: files of each split; one for each GiB of the tars by default, 1,024 for standard input",
    "[--check]": "NAME of a dataset made of tars: compare it with its manifest, and change nothing",
}
_OPTIONS = {
    "tar": (
        *("data_dir", "short_side", "quality", "name", "seed", "classes", "number_names", "other_classes", "min_side"),
        *("min_class_images", "holdout_per_class", "shards"),
    ),
    "folder": ("output", "short_side", "quality"),
    "TFDS": ("data_dir", "manual_dir", "check"),
}
_NEEDED = {"tar": {"name": "my_images"}, "folder": {"short_side": "256", "output": "FOLDER"}, "TFDS": {}}


@verb(
    _ARGUMENTS,
    "folder:my-images --short_side=256 --output=my-images-256",
    "tar:winter21_whole.tar.gz --name=imagenet21k --data_dir=DATA --classes=imagenet21k_goog_synsets.txt",
)
def prepare(given: Given) -> None:
    """Write a TFDS dataset or tars as ArrayRecord files, once, or a smaller copy of an image folder.

    Tars are read once, in order and without unpacking; they hold a tar or a folder for each class, or WebDataset
    samples, and may be compressed by gzip. Files that are left out are in listed.csv of the dataset. Interrupted, the
    same command goes on, but not from the standard input. The copy of a folder is read several times faster; where
    images cannot be read, the exit code is 1.
    """
    words, options = given.more, given.options
    kinds = {
        kind if kind in ("tar", "folder") and name else "TFDS" for kind, _, name in (w.partition(":") for w in words)
    }
    kind = kinds.pop()
    if kinds or (len(words) > 1 and kind != "tar"):
        raise UsageError(f"DATASET={' '.join(words)}: must be one dataset. Only tar:FILE may stand several times.")
    if kind == "TFDS" and os.path.isfile(words[0]):
        raise UsageError(f"DATASET={words[0]}: is a file. Give tar:{words[0]} for a tar.")
    if wrong := [name for name in options if name not in _OPTIONS[kind]]:
        of = " and ".join(other for other, names in _OPTIONS.items() if wrong[0] in names)
        raise UsageError(
            f"--{wrong[0]}={options[wrong[0]]}: is for a dataset of {of}, and {words[0]} is of {kind}. Leave it out."
        )
    if missing := [name for name in _NEEDED[kind] if name not in options]:
        needed = " ".join(f"--{name}={example}" for name, example in _NEEDED[kind].items())
        raise UsageError(f"{kind}:… needs --{missing[0]}= too: prepare {words[0]} {needed}.")
    quality = whole({"quality": "90"} | options, "quality")
    if quality > 100:
        raise UsageError(f"--quality={quality}: must be a whole number from 1 to 100.")
    if kind == "tar":
        _prepare_tars([word.removeprefix("tar:") for word in words], options, quality)
    elif kind == "folder":
        _prepare_folder(words[0], options, quality)
    elif "check" in options:
        _check(words[0].removeprefix("tfds:"), options)
    else:
        from vit_jax.data.tfds_source import prepare

        print(prepare(words[0], data_dir=options.get("data_dir"), manual_dir=options.get("manual_dir")))


def _prepare_folder(data: str, options: dict[str, str], quality: int) -> None:
    from vit_jax.data.folder import folder_of
    from vit_jax.data.prepared import prepare_folder

    folder, output = folder_of(data), output_folder(options["output"])
    assert folder is not None, data
    counts = prepare_folder(folder, output, short_side=whole(options, "short_side"), quality=quality)
    unreadable = f", {counts['unreadable']:,} cannot be read" if counts["unreadable"] else ""
    print(f"{output}: {counts['reduced']:,} images made smaller, {counts['copied']:,} copied as they are{unreadable}")
    if unreadable:
        _fail()


def _prepare_tars(patterns: list[str], options: dict[str, str], quality: int) -> None:
    if "quality" in options and "short_side" not in options:
        raise UsageError(
            "--quality: is of the images that --short_side=N makes smaller. Give that too, or leave it out."
        )
    if "other_classes" in options and "classes" not in options:
        raise UsageError(
            "--other_classes: is about classes that --classes=FILE does not have. Give that, or leave it out."
        )
    numbers = {"seed": "0", "min_side": "32", "min_class_images": "1"} | options
    chosen = {name: whole(numbers, name) for name in ("seed", "min_side", "min_class_images")}
    chosen |= {name: whole(options, name) for name in ("holdout_per_class", "short_side", "shards") if name in options}

    from vit_jax.data.tar_dataset import Options, list_archives, prepare_tars, read_classes

    archives = list_archives(patterns)
    classes, numbers_of = (
        read_classes(options, name) if name in options else () for name in ("classes", "number_names")
    )
    others = options.get("other_classes") == "skip"
    made = Options(classes=classes, number_names=numbers_of, skips_others=others, quality=quality, **chosen)
    folder, counts = prepare_tars(archives, options["name"], data_dir=options.get("data_dir"), options=made)
    listed = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    print(f"{folder}: {listed}")


def _check(name: str, options: dict[str, str]) -> None:
    from vit_jax.data.tar_dataset import check

    if problems := check(name, options.get("data_dir")):
        print("\n".join(problems))
        _fail()
    print(f"{name}: every record is as in the manifest")


def _fail() -> NoReturn:
    from vit_jax.hosts import exits

    sys.exit(exits.FAILED)
