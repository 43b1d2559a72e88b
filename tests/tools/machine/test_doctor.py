"""The verb doctor: every line on a machine where all is well, and with each fault that it knows, made up."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import types

import jax
import pytest

from tests.integration.commands import run
from tests.tiny import RECIPE, RUN, flags
from vit_jax import cli, hosts
from vit_jax.cli import training
from vit_jax.imports.extras import install_command
from vit_jax.tools.machine import checks, doctor, together
from vit_jax.tools.machine.checks import Finding

ALWAYS = [
    "versions",
    "driver",
    "devices",
    "memory",
    "shared memory",
    "disk",
    "compilation",
    "all-reduce",
]
H100 = "1 x NVIDIA H100 80GB HBM3"


@pytest.fixture
def system(tmp_path, monkeypatch):
    """The root of a made-up system; packages and programs in it are the only ones."""
    monkeypatch.syspath_prepend(tmp_path)
    del sys.path[1:]  # the end of the test restores it
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def install(monkeypatch, folder, *distributions):
    """Packages as NAME-VERSION: their metadata alone, before all others on the path."""
    for distribution in distributions:
        text = "Name: {}\nVersion: {}\n".format(*distribution.split("-"))
        write(folder / f"{distribution}.dist-info" / "METADATA", text)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.slow
def test_a_machine_where_all_is_well(tmp_path, data_dir):
    short = ("total=3 steps", "schedule.warmup=1 steps")  # shorter than what is timed
    fields = flags(*RUN, *short, f"input.data_dir={data_dir}", "logging.compilation_cache=False")
    words = [f"--workdir={tmp_path / 'a' / 'run'}", f"--config={RECIPE}", *fields]
    outcome = run(["doctor", *words, "--json"])
    report = {findings[0]["name"]: findings[0] for findings in json.loads(outcome.out)}

    assert outcome.code == (1 if report["speed"]["remedy"] else 0), (
        "the speed of this machine decides"
    )
    assert list(report) == [*ALWAYS, "checkpoint", "speed"]
    assert [name for name, finding in report.items() if finding["remedy"] and name != "speed"] == []
    assert report["speed"]["found"].startswith("input ")
    assert report["devices"]["found"] == "8 x cpu in 1 process(es), 8 of each"
    assert f"jax {jax.__version__}" in report["versions"]["found"]
    # 4,858 parameters, 4 states of 4 arrays of them.
    assert report["disk"]["found"].endswith(", checkpoints take 0.00029")
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"


def test_text_and_exit_code(tmp_path, monkeypatch):
    """The workdir has too little room for any checkpoint, and cannot be written either."""
    monkeypatch.setattr(checks, "LEAST_DISK_BYTES", 2**80)
    (tmp_path / "file").write_text("")
    outcome = run(["doctor", f"--workdir={tmp_path / 'file' / 'run'}"])

    assert outcome.code == 1

    heads = [line[:25].rstrip() for line in outcome.out.splitlines() if not line.startswith(" ")]
    wrong = ("disk", "checkpoint")

    assert heads == [
        f"{'wrong' if name in wrong else 'good ':}  {name}" for name in (*ALWAYS, "checkpoint")
    ]
    assert "\n                         → make room, or choose another workdir" in outcome.out
    assert "cannot be written" in outcome.out
    assert cli.VERBS["doctor"].summary.endswith("good, or says what to do.")


def test_two_examinations_of_one_workdir(tmp_path, monkeypatch):
    """The second begins and ends while the first is between writing and reading."""
    wait = together.CheckpointStore.wait
    second = []

    def examine_between(store):
        wait(store)
        if not second:
            second.append(None)
            second.append(together.checkpoint(tmp_path))

    monkeypatch.setattr(together.CheckpointStore, "wait", examine_between)

    assert together.checkpoint(tmp_path).is_good
    assert second[1].is_good
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("word", ["--config.seed=1", "--topology=v5e:1x1"])
def test_what_needs_a_recipe(word):
    outcome = run(["doctor", word])
    assert (outcome.code, f"{word}: has no effect without --config" in outcome.err) == (2, True)


def test_a_plugin_of_another_version(tmp_path, monkeypatch):
    install(monkeypatch, tmp_path / "old", "jax_cuda12_plugin-0.4.1")
    assert checks.versions().remedy.startswith(
        f"jax-cuda12-plugin 0.4.1 is not of jaxlib {jax.lib.__version__}"
    )

    install(
        monkeypatch, tmp_path / "new", f"jax_cuda12_plugin-{jax.lib.__version__}", "libtpu-0.0.1"
    )
    assert checks.versions().is_good


@pytest.mark.parametrize(
    ("version", "plugins", "backend", "text", "remedy"),
    [
        ("", "", "cpu", "neither GPU nor TPU; JAX computes on: cpu", ""),
        (
            "550.5",
            "jax_cuda12_plugin-1 jax_cuda12_pjrt-1 libtpu-1",
            "gpu",
            f"{H100}, jax-cuda12-plugin 1; JAX ",
            "",
        ),
        ("550.5", "jax_cuda13_plugin-1", "gpu", f"{H100}, jax-cuda13-plugin 1", "needs driver 580"),
        ("470.5", "jax_cuda12_plugin-1", "cpu", f"{H100}, jax-cuda12-plugin 1", "needs driver 525"),
        ("550.5", "", "cpu", f"{H100}; JAX computes on: cpu", install_command("cuda")),
        (
            "550.5",
            "jax_cuda12_plugin-1",
            "cpu",
            f"{H100}, jax-cuda12-plugin 1",
            "another program may hold it",
        ),
    ],
)
def test_drivers(system, monkeypatch, version, plugins, backend, text, remedy):
    program = f"echo {version}, NVIDIA H100 80GB HBM3" if version else "exit 9"
    write(system / "nvidia-smi", f"#!/bin/sh\n{program}\n")
    (system / "nvidia-smi").chmod(0o755)
    install(monkeypatch, system, *plugins.split())
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    finding = checks.driver(system)

    assert finding.found.startswith(f"NVIDIA {version}, {text}" if version else text)
    assert (remedy in finding.remedy) if remedy else finding.is_good


@pytest.mark.parametrize("file", ["dev/accel0", "sys/bus/pci/drivers/vfio-pci/0000:00:04.0/vendor"])
def test_a_tpu_that_jax_does_not_use(system, monkeypatch, file):
    write(system / file, "0x1ae0\n")
    assert install_command("tpu") in checks.driver(system).remedy

    install(monkeypatch, system, "libtpu-0.0.42")
    assert "another program may hold it" in checks.driver(system).remedy

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert checks.driver(system).is_good, "it was asked for"
    assert (
        checks.driver(system).found
        == "TPU, libtpu 0.0.42; JAX computes on: cpu (JAX_PLATFORMS=cpu)"
    )


def test_memory_of_the_host_and_of_the_container(system):
    write(
        system / "proc/meminfo", "MemTotal:  8388608 kB\nMemFree: 1 kB\nMemAvailable:  4194304 kB\n"
    )
    assert checks.memory(system).found.startswith("4.0 of 8.0 GiB free")

    write(system / "sys/fs/cgroup/memory.max", "max\n")
    write(system / "sys/fs/cgroup/memory.current", f"{2**30}\n")

    assert checks.memory(system).is_good

    write(system / "sys/fs/cgroup/memory.max", f"{2 * 2**30}\n")
    assert checks.memory(system).found.startswith("1.0 of 2.0 GiB free")
    assert "needs 2 GiB" in checks.memory(system).remedy


def test_shared_memory_of_a_container(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=64 * 2**20))

    assert checks.shared_memory().found == "0.06 GiB free in /dev/shm"
    assert "--shm-size" in checks.shared_memory().remedy
    assert "make room" in checks.disk(pathlib.Path("/nowhere/run")).remedy
    assert checks.disk(pathlib.Path("/nowhere/run"), lambda: 64 * 2**20).is_good
    assert "make room" in checks.disk(pathlib.Path("/nowhere/run"), lambda: 64 * 2**20 + 1).remedy


def test_devices_that_compute_wrongly(monkeypatch):
    """One holds other numbers than it was given."""
    put = jax.device_put
    make = jax.make_array_from_callback
    monkeypatch.setattr(
        jax, "device_put", lambda array, device: put(array + (device.id == 3), device)
    )

    assert checks.compilation().remedy.startswith(f"{jax.devices()[3]}: a wrong result")
    assert [name for name, _ in doctor.examine(None, None)][-1] == "compilation", "the rest is left"

    def made(shape, sharding, row):
        return make(shape, sharding, lambda index: row(index) + (index[0].start == 3))

    monkeypatch.setattr(jax, "make_array_from_callback", made)

    assert "the sum is wrong" in together.all_reduce().remedy


def test_an_input_that_is_slower_than_the_step(monkeypatch):
    from vit_jax.tools.machine.bench import Part

    parts = {"step": Part("step", [0.1], 16), "input": Part("input", [0.2], 16)}
    for name, part in parts.items():
        monkeypatch.setattr(together, f"time_{name}", lambda *_, part=part: part)

    run = types.SimpleNamespace(compile_train_step=lambda: None)
    finding = together.speed(lambda: (run, None))

    assert finding.found == "input 80 images/s, step 160"
    assert finding.remedy.startswith("the devices will wait")


def test_findings_of_several_processes(monkeypatch):
    others = [Finding("jax 1"), Finding("jax 2"), Finding("jax 1", "do this")]
    monkeypatch.setattr(hosts, "gather", lambda own: list(map(vars, others)))
    name, findings = next(doctor.examine(None, None))

    assert [finding.is_good for finding in findings] == [True, False, False]

    first, _ = doctor.lines(name, findings)
    assert first.startswith("wrong  versions          process 1: jax 2\n")
    assert "process 0 has jax 1: make all processes the same" in first


def test_every_check_that_fails_is_a_line_of_its_name(monkeypatch):
    def devices():
        raise RuntimeError("the TPU is in use")

    monkeypatch.setattr(checks, "devices", devices)
    *_, (name, findings) = doctor.examine(None, None)

    assert (name, findings) == (
        "devices",
        [Finding("RuntimeError: the TPU is in use", "mend what the message names")],
    )


def test_of_several_processes_one_that_fails_ends_all(monkeypatch):
    """The others would wait for it in the next check."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts, "gather", lambda own: [own, own])
    monkeypatch.setattr(together, "all_reduce", lambda: next(iter(())))
    monkeypatch.setattr(hosts, "start", lambda: None)
    outcome = run(["doctor"])

    assert outcome.code == 1
    assert outcome.err.startswith("vit-jax: all-reduce: StopIteration")

    names = [line.removeprefix("good   ")[:18].rstrip() for line in outcome.out.splitlines()]
    assert names == [*ALWAYS[:5], "compilation"], "without a workdir nothing is said of disks"


