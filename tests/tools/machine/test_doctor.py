"""The verb doctor: every line on a machine without faults, and with each known fault, made up."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import types

import jax
import pytest

from tests.columns import list_column
from tests.integration.commands import run
from tests.tiny import RECIPE, RUN, flags
from vit_jax import cli, hosts
from vit_jax.cli import training
from vit_jax.imports.extras import install_command
from vit_jax.tools.machine import checks, doctor, together
from vit_jax.tools.machine.bench import Part
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
    """Write the metadata of packages as NAME-VERSION, before all others on the path."""
    for distribution in distributions:
        name, version = distribution.split("-")
        path = folder / f"{distribution}.dist-info" / "METADATA"
        write(path, f"Name: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)


@pytest.mark.slow
@pytest.mark.usefixtures("enough_memory")
def test_a_machine_where_all_is_well(tmp_path, data_dir):
    # The run is shorter than the steps that are timed.
    length = ("total=3 steps", "schedule.warmup=1 steps")
    options = (f"input.data_dir={data_dir}", "logging.compilation_cache=False")
    workdir = tmp_path / "a" / "run"
    fields = flags(*RUN, *length, *options)

    outcome = run(
        [
            "doctor",
            f"--workdir={workdir}",
            f"--config={RECIPE}",
            *fields,
            "--json",
        ]
    )

    report = {}
    for findings in json.loads(outcome.out):
        report[findings[0]["name"]] = findings[0]

    found = {name: finding["found"] for name, finding in report.items()}
    wrong = []
    for name, finding in report.items():
        if finding["remedy"]:
            wrong.append(name)

    assert list(report) == [*ALWAYS, "checkpoint", "speed"]
    assert wrong in ([], ["speed"]), "the speed of this machine decides"
    assert outcome.code == len(wrong)
    assert found["speed"].startswith("input ")
    assert found["devices"] == "8 x cpu in 1 process(es), 8 of each"
    assert f"jax {jax.__version__}" in found["versions"]
    # 4,858 parameters, 4 states of 4 arrays of them.
    assert found["disk"].endswith(", checkpoints take 0.00029")
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"


@pytest.mark.usefixtures("enough_memory")
def test_text_and_exit_code(tmp_path, monkeypatch):
    """The workdir has too little room for any checkpoint, and cannot be written either."""
    monkeypatch.setattr(checks, "LEAST_DISK_BYTES", 2**80)
    (tmp_path / "file").write_text("")
    expected = [f"good   {name}" for name in ALWAYS]
    expected[ALWAYS.index("disk")] = "wrong  disk"
    expected.append("wrong  checkpoint")

    outcome = run(["doctor", f"--workdir={tmp_path / 'file' / 'run'}"])

    lines = []
    for line in outcome.out.splitlines():
        if not line.startswith(" "):
            lines.append(line)

    assert outcome.code == 1
    assert [line[:25].rstrip() for line in lines] == expected
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
            second.append(together.check_checkpoint(tmp_path))

    monkeypatch.setattr(together.CheckpointStore, "wait", examine_between)
    first = together.check_checkpoint(tmp_path)

    assert first.is_good
    assert second[1].is_good
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("word", ["--config.seed=1", "--topology=v5e:1x1"])
def test_options_that_need_a_recipe(word):
    outcome = run(["doctor", word])

    assert outcome.code == 2
    assert f"{word}: has no effect without --config" in outcome.err


def test_a_plugin_of_another_version(tmp_path, monkeypatch):
    version = jax.lib.__version__
    rule = f"jax-cuda12-plugin 0.4.1 is not of jaxlib {version}"

    install(monkeypatch, tmp_path / "old", "jax_cuda12_plugin-0.4.1")
    assert checks.check_versions().remedy.startswith(rule)

    install(
        monkeypatch,
        tmp_path / "new",
        f"jax_cuda12_plugin-{version}",
        "libtpu-0.0.1",
    )
    assert checks.check_versions().is_good


def write_nvidia_smi(folder, program):
    path = folder / "nvidia-smi"
    write(path, f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)


def test_no_driver(system, monkeypatch):
    write_nvidia_smi(system, "exit 9")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    finding = checks.check_driver(system)

    assert finding.found.startswith("neither GPU nor TPU; JAX computes on: cpu")
    assert finding.is_good


CUDA_12 = "jax_cuda12_plugin-1"


@pytest.mark.parametrize(
    ("version", "plugins", "backend", "text", "remedy"),
    [
        (
            "550.5",
            [CUDA_12, "jax_cuda12_pjrt-1", "libtpu-1"],
            "gpu",
            f"{H100}, jax-cuda12-plugin 1; JAX ",
            "",
        ),
        (
            "550.5",
            ["jax_cuda13_plugin-1"],
            "gpu",
            f"{H100}, jax-cuda13-plugin 1",
            "needs driver 580",
        ),
        (
            "470.5",
            [CUDA_12],
            "cpu",
            f"{H100}, jax-cuda12-plugin 1",
            "needs driver 525",
        ),
        (
            "550.5",
            [],
            "cpu",
            f"{H100}; JAX computes on: cpu",
            "[cuda]'",
        ),
        (
            "550.5",
            [CUDA_12],
            "cpu",
            f"{H100}, jax-cuda12-plugin 1",
            "another program may hold it",
        ),
    ],
    ids=[
        "good",
        "old for CUDA 13",
        "old for CUDA 12",
        "no plugin",
        "not used",
    ],
)
def test_drivers(
    system,
    monkeypatch,
    version,
    plugins,
    backend,
    text,
    remedy,
):
    write_nvidia_smi(system, f"echo {version}, NVIDIA H100 80GB HBM3")
    install(monkeypatch, system, *plugins)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)

    finding = checks.check_driver(system)

    assert finding.found.startswith(f"NVIDIA {version}, {text}")
    assert remedy in finding.remedy
    assert finding.is_good == (not remedy)


@pytest.mark.parametrize(
    "file",
    ["dev/accel0", "sys/bus/pci/drivers/vfio-pci/0000:00:04.0/vendor"],
)
def test_a_tpu_that_jax_does_not_use(system, monkeypatch, file):
    found = "TPU, libtpu 0.0.42; JAX computes on: cpu (JAX_PLATFORMS=cpu)"

    write(system / file, "0x1ae0\n")
    assert install_command("tpu") in checks.check_driver(system).remedy

    install(monkeypatch, system, "libtpu-0.0.42")
    assert "another program may hold it" in checks.check_driver(system).remedy

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert checks.check_driver(system).is_good, "it was asked for"
    assert checks.check_driver(system).found == found


def test_memory_of_the_host_and_of_the_container(system):
    meminfo = "MemTotal:  8388608 kB\nMemFree: 1 kB\nMemAvailable:  4194304 kB\n"
    container = system / "sys/fs/cgroup"

    write(system / "proc/meminfo", meminfo)
    assert checks.check_memory(system).found.startswith("4.0 of 8.0 GiB free")

    write(container / "memory.max", "max\n")
    write(container / "memory.current", f"{2**30}\n")
    assert checks.check_memory(system).is_good

    write(container / "memory.max", f"{2 * 2**30}\n")
    assert checks.check_memory(system).found.startswith("1.0 of 2.0 GiB free")
    assert "needs 2 GiB" in checks.check_memory(system).remedy


def test_shared_memory_and_disk_of_a_container(monkeypatch):
    free = 64 * 2**20
    workdir = pathlib.Path("/nowhere/run")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=free))

    assert checks.check_shared_memory().found == "0.06 GiB free in /dev/shm"
    assert "--shm-size" in checks.check_shared_memory().remedy
    assert "make room" in checks.check_disk(workdir).remedy
    assert checks.check_disk(workdir, lambda: free).is_good
    assert "make room" in checks.check_disk(workdir, lambda: free + 1).remedy


def test_devices_that_compute_wrongly(monkeypatch):
    """One device holds other numbers than it was given."""
    put = jax.device_put

    def put_wrongly(array, device):
        return put(array + (device.id == 3), device)

    monkeypatch.setattr(jax, "device_put", put_wrongly)

    assert checks.check_compilation().remedy.startswith(f"{jax.devices()[3]}: a wrong result")
    *_, (name, _) = doctor.examine(None, None)
    assert name == "compilation", "later checks are skipped"


def test_devices_that_sum_wrongly(monkeypatch):
    make = jax.make_array_from_callback

    def make_wrongly(shape, sharding, row):
        return make(
            shape,
            sharding,
            lambda index: row(index) + (index[0].start == 3),
        )

    monkeypatch.setattr(jax, "make_array_from_callback", make_wrongly)

    assert "the sum is wrong" in together.check_all_reduce().remedy


def test_an_input_that_is_slower_than_the_step(monkeypatch):
    run = types.SimpleNamespace(compile_train_step=lambda: None)
    monkeypatch.setattr(together, "time_step", lambda *_: Part("step", [0.1], 16))
    monkeypatch.setattr(together, "time_input", lambda *_: Part("input", [0.2], 16))

    finding = together.check_speed(lambda: (run, None))

    assert finding.found == "input 80 images/s, step 160"
    assert finding.remedy.startswith("the devices will wait")


def test_findings_of_several_processes(monkeypatch):
    others = [
        Finding("jax 1"),
        Finding("jax 2"),
        Finding("jax 1", "do this"),
    ]
    monkeypatch.setattr(hosts, "gather", lambda own: list(map(vars, others)))
    name, findings = next(doctor.examine(None, None))

    assert list_column(findings, "is_good") == [True, False, False]

    first, _ = doctor.format_findings(name, findings)
    assert first.startswith("wrong  versions          process 1: jax 2\n")
    assert "process 0 has jax 1: make all processes the same" in first


def test_every_check_that_fails_is_a_line_of_its_name(monkeypatch):
    def fail():
        raise RuntimeError("the TPU is in use")

    monkeypatch.setattr(checks, "check_devices", fail)
    *_, (name, findings) = doctor.examine(None, None)

    expected = Finding("RuntimeError: the TPU is in use", "mend what the message names")
    assert name == "devices"
    assert findings == [expected]


@pytest.fixture
def examined(monkeypatch):
    """Processes for the examination before a run; returns a function that sets their exit code.

    The returned lists have the commands of examinations and the workdirs of runs.
    """
    started = []
    trained = []

    def end_with(code):
        def popen(command):
            started.append(command)
            return types.SimpleNamespace(wait=lambda: code)

        monkeypatch.setattr(subprocess, "Popen", popen)
        return started, trained

    monkeypatch.setattr(training, "run_training", lambda loop, workdir: trained.append(workdir))
    return end_with


@pytest.mark.usefixtures("enough_memory")
def test_of_several_processes_one_that_fails_ends_all(monkeypatch):
    """The others would wait for it in the next check."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts, "gather", lambda own: [own, own])
    monkeypatch.setattr(together, "check_all_reduce", lambda: next(iter(())))
    monkeypatch.setattr(hosts, "start", lambda: None)
    outcome = run(["doctor"])

    assert outcome.code == 1
    assert outcome.err.startswith("vit-jax: all-reduce: StopIteration")

    names = []
    for line in outcome.out.splitlines():
        names.append(line.removeprefix("good   ")[:18].rstrip())

    assert names == [*ALWAYS[:5], "compilation"], "without a workdir nothing is said of disks"


