"""Warnings about files of more than 8 bits and of several pages: their counts, and how little is read for them."""

import logging
import pickle

import numpy as np

from tests.data.deep_files import png, pnm, tiff
from vit_jax.data.depth import MOST_FILES, survey
from vit_jax.data.sources import open_source
from vit_jax.evals.splits import SplitChoice, open_pair, open_split
from vit_jax.files import open_regular

GREY = np.arange(63, dtype=np.uint16).reshape(7, 9) * 65  # 12 bits
UNIT = GREY.astype(np.float32) / 4095


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return [str(folder / name) for name in files]


def test_losses_are_counted(tmp_path):
    files = {
        **{f"{n}.tif": tiff(GREY) for n in range(3)},
        "a.PNG": png(GREY),
        "stated.png": png(GREY, 12),
        "b.png": png(GREY.astype(np.uint8)),
        "float.tiff": tiff(UNIT),
        "float-stated.tiff": tiff(UNIT, t341=("f", 1.0)),
        "pages.tif": tiff(GREY, bits=12, pages=3),
        "small.tif": tiff(GREY, bits=12, thumbnails=2),
        "broken.tif": b"II*\0",
        "c.pgm": pnm(GREY, 4095),
        "photo.jpg": tiff(GREY),
    }
    paths = write(tmp_path, files)
    values, floats, pages = survey([*paths, str(tmp_path / "gone.tif")], None, "--value_range")
    assert values.startswith("4 of 13 checked files have 16 bits")
    assert "divided by 256" in values
    assert f"(first: {paths[0]})" in values
    assert "Pass --value_range=0,4095" in values
    assert floats.startswith("1 of 13 checked files have floating-point")
    assert f"(first: {tmp_path}/float.tiff)" in floats
    assert pages == "1 of 13 checked files have several pages: page 1 of 3 is used."
    assert survey(paths, (0, 4095), "input.value_range") == [pages.replace("13", "12")]
    assert survey(paths[4:6], None, "input.value_range") == []


def test_few_files_are_read_and_little_of_each(tmp_path, monkeypatch):
    """Evenly spaced ones; directories at the end of a file are found."""
    large = tiff(np.zeros((600, 600), np.uint16))
    paths = write(tmp_path, {f"{n:04}.tif": large if n == 4 else b"" for n in range(1000)})
    sizes, opened = [], []

    def open_counted(path):
        file = open_regular(path)
        opened.append(path)

        class Counted:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                file.close()

            def seek(self, place):
                file.seek(place)

            def read(self, size):
                sizes.append(size)
                return file.read(size)

        return Counted()

    monkeypatch.setattr("vit_jax.data.depth.open_regular", open_counted)
    (line,) = survey(paths[:256], None, "input.value_range")
    assert line.startswith("1 of 256")
    assert sum(sizes) < 256 * 5000
    opened.clear()
    survey(paths[300:], None, "input.value_range")
    assert len(opened) == MOST_FILES
    assert opened[0] == paths[300]
    assert opened[-1] >= paths[995]


def test_a_folder_warns_once(tmp_path, make_config, caplog):
    """Whichever of its splits are opened; with a range only of pages."""
    caplog.set_level(logging.WARNING)
    names = [f"images/{kind}/{n}.tif" for kind in "ab" for n in range(5)]
    write(tmp_path, {name: tiff(GREY, pages=1 + (name == names[0])) for name in names})
    for split in ("train", "test"):
        source = open_source(f"folder:{tmp_path}/images", split, make_config(), 0)
        pickle.dumps(source)
    assert len(caplog.messages) == 2
    assert "10 of 10 checked files have 16 bits" in caplog.messages[0]
    assert "Pass --config.input.value_range=0,4095" in caplog.messages[0]
    assert "page 1 of 2" in caplog.messages[1]
    (tmp_path / "images.csv").write_text("image,label\n" + "".join(f"{name},{name[7]}\n" for name in names))
    caplog.clear()
    open_source(f"csv:{tmp_path}/images.csv", "train", make_config(value_range=(0.0, 4095.0)), 0)
    assert len(caplog.messages) == 1
    assert "page 1 of 2" in caplog.messages[0]


def test_warnings_of_verbs_on_weights_name_their_option(tmp_path, caplog):
    write(tmp_path, {f"{kind}/{n}.tif": tiff(GREY) for kind in "ab" for n in range(5)})
    open_pair(f"folder:{tmp_path}", SplitChoice())
    (message,) = caplog.messages
    assert "Pass --value_range=0,4095" in message
    caplog.clear()
    open_split(f"folder:{tmp_path}/../{tmp_path.name}", "all", SplitChoice())
    assert "Pass --value_range=0,4095" in caplog.messages[0]