@pytest.mark.parametrize(("code", "expected"), [(0, None), (1, 2), (75, 75), (76, 76), (-9, 137)])
def test_a_run_examines_first(monkeypatch, code, expected, tmp_path):
    """What doctor finds is not repeated by a launcher (2); a lost process is (76)."""
    started = []
    trained = []

    def popen(command):
        started.append(command)
        return types.SimpleNamespace(wait=lambda: code)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(training, "run_training", lambda loop, workdir: trained.append(workdir))
    words = [f"--config={RECIPE}", f"--workdir={tmp_path}", "--config.seed=1"]
    outcome = run(["pretrain", "--doctor", *words])

    assert started == [[sys.executable, "-P", "-m", "vit_jax", "doctor", *words]]
    assert (outcome.code, bool(trained)) == ((0, True) if expected is None else (expected, False))
    assert run(["pretrain", "--doctor", f"--config={RECIPE}:x", f"--workdir={tmp_path}"]).code == 2
    assert len(started) == 1, "the recipe is loaded before"


def test_a_signal_ends_the_examination_too(monkeypatch, tmp_path):
    killed = []

    def wait():
        raise KeyboardInterrupt

    doctor = types.SimpleNamespace(wait=wait, kill=lambda: killed.append(True))
    monkeypatch.setattr(subprocess, "Popen", lambda command: doctor)
    monkeypatch.setattr(os, "_exit", sys.exit)

    assert run(["pretrain", "--doctor", f"--config={RECIPE}", f"--workdir={tmp_path}"]).code == 130
    assert killed == [True]