@pytest.mark.parametrize(
    ("code", "expected", "is_trained"),
    [
        (0, 0, True),
        (1, 2, False),
        (75, 75, False),
        (76, 76, False),
        (-9, 137, False),
    ],
)
def test_a_run_examines_first(
    examined,
    code,
    expected,
    is_trained,
    tmp_path,
):
    """A launcher does not repeat a run with a fault that doctor finds (2), but one with a lost
    process (76).
    """
    started, trained = examined(code)
    words = [f"--config={RECIPE}", f"--workdir={tmp_path}", "--config.seed=1"]

    outcome = run(["pretrain", "--doctor", *words])

    assert started == [[sys.executable, "-P", "-m", "vit_jax", "doctor", *words]]
    assert outcome.code == expected
    assert bool(trained) == is_trained


def test_the_recipe_is_loaded_before_the_examination(examined, tmp_path):
    started, _ = examined(0)
    outcome = run(
        [
            "pretrain",
            "--doctor",
            f"--config={RECIPE}:x",
            f"--workdir={tmp_path}",
        ]
    )

    assert outcome.code == 2
    assert started == []


def test_a_signal_ends_the_examination_too(monkeypatch, tmp_path):
    killed = []

    def wait():
        raise KeyboardInterrupt

    process = types.SimpleNamespace(
        wait=wait,
        kill=lambda: killed.append(True),
    )
    monkeypatch.setattr(subprocess, "Popen", lambda command: process)
    monkeypatch.setattr(os, "_exit", sys.exit)

    outcome = run(
        [
            "pretrain",
            "--doctor",
            f"--config={RECIPE}",
            f"--workdir={tmp_path}",
        ]
    )

    assert outcome.code == 130
    assert killed == [True]
