"""Outputs that cannot be written are rejected before anything is loaded."""

import errno
import os
import pathlib
import socket

import pytest

from tests.evals.samples import sample_pixels, write_pngs
from tests.integration.commands import rejected, run
from tests.rejections import rejects
from vit_jax import cli
from vit_jax.cli import outputs
from vit_jax.cli.outputs import resolve_output_file, resolve_output_folder
from vit_jax.data.sources import find_listing, normalize_data

WEIGHTS = "no-such-weights.npz"  # a verb that looks for them before it checks outputs says so
# By verb, the words before the output, and the options that name a file or, with a slash, a folder
OUTPUTS = {
    "lr-range": (["--config=no-such-recipe"], ["output=a.png"]),
    "evaluate": ([WEIGHTS, "--data=digits"], ["csv=a.csv", "report=a/"]),
    "predict": ([WEIGHTS, "."], ["csv=a.csv"]),
    "export": ([WEIGHTS, "--to=stablehlo"], ["output=a.stablehlo"]),
    "probe": ([WEIGHTS, "--data=digits"], ["output=a/"]),
    "features": ([WEIGHTS, "--data=digits"], ["output=a.npz"]),
    "duplicates": (["digits", "--against=no-such-data"], ["output=a.csv"]),
    "plot": (["no-such-run"], ["output=a.png"]),
    "report": (["no-such-run"], ["output=a.html"]),
    "inspect": ([WEIGHTS], ["output=a/"]),
    "inspect-data": (["--config=no-such-recipe"], ["output=a/"]),
    "prepare": (["folder:no-such-folder", "--short_side=8"], ["output=a/"]),
    "plan": (["--config=no-such-recipe", "--topology=v5e:2x2"], ["hlo=a.txt"]),
}
CASES = []
for verb, (words, options) in OUTPUTS.items():
    for option in options:
        CASES.append((verb, words, option))


def test_every_output_of_every_verb_is_listed_here():
    names = {"output", "csv", "report", "hlo"}

    for name, verb in cli.VERBS.items():
        declared = names.intersection(verb.flags)
        _, options = OUTPUTS.get(name, ([], []))
        listed = {option.partition("=")[0] for option in options}
        assert declared == listed, name
    assert set(OUTPUTS) <= set(cli.VERBS)


