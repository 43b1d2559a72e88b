"""The default platform of JAX, and one message in every verb for a platform that does not start."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

from tests.integration.commands import HANG_SECONDS, environment_of
from tests.rejections import rejects
from tests.tiny import ROOT
from vit_jax import cli, hosts
from vit_jax.imports import backend
from vit_jax.imports.backend import BackendError, explain_backend_errors

XLA_BRIDGE = {"__name__": "jax._src.xla_bridge"}
exec("def backends(error): raise error", XLA_BRIDGE)


def fail(platforms, monkeypatch, found, error=None):
    """Fail as JAX does, with these plugins installed."""
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(
        backend,
        "_find_all_plugins",
        lambda: dict.fromkeys(found, "1.2"),
    )

    with explain_backend_errors():
        XLA_BRIDGE["backends"](error or RuntimeError("Unable to initialize backend"))


@pytest.mark.parametrize(
    ("platforms", "found", "rule"),
    [
        (
            "cuda",
            (),
            "'cuda' is not installed.*jaxlib.*plugins: none.*unset JAX_PLATFORMS.*pip install -U 'jax.cuda.'",
        ),
        ("gpu", ("libtpu",), "'gpu' is not installed.*plugins: libtpu 1.2.*'jax.cuda.'"),
        ("cpu,tpu", ("jax-cuda12-plugin",), "'tpu' is not installed.*'jax.tpu.'"),
        ("rocm", (), "'rocm' is not installed.*install its plugin"),
        ("bogus", ("libtpu",), "'bogus' is not installed.*choose one of cpu, cuda, rocm, tpu"),
    ],
)
def test_a_platform_that_is_not_installed(
    platforms,
    found,
    rule,
    monkeypatch,
):
    with rejects(f"JAX_PLATFORMS={platforms}", rule):
        fail(platforms, monkeypatch, found, AssertionError())


@pytest.mark.parametrize(
    ("platforms", "found", "advice"),
    [
        ("tpu", ("libtpu",), "unset JAX_PLATFORMS"),
        ("cuda", ("jax-cuda12-plugin",), "unset JAX_PLATFORMS"),
        ("gpu", ("jax-cuda12-plugin",), "unset JAX_PLATFORMS"),
        ("own", ("own-accelerator",), "unset JAX_PLATFORMS"),
        ("", ("libtpu",), "JAX_PLATFORMS=cpu"),
    ],
)
def test_an_installed_platform_that_does_not_start_may_start_later(
    platforms,
    found,
    advice,
    monkeypatch,
):
    """No ValueError: its exit code is 1, after which launchers try again."""
    monkeypatch.setattr(backend, "NVIDIA_DEVICES", ("proc",))  # a GPU is there
    with pytest.raises(
        BackendError,
        match=f"(?s)the devices cannot be used.*Unable to initialize.*{advice}",
    ):
        fail(platforms, monkeypatch, found)


def test_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.setattr(backend, "NVIDIA_DEVICES", ("no-such-device*",))
    with pytest.raises(BackendError, match="JAX_PLATFORMS=cuda: this machine shows no NVIDIA GPU"):
        fail("cuda", monkeypatch, ("jax-cuda12-plugin",))


def test_other_errors_stay_as_they_are(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "bogus")
    with pytest.raises(RuntimeError, match=r"^other$"), explain_backend_errors():
        raise RuntimeError("other")


def test_the_other_processes_of_a_run_hear_the_same_message(monkeypatch):
    heard = []
    monkeypatch.setattr(
        hosts,
        "_this_process",
        type("PeerMonitor", (), {"fail": staticmethod(heard.append)}),
    )

    with rejects("JAX_PLATFORMS=bogus"), hosts.ends_together():
        fail("bogus", monkeypatch, ())

    assert "JAX_PLATFORMS=bogus" in str(heard[0])


def test_exit_codes(monkeypatch, capsys):
    for found, code in (((), 2), (("libtpu",), 1)):
        monkeypatch.setattr(
            cli,
            "_find",
            lambda verb, found=found: lambda rest: fail("tpu", monkeypatch, found),
        )
        with pytest.raises(SystemExit) as end:
            cli.main(["doctor"])

        assert end.value.code == code
        assert capsys.readouterr().err.startswith("vit-jax: JAX_PLATFORMS=tpu: ")


EACH = """
import json, sys
from vit_jax import cli

