"""The verb prepare: write data in the form that training reads."""

import os
import re
import sys
from typing import Annotated, Literal

from vit_jax.cli.options import Options, UsageError, argument, format_command, option, switch
from vit_jax.cli.outputs import resolve_output_folder
from vit_jax.cli.verbs import verb
from vit_jax.config.rules import Count, Number, Range, When

_OPTIONS = {  # by kind of dataset
    "tar": (
        "data_dir",
        "short_side",
        "quality",
        "name",
        "seed",
        "classes",
        "number_names",
        "other_classes",
        "min_side",
        "min_class_images",
        "holdout_per_class",
        "shards",
    ),
    "folder": ("output", "short_side", "quality"),
    "TFDS": ("data_dir", "manual_dir", "check"),
}
_NEEDED = {
    "tar": {"name": "my_images"},
    "folder": {"short_side": "256", "output": "FOLDER"},
    "TFDS": {},
}
Rule = Literal["reject", "skip"]
WORDS_FILE = "vit_jax_data.txt"
"""File in a folder of datasets with the words by which a run reads the last one."""


@verb(
    "folder:my-images --short_side=256 --output=my-images-256",
    "tar:winter21_whole.tar.gz --name=imagenet21k --data_dir=DATA --classes=imagenet21k_goog_synsets.txt",
)
class Prepare(Options):
    """Write a TFDS dataset or tars as ArrayRecord files, once, or a smaller copy of an image folder.

    Tars are read once, in order and without unpacking; they hold a tar or a folder for each class,
    or WebDataset samples, and may be compressed by gzip. listed.csv of the dataset has the files
    that are skipped. After an interruption the same command continues, except from standard input.
    The copy of a folder is read several times faster; if images cannot be read, the exit code is 1.
    """

    datasets: tuple[str, ...] = argument(
        "DATASET…",
        "dataset: a name in the TFDS catalogue, folder:PATH, or one or several of tar:FILE, "
        "tar:'FILES*.tar', tar:-",
    )
    data_dir: str | None = option("FOLDER", "folder of TFDS datasets")
    manual_dir: str | None = option(
        "FOLDER", "TFDS: folder of files that a dataset cannot download"
    )

    output: str | None = option("FOLDER", "folder: path of the copy")
    short_side: Count | None = option(
        "N", "folder, tar: resize larger images to this shorter side in pixels"
    )
    quality: Annotated[int, Range("[1, 100]"), When("short_side")] = option(
        "N", "folder, tar: quality of resized JPEGs", 90
    )

    name: str | None = option("NAME", "tar: name of the dataset, read as tfds:NAME")
    seed: Number = option("N", "tar: random seed of the order of the records", 0)

    classes: str | None = option(
        "FILE", "tar: file of class names, one a line; default: the sorted names in the tars"
    )
    number_names: str | None = option(
        "FILE", "tar: file of class names for numbers in .cls and .json; default: --classes"
    )
    other_classes: Annotated[Rule, When("classes")] = option(
        "", "tar: rule for classes not in --classes", "reject"
    )

    min_side: Count = option("N", "tar: skip images with a shorter side than this, in pixels", 32)
    min_class_images: Count = option("N", "tar: skip classes with fewer images", 1)

    holdout_per_class: Count | None = option(
        "N", "tar: number of images of each class, at most half, for a split validation"
    )
    shards: Count | None = option(
        "N", "tar: number of files of a split; default: one for each GiB, 1,024 for standard input"
    )

    check: bool = switch("compare a dataset made of tars with its manifest, and change nothing")

    def suggest_next(self) -> str:
        """Return a training on the data that were written."""
        if self.output is not None:
            return format_command("pretrain", self.output)
        words = self._name_data(self.data_dir or "")
        if self.data_dir is None:
            del words[1]
        return format_command("pretrain", "--config=RECIPE", *words)

    def run(self) -> None:
        kind = self._choose_kind()
        self._require_options(kind)
        if kind == "tar":
            self._prepare_tars()
            self._write_words()
        elif kind == "folder":
            self._prepare_folder()
        elif self.check:
            self._check()
        else:
            self._prepare_tfds()
            self._write_words()

    def _name_data(self, folder: str) -> list[str]:
        """Return the words by which a run reads the dataset that was written."""
        name = self.name or self.datasets[0].removeprefix("tfds:")
        words = [f"--config.data=tfds:{name}", f"--config.input.data_dir={folder}"]
        if self.holdout_per_class is not None:
            words.append("--config.input.test_split=validation")
        return words

    def _write_words(self) -> None:
        """Write these words into the folder of datasets, for launchers; "." is this folder."""
        if self.data_dir is None:
            return

        from vit_jax.storage.files import expand_path, write_atomically

        text = "\n".join(self._name_data("."))
        write_atomically(expand_path(self.data_dir) / WORDS_FILE, f"{text}\n")

    def _choose_kind(self) -> str:
        """Return the kind of the datasets, which is one."""
        kinds = set()
        for dataset in self.datasets:
            match = re.match("(tar|folder):.", dataset)
            kinds.add(match[1] if match else "TFDS")

        kind = kinds.pop()
        is_several = len(self.datasets) > 1 and kind != "tar"
        if kinds or is_several:
            raise UsageError(
                f"DATASET={' '.join(self.datasets)}: must be one dataset, except for tar:FILE. "
                "Give one."
            )
        if kind == "TFDS" and os.path.isfile(self.datasets[0]):
            path = self.datasets[0]
            raise UsageError(f"DATASET={path}: must not be a file. Use tar:{path} for a tar.")
        return kind

    def _require_options(self, kind: str) -> None:
        """Raise UsageError for options that another kind of dataset has, and for missing ones."""
        data = self.datasets[0]
        others = set().union(*_OPTIONS.values()) - {*_OPTIONS[kind]}
        self.reject_ineffective(others, f"on {data}")
        for name in _NEEDED[kind]:
            if getattr(self, name) is None:
                examples = [f"--{needed}={value}" for needed, value in _NEEDED[kind].items()]
                raise UsageError(
                    f"--{name}: must be set for {kind}:…. Use prepare {data} {' '.join(examples)}."
                )

    def _prepare_tfds(self) -> None:
        from vit_jax.data.kinds.tfds_source import prepare

        print(prepare(self.datasets[0], data_dir=self.data_dir, manual_dir=self.manual_dir))

    def _prepare_folder(self) -> None:
        from vit_jax.data.kinds.folder import folder_of
        from vit_jax.tools.prepare.prepared import prepare_folder

        folder = folder_of(self.datasets[0])
        output = resolve_output_folder(str(self.output))
        assert folder is not None, self.datasets
        assert self.short_side is not None
        counts = prepare_folder(folder, output, short_side=self.short_side, quality=self.quality)

        report = f"{output}: {counts['reduced']:,} images resized, {counts['copied']:,} copied"
        if not counts["unreadable"]:
            print(report)
            return
        print(f"{report}, {counts['unreadable']:,} cannot be read")
        sys.exit(1)

    def _prepare_tars(self) -> None:
        from vit_jax.tools.prepare.tar_dataset import (
            Options,
            list_archives,
            prepare_tars,
            read_classes,
        )

        archives = list_archives([dataset.removeprefix("tar:") for dataset in self.datasets])
        values = self.collect_values(
            "holdout_per_class",
            "short_side",
            "shards",
            "quality",
            "seed",
            "min_side",
            "min_class_images",
        )
        files = self.collect_values("classes", "number_names")
        for name in files:
            values[name] = read_classes(files, name)
        options = Options(skips_others=self.other_classes == "skip", **values)

        folder, counts = prepare_tars(
            archives,
            str(self.name),
            data_dir=self.data_dir,
            options=options,
        )
        shown = []
        for name, count in counts.items():
            shown.append(f"{count:,} {name}")
        print(f"{folder}: {', '.join(shown)}")

    def _check(self) -> None:
        from vit_jax.tools.prepare.tar_dataset import check

        name = self.datasets[0].removeprefix("tfds:")
        problems = check(name, self.data_dir)
        if problems:
            print("\n".join(problems))
            sys.exit(1)
        print(f"{name}: every record is as in the manifest")
