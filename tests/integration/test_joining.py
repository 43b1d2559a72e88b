"""Processes that do not find each other, or no common workdir, end with the reason."""

import socket

import pytest

from tests.data.packed_files import image
from tests.integration.commands import finish, pretraining, start, start_all
from tests.integration.launchers import explicit

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (1, "found no process at {address}, the address of process 0"),
        (0, "Not all processes came within 2 s"),
    ],
)
def test_others_that_do_not_come_are_reported(data_dir, tmp_path, own, message):
    environment = explicit(2)[own]
    (outcome,) = finish(
        [start(pretraining(data_dir, tmp_path), **environment, VIT_JAX_JOIN_SECONDS="2")]
    )

    assert outcome.code == 76
    assert message.format(address=environment["VIT_JAX_COORDINATOR"]) in outcome.err


def test_a_port_that_is_taken_is_reported(data_dir, tmp_path):
    environment = explicit(2)[0]
    with socket.socket() as other:
        port = environment["VIT_JAX_COORDINATOR"].rpartition(":")[2]
        other.bind(("", int(port)))
        other.listen()
        (outcome,) = finish(
            [start(pretraining(data_dir, tmp_path), **environment, VIT_JAX_JOIN_SECONDS="2")]
        )

    assert outcome.code == 76
    assert f"waits for port {port}, which another program still holds" in outcome.err


def test_a_workdir_that_is_not_shared_is_noticed(data_dir, tmp_path):
    commands = [pretraining(data_dir, tmp_path / name) for name in "ab"]
    for outcome in finish(
        [start(words, devices=1, **own) for words, own in zip(commands, explicit(2), strict=True)]
    ):
        assert outcome.code == 2, outcome.err
        assert "is not the same folder in every process" in outcome.err


def test_other_images_under_the_same_names_are_noticed(data_dir, tmp_path):
    """As two hosts whose copies of a dataset differ: names, sizes and labels are equal."""
    commands = []
    for host in (0, 1):
        for number in range(20):
            path = tmp_path / str(host) / "photos" / str(number % 10) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image(10 * host + number))
            path.with_name(f"{number + 100}.png").write_bytes(image(50))

    words = pretraining(
        data_dir,
        tmp_path / "run",
        "data=folder:~/photos",
        "input.holdout_fraction=0.5",
    )
    for host, own in enumerate(explicit(2)):
        commands.append(start(words, devices=1, **own, HOME=str(tmp_path / str(host))))

    for outcome in finish(commands):
        assert outcome.code == 2, outcome.err
        assert "compared training images have other bytes or labels: " in outcome.err

    assert not (tmp_path / "run").exists()


def test_a_workdir_that_the_first_process_rejects_ends_both(data_dir, tmp_path):
    (tmp_path / "file").write_text("")
    outcomes = finish(start_all(pretraining(data_dir, tmp_path / "file" / "run"), explicit(2)))

    assert [outcome.code for outcome in outcomes] == [2, 2], outcomes
    assert "cannot be written" in outcomes[0].err