for words in json.loads(sys.argv[1]):
    try:
        cli.main(words)
    except SystemExit as end:
        print(end.code, *words, file=sys.stderr, flush=True)
"""


@pytest.mark.processes
@pytest.mark.newest
@pytest.mark.parametrize("platform", ["bogus", "cuda"])
def test_every_verb_that_needs_devices(platform, tmp_path, tiny_run):
    if any(platform in name for name in backend.plugins()):
        pytest.skip(f"{platform} is installed here")

    workdir = str(tiny_run.workdir)
    image = str(ROOT / "docs/figures")
    verbs = [
        ["doctor"],
        ["pretrain", "--config=digits", f"--workdir={tmp_path / 'a'}"],
        [
            "finetune",
            "--config=digits_transfer:finetune",
            f"--workdir={tmp_path / 'b'}",
            f"--config.init_from={workdir}",
        ],
        ["lr-range", "--config=digits", f"--output={tmp_path / 'c.png'}"],
        ["bench", "--config=digits"],
        ["study", "positions", "--config=digits_studies", f"--workdir={tmp_path / 'd'}"],
        ["evaluate", workdir, "--data=digits"],
        ["predict", workdir, image],
        ["export", workdir, "--to=stablehlo", f"--output={tmp_path / 'f.stablehlo'}"],
        *([verb, workdir, "--data=digits"] for verb in ("fewshot", "probe", "knn")),
        ["features", workdir, "--data=digits", f"--output={tmp_path / 'g.npz'}"],
        ["inspect", workdir, "filters", f"--output={tmp_path / 'h'}"],
        ["report", workdir, f"--output={tmp_path / 'i.html'}"],
    ]
    ended = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps(verbs)],
        env=environment_of(1) | {"JAX_PLATFORMS": platform},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert "Traceback" not in ended.stderr, ended.stderr

    messages = []
    for line in ended.stderr.splitlines():
        if line.startswith("vit-jax: "):
            messages.append(line)

    assert all(
        line.startswith(f"vit-jax: JAX_PLATFORMS={platform}: the platform") for line in messages
    ), ended.stderr

    expected = [["2", words[0]] for words in verbs]
    results = []
    for line in ended.stderr.splitlines():
        if line[0].isdigit():
            results.append(line.split()[:2])
    assert results == expected
    assert len(messages) == len(verbs)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without devices, with libtpu and without plugins; the function that decides."""
    specs = {
        "libtpu": object(),
        "jax_plugins": types.SimpleNamespace(submodule_search_locations=[tmp_path / "plugins"]),
    }
    monkeypatch.setattr(importlib.util, "find_spec", specs.__getitem__)
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: plugins,
    )
    plugins = []

    def add(file):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("0x1ae0\n")

    def add_module(name):
        (tmp_path / "plugins" / name).mkdir(parents=True)
        (tmp_path / "plugins" / name / "__init__.py").touch()

    def decide(**environment):
        return backend.default_platforms(environment, tmp_path)

    return types.SimpleNamespace(
        decide=decide,
        add=add,
        add_module=add_module,
        specs=specs,
        plugins=plugins,
        root=tmp_path,
    )


def test_without_any_hint_it_is_the_cpu(machine):
    assert machine.decide(HOME="/root") == "cpu"
    assert machine.decide(JAX_PLATFORMS="") == "cpu"
    assert (
        machine.decide(TPU_SKIP_MDS_QUERY="1", TPU_LIBRARY_PATH="libtpu.so") == "cpu"
    )  # which JAX sets

    machine.add("sys/bus/pci/drivers/gvnic/0000:00:04.0/vendor")  # a Google VM's network card

    assert machine.decide() == "cpu"


