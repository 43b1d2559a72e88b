"""Processes that do not find each other, or no common workdir, end with the reason."""

import socket

import pytest

from tests.data.packed_files import image
from tests.integration.commands import finish, pretraining, start, start_all
from tests.integration.launchers import explicit

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("process_id", "message"),
    [
        (1, "found no process at {address}, the address of process 0"),
        (0, "Not all processes came within 2 s"),
    ],
)
def test_others_that_do_not_come_are_reported(
    data_dir,
    tmp_path,
    process_id,
    message,
):
    environment = explicit(2)[process_id]
    words = pretraining(data_dir, tmp_path)

    (outcome,) = finish([start(words, **environment, VIT_JAX_JOIN_SECONDS="2")])

    assert outcome.code == 76
    assert message.format(address=environment["VIT_JAX_COORDINATOR"]) in outcome.err


def test_a_port_that_is_taken_is_reported(data_dir, tmp_path):
    environment = explicit(2)[0]
    port = environment["VIT_JAX_COORDINATOR"].rpartition(":")[2]
    words = pretraining(data_dir, tmp_path)

    with socket.socket() as other:
        other.bind(("", int(port)))
        other.listen()
        (outcome,) = finish([start(words, **environment, VIT_JAX_JOIN_SECONDS="2")])

    assert outcome.code == 76
    assert f"waits for port {port}, which another program still holds" in outcome.err


def test_a_workdir_that_is_not_shared_is_noticed(data_dir, tmp_path):
    processes = []
    for environment, name in zip(explicit(2), "ab", strict=True):
        words = pretraining(data_dir, tmp_path / name)
        processes.append(start(words, devices=1, **environment))

    for outcome in finish(processes):
        assert outcome.code == 2, outcome.err
        assert "is not the same folder in every process" in outcome.err


def write_photos(home, first_level):
    """Write forty images of ten classes; half of them depend on the first level."""
    for number in range(20):
        path = home / "photos" / str(number % 10) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image(first_level + number))
        path.with_name(f"{number + 100}.png").write_bytes(image(50))


def test_other_images_under_the_same_names_are_noticed(data_dir, tmp_path):
    """Two hosts have different copies of a dataset: names, sizes and labels are equal."""
    words = pretraining(
        data_dir,
        tmp_path / "run",
        "data=folder:~/photos",
        "input.holdout_fraction=0.5",
    )

    processes = []
    for host, environment in enumerate(explicit(2)):
        home = tmp_path / str(host)
        write_photos(home, 10 * host)
        processes.append(start(words, devices=1, **environment, HOME=str(home)))

    for outcome in finish(processes):
        assert outcome.code == 2, outcome.err
        assert "compared training images have other bytes or labels: " in outcome.err
    assert not (tmp_path / "run").exists()


def test_a_workdir_that_the_first_process_rejects_ends_both(data_dir, tmp_path):
    (tmp_path / "file").write_text("")
    words = pretraining(data_dir, tmp_path / "file" / "run")

    first, second = finish(start_all(words, explicit(2)))

    assert first.code == 2, first
    assert second.code == 2, second
    assert "cannot be written" in first.err
