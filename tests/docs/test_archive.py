"""The first commands of "From an archive to a sweep" in docs/imagenet21k.md, up to the images that are trained on."""

import runpy
from pathlib import Path

from tests.integration.commands import succeed
from tests.tiny import config
from vit_jax.data.sources import open_source

SCRIPT = Path(__file__).parents[2] / "docs/archive_of_photographs.py"


def test_copies_in_an_archive_are_found_and_not_trained_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    Path("classes.txt").write_text("n00000001\nn00000002\nn00000003\nn00000004\n")

    out = succeed(
        [
            "prepare",
            "tar:train.tar",
            "--name=animals",
            "--data_dir=DATA",
            "--classes=classes.txt",
            "--holdout_per_class=5",
        ]
    )
    assert "105 train, 15 validation, 4 classes, 1 unreadable, 1 tiny" in out

    copies = 0
    for split in ("validation", "train"):
        out = succeed(
            [
                "duplicates",
                "tfds:animals",
                "--data_dir=DATA",
                f"--split={split}",
                "--against=folder:test",
                "--write=duplicates.json",
            ]
        )
        _, _, result = out.partition("copied test images")
        count, *_ = result.split(" of ")
        copies += int(count)

    assert copies == 9  # every planted copy, and no other image

    inputs = config("input.data_dir=DATA", "input.exclude=duplicates.json").input
    train = open_source("tfds:animals", "train", inputs, 0)
    validation = open_source("tfds:animals", "validation", inputs, 0)

    assert len(train) == 98
    assert len(validation) == 15
