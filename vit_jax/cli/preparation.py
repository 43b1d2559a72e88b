"""The verb prepare: write data in the form that training reads."""

import os
import re
import sys
from typing import Annotated, Literal

from vit_jax.cli.options import Options, UsageError, argument, option, switch, verb
from vit_jax.cli.outputs import output_folder
from vit_jax.config.rules import Count, Number, Range, When

_OPTIONS = {  # by kind of dataset
    "tar": (
        *(
            "data_dir",
            "short_side",
            "quality",
            "name",
            "seed",
            "classes",
            "number_names",
            "other_classes",
            "min_side",
        ),
        *("min_class_images", "holdout_per_class", "shards"),
    ),
    "folder": ("output", "short_side", "quality"),
    "TFDS": ("data_dir", "manual_dir", "check"),
}
Rule = Literal["reject", "skip"]
_NEEDED = {
    "tar": {"name": "my_images"},
    "folder": {"short_side": "256", "output": "FOLDER"},
    "TFDS": {},
}


@verb(
    "folder:my-images --short_side=256 --output=my-images-256",
    "tar:winter21_whole.tar.gz --name=imagenet21k --data_dir=DATA --classes=imagenet21k_goog_synsets.txt",
)
class Prepare(Options):
    """Write a TFDS dataset or tars as ArrayRecord files, once, or a smaller copy of an image folder.

    Tars are read once, in order and without unpacking; they hold a tar or a folder for each class, or WebDataset
    samples, and may be compressed by gzip. listed.csv of the dataset has the files that are skipped. After an
    interruption the same command continues, except from standard input. The copy of a folder is read several times
    faster; if images cannot be read, the exit code is 1.
    """

    datasets: tuple[str, ...] = argument(
        "DATASET…",
        "a name in the TFDS catalogue, folder:PATH, or one or several of tar:FILE, tar:'FILES*.tar', tar:-",
    )
    data_dir: str | None = option("FOLDER", "of TFDS datasets")
    manual_dir: str | None = option("FOLDER", "TFDS: files of a dataset that it cannot download")
    output: str | None = option("FOLDER", "folder: where the copy is written")
    short_side: Count | None = option(
        "N", "folder, tar: resize larger images to this shorter side in pixels"
    )
    quality: Annotated[int, Range("[1, 100]"), When("short_side")] = option(
        "N", "folder, tar: of resized JPEGs", 90
    )
    name: str | None = option("NAME", "tar: of the dataset, which is read as tfds:NAME")
    seed: Number = option("N", "tar: of the order of the records", 0)
    classes: str | None = option(
        "FILE", "tar: class names, one a line; default: the sorted names in the tars"
    )
    number_names: str | None = option(
        "FILE", "tar: class names of numbers in .cls and .json; default: of --classes"
    )
    other_classes: Annotated[Rule, When("classes")] = option(
        "", "tar: rule for classes not in --classes", "reject"
    )
    min_side: Count = option("N", "tar: skip images with a shorter side than this, in pixels", 32)
    min_class_images: Count = option("N", "tar: skip classes with fewer images", 1)
    holdout_per_class: Count | None = option(
        "N", "tar: images of each class, at most half, for a split validation"
    )
    shards: Count | None = option(
        "N", "tar: files of a split; default: one for each GiB, 1,024 for standard input"
    )
    check: bool = switch(
        "NAME of a dataset made of tars: compare it with its manifest, and change nothing"
    )

    def run(self) -> None:
        words = self.datasets
        data = self.datasets[0]
        kinds = {(re.match("(tar|folder):.", word) or ["", "TFDS"])[1] for word in words}
        kind = kinds.pop()
        if kinds or (len(words) > 1 and kind != "tar"):
            raise UsageError(
                f"DATASET={' '.join(words)}: must be one dataset, except for tar:FILE. Give one."
            )
        if kind == "TFDS" and os.path.isfile(data):
            raise UsageError(f"DATASET={data}: must not be a file. Use tar:{data} for a tar.")
        others = {name for names in _OPTIONS.values() for name in names} - {*_OPTIONS[kind]}
        self.reject_ineffective(others, f"on {data}")
        if missing := [name for name in _NEEDED[kind] if getattr(self, name) is None]:
            needed = " ".join(f"--{name}={example}" for name, example in _NEEDED[kind].items())
            raise UsageError(
                f"--{missing[0]}: must be set for {kind}:…. Use prepare {data} {needed}."
            )
        if kind == "tar":
            self._prepare_tars([word.removeprefix("tar:") for word in words])
        elif kind == "folder":
            self._prepare_folder(data)
        elif self.check:
            self._check(data.removeprefix("tfds:"))
        else:
            from vit_jax.data.kinds.tfds_source import prepare

            print(prepare(data, data_dir=self.data_dir, manual_dir=self.manual_dir))

    def _prepare_folder(self, data: str) -> None:
        from vit_jax.data.kinds.folder import folder_of
        from vit_jax.tools.prepare.prepared import prepare_folder

        folder = folder_of(data)
        output = output_folder(str(self.output))
        assert folder is not None, data
        assert self.short_side is not None
        counts = prepare_folder(folder, output, short_side=self.short_side, quality=self.quality)
        unreadable = f", {counts['unreadable']:,} cannot be read" if counts["unreadable"] else ""
        print(
            f"{output}: {counts['reduced']:,} images resized, {counts['copied']:,} copied{unreadable}"
        )
        if unreadable:
            sys.exit(1)

    def _prepare_tars(self, patterns: list[str]) -> None:
        from vit_jax.tools.prepare.tar_dataset import (
            Options,
            list_archives,
            prepare_tars,
            read_classes,
        )

        archives = list_archives(patterns)
        files = self.chosen("classes", "number_names")
        values = self.chosen(*("holdout_per_class", "short_side", "shards", "quality"))
        values |= self.chosen("seed", "min_side", "min_class_images")
        values |= {name: read_classes(files, name) for name in files}
        options = Options(skips_others=self.other_classes == "skip", **values)
        folder, counts = prepare_tars(
            archives, str(self.name), data_dir=self.data_dir, options=options
        )
        print(f"{folder}: {', '.join(f'{count:,} {name}' for name, count in counts.items())}")

    def _check(self, name: str) -> None:
        from vit_jax.tools.prepare.tar_dataset import check

        if problems := check(name, self.data_dir):
            print("\n".join(problems))
            sys.exit(1)
        print(f"{name}: every record is as in the manifest")