@pytest.mark.parametrize(
    "file",
    [
        *("dev/accel0", "dev/vfio/0", "dev/nvidia0", "dev/nvhost-gpu", "dev/dxg", "dev/kfd"),
        "sys/bus/pci/drivers/vfio-pci/0000:00:05.0/vendor",
    ],
)
def test_with_a_device_jax_decides(machine, file):
    machine.add(file)
    assert machine.decide() == ""


@pytest.mark.parametrize("name", ["TPU_NAME", "TPU_WORKER_ID", "JAX_FORCE_TPU_INIT"])
def test_with_a_variable_of_tpus_jax_decides(machine, name):
    assert machine.decide(**{name: "0"}) == ""


def test_choices_of_a_user_stay(machine):
    assert machine.decide(JAX_PLATFORMS="tpu,cpu") == ""


def test_with_a_plugin_or_without_libtpu_jax_decides(machine):
    machine.plugins.append(types.SimpleNamespace(name="metal"))

    assert machine.decide() == ""

    machine.plugins.clear()
    machine.add_module("metal")

    assert machine.decide() == ""

    machine.specs |= {"jax_plugins": None, "libtpu": None}

    assert machine.decide() == ""


@pytest.mark.parametrize(
    "libtpu",
    [
        None,
        object(),
    ],
)
def test_the_plugin_for_cuda_without_a_gpu_is_the_cpu(machine, libtpu):
    machine.specs["libtpu"] = libtpu
    machine.add_module("xla_cuda12")
    machine.plugins.append(types.SimpleNamespace(name="xla_cuda12"))

    assert machine.decide() == "cpu"

    machine.add("dev/nvidia0")

    assert machine.decide() == ""


@pytest.mark.parametrize(
    ("platforms", "file", "expected"),
    [
        ("", None, True),
        ("cpu", "dev/nvidia0", True),
        ("", "dev/nvidia0", False),
        ("tpu,cpu", None, False),
        ("cuda", None, False),
    ],
)
def test_only_cpus_are_used_where_asked_or_without_another_device(
    machine,
    platforms,
    file,
    expected,
):
    if file:
        machine.add(file)

    assert backend.uses_only_cpus({"JAX_PLATFORMS": platforms}, machine.root) == expected


@pytest.mark.parametrize(
    ("platforms", "file", "is_hidden"),
    [
        ("", None, True),
        ("cpu", None, True),
        ("tpu,cpu", None, True),
        ("cuda", None, False),
        ("cpu, gpu", None, False),
        ("", "dev/nvidia0", False),
    ],
)
def test_the_plugin_for_cuda_is_hidden_without_a_gpu(
    machine,
    monkeypatch,
    platforms,
    file,
    is_hidden,
):
    modules = {}
    monkeypatch.setattr(backend, "sys", types.SimpleNamespace(modules=modules))

    if file:
        machine.add(file)

    backend.hide_cuda({"JAX_PLATFORMS": platforms}, machine.root)

    assert ("jax_cuda12_plugin" in modules) == is_hidden
    assert ("jax_plugins.xla_cuda13" in modules) == is_hidden

    if is_hidden:
        modules["jax_plugins.xla_cuda12"].initialize()  # as JAX does


@pytest.mark.tools
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.skipif(
    backend.default_platforms({}, pathlib.Path("/")) == "",
    reason="there may be an accelerator",
)
def test_a_command_prints_no_errors_of_absent_accelerators():
    variables = {}
    for name, value in os.environ.items():
        if name != "JAX_PLATFORMS":
            variables[name] = value

    result = subprocess.run(
        [sys.executable, "-m", "vit_jax", "doctor"],
        env=variables
        | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},  # also while another program holds libtpu's lock
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=HANG_SECONDS,
    )

    assert result.returncode == 0
    assert result.stderr == "next: vit-jax pretrain digits\n"