@pytest.mark.parametrize(("verb", "words", "option"), CASES)
def test_outputs_come_first(verb, words, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("file").touch()
    name, _, output = option.partition("=")

    output_name = output.rstrip("/")
    for place in ("file", "/proc", "missing"):
        outcome = run([verb, *words, f"--{name}={place}/{output_name}"])
        is_rejected = outcome.err.startswith(f"vit-jax: --{name}=")
        if place == "missing" and output.endswith("/"):
            # Folders are made.
            assert not is_rejected
        else:
            assert is_rejected
            assert outcome.code == 2

    assert os.listdir() == ["file"]


def read_run():
    """Return the files of the run by their path."""
    files = {}
    for path in pathlib.Path("mine").rglob("*"):
        if path.is_file():
            files[str(path)] = path.read_text()
    return files


@pytest.fixture
def run_files(tmp_path, monkeypatch):
    """Make the workdir `mine` of a run in the working directory; return its files."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("mine/checkpoints/7").mkdir(parents=True)
    for name in ("config.json", "start.json", "metrics.jsonl"):
        pathlib.Path("mine", name).write_text(name)
    return read_run()


@pytest.mark.parametrize(("verb", "words", "option"), CASES)
def test_outputs_that_would_change_a_run_are_rejected_first(
    verb,
    words,
    option,
    tmp_path,
    run_files,
):
    name, _, output = option.partition("=")
    suffix = pathlib.Path(output).suffix
    targets = [f"mine/checkpoints/a{suffix}"]
    if output.endswith("/"):
        targets = ["mine", "mine/checkpoints/7"]

    for target in targets:
        err = rejected([verb, *words, f"--{name}={target}"])
        assert f"--{name}={target}: '{tmp_path}/mine' is the workdir of a run" in err
    assert read_run() == run_files


@pytest.mark.parametrize(
    "line",
    [
        f"convert {WEIGHTS} mine --to=huggingface --overwrite",
        f"convert {WEIGHTS} mine/ --to=timm --overwrite",
        f"convert {WEIGHTS} mine/checkpoints/a.npz",
        f"convert {WEIGHTS} mine --overwrite",
        f"export {WEIGHTS} --to=onnx --output=mine/config.json --overwrite",
        f"export {WEIGHTS} --to=stablehlo --output=mine/config --overwrite",
        f"export {WEIGHTS} --to=safetensors --output=mine --overwrite",
        "lr-range --config=no-such-recipe --output=mine/summary.png",
        f"probe {WEIGHTS} --data=digits --output=mine --overwrite",
        f"evaluate {WEIGHTS} --data=digits --csv=mine/start.json",
    ],
)
def test_files_of_a_run_are_never_replaced(line, tmp_path, run_files):
    err = rejected(line.split())

    assert f"'{tmp_path}/mine' is the workdir of a run" in err
    assert WEIGHTS not in err
    assert read_run() == run_files


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["convert", WEIGHTS, "file/a.npz"], "file/a.npz"),
        (["export", WEIGHTS, "--to=npz", "--output=/proc/a.npz"], "/proc/a.npz"),
    ],
)
def test_converted_weights(words, output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("file").touch()
    err = rejected(words)

    assert WEIGHTS not in err
    assert output in err


HOMELESS = {
    "WEIGHTS": "predict ~nobody-here/w.npz .",
    "--csv": f"predict {WEIGHTS} . --csv=~nobody-here/a.csv",
    "--output": "plot runs --output=~nobody-here/a.png",
    "DESTINATION": f"convert {WEIGHTS} ~nobody-here/a.npz",
    "RUN": "plot ~nobody-here/run",
    "--class_names": f"predict {WEIGHTS} . --class_names=~nobody-here/names",
}


@pytest.mark.parametrize("line", HOMELESS.values(), ids=HOMELESS)
def test_a_home_folder_that_is_not_known(line, tmp_path, monkeypatch):
    """So is that of "~" in containers whose user has no name."""
    monkeypatch.chdir(tmp_path)
    write_pngs(tmp_path, sample_pixels(1))

    err = rejected(line.split())

    assert "~nobody-here/" in err
    assert "home folder is not known" in err
    assert len(os.listdir()) == 1


def test_data_in_an_unknown_home_folder_are_not_there():
    """Weights of others may state any data, and other images can still be evaluated."""
    assert normalize_data("folder:~nobody-here/x").endswith("/~nobody-here/x")
    assert not find_listing("folder:~nobody-here/x").exists()


LINKS = {
    "missing/a.csv": "no folder",
    "loop": "Too many levels",
    "file/a.csv": "Not a directory",
    "folder": "is a folder",
}


@pytest.mark.parametrize(("target", "rule"), LINKS.items())
def test_links_are_followed(tmp_path, target, rule):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    link = tmp_path / "loop"
    link.symlink_to(tmp_path / target)

    with rejects(f"--csv={link}", rule):
        resolve_output_file(str(link), "--csv=")


def test_a_socket_is_rejected_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path has at most 108 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        with rejects("--csv=socket", "it is a socket"):
            resolve_output_file("socket", "--csv=")


@pytest.mark.parametrize("name", ["pipe", "link"])
def test_what_is_written_into_needs_no_new_file_beside_it(
    tmp_path,
    monkeypatch,
    name,
):
    """Only root can create files in the folder of /dev/stdout and /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/proc/self/fd/1")

    def reject(**_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(outputs.tempfile, "TemporaryFile", reject)
    existing = tmp_path / name
    new = tmp_path / "file"

    found = resolve_output_file(str(existing), "--csv=")

    assert found == existing
    with rejects("--csv=", "no file can be created"):
        resolve_output_file(str(new), "--csv=")


def test_nothing_is_left_behind(tmp_path):
    file = tmp_path / "a.png"
    folder = tmp_path / "a/b"

    assert resolve_output_file(str(file)) == file
    assert resolve_output_folder(str(folder)) == folder
    assert not list(tmp_path.iterdir())
    with rejects(f"--csv={tmp_path}", "is a folder"):
        resolve_output_file(str(tmp_path), "--csv=")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EMFILE, "Too many open files", "runs/a"), "too many open files"),
        (OSError(errno.ENFILE, "Too many open files in system"), "too many open files"),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/a/config.json"),
            "runs/a/config.json: No space left",
        ),
        (OSError(errno.EIO, "Input/output error"), "runs/a: Input/output error"),
    ],
)
def test_a_system_error_names_the_file_or_the_limit(error, message):
    assert outputs.describe_system_error(error, "runs/a").startswith(message)


def test_a_full_standard_output_is_named_and_then_discarded(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(outputs.sys, "stdout", full)
        with pytest.raises(OSError, match="No space left") as raised:
            print("a line", flush=True, file=full)

        message = outputs.describe_system_error(raised.value, "runs/a")
        assert message == "standard output: No space left on device"

        full.flush()  # discarded
