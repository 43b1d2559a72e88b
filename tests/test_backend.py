"""Platforms of JAX that do not start: one message in every verb."""

import json
import subprocess
import sys

import pytest

from tests.integration.commands import environment_of
from tests.rejections import rejects
from tests.tiny import ROOT
from vit_jax import backend, cli, hosts
from vit_jax.backend import BackendError, explained_backend

XLA_BRIDGE = {"__name__": "jax._src.xla_bridge"}
exec("def backends(error): raise error", XLA_BRIDGE)


def fail(platforms, monkeypatch, found, error=None):
    """As JAX does, with these plugins installed."""
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(backend, "_found_plugins", lambda: dict.fromkeys(found, "1.2"))
    with explained_backend():
        XLA_BRIDGE["backends"](error or RuntimeError("Unable to initialize backend"))


@pytest.mark.parametrize(
    ("platforms", "found", "rule"),
    [
        ("cuda", (), "'cuda' is not installed.*jaxlib.*plugins: none.*unset JAX_PLATFORMS.*pip install -U 'jax.cuda.'"),
        ("gpu", ("libtpu",), "'gpu' is not installed.*plugins: libtpu 1.2.*'jax.cuda.'"),
        ("cpu,tpu", ("jax-cuda12-plugin",), "'tpu' is not installed.*'jax.tpu.'"),
        ("rocm", (), "'rocm' is not installed.*install its plugin"),
        ("bogus", ("libtpu",), "'bogus' is not installed.*choose one of cpu, cuda, rocm, tpu"),
    ],
)
def test_a_platform_that_is_not_installed(platforms, found, rule, monkeypatch):
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
def test_an_installed_platform_that_does_not_start_may_start_later(platforms, found, advice, monkeypatch):
    """No ValueError: its exit code is 1, after which launchers try again."""
    with pytest.raises(BackendError, match=f"(?s)the devices cannot be used.*Unable to initialize.*{advice}"):
        fail(platforms, monkeypatch, found)


def test_other_errors_stay_as_they_are(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "bogus")
    with pytest.raises(RuntimeError, match=r"^other$"), explained_backend():
        raise RuntimeError("other")


def test_the_other_processes_of_a_run_hear_the_same_message(monkeypatch):
    heard = []
    monkeypatch.setattr(hosts, "_this_process", type("Peers", (), {"fail": staticmethod(heard.append)}))
    with rejects("JAX_PLATFORMS=bogus"), hosts.ends_together():
        fail("bogus", monkeypatch, ())
    assert "JAX_PLATFORMS=bogus" in str(heard[0])


def test_exit_codes(monkeypatch, capsys):
    for found, code in (((), 2), (("libtpu",), 1)):
        monkeypatch.setattr(cli, "_find", lambda verb, found=found: lambda rest: fail("tpu", monkeypatch, found))
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
    workdir, image = str(tiny_run.workdir), str(ROOT / "docs/figures")
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
    messages = [line for line in ended.stderr.splitlines() if line.startswith("vit-jax: ")]
    assert all(line.startswith(f"vit-jax: JAX_PLATFORMS={platform}: the platform") for line in messages), ended.stderr
    assert [line.split()[:2] for line in ended.stderr.splitlines() if line[0].isdigit()] == [
        ["2", words[0]] for words in verbs
    ]
    assert len(messages) == len(verbs)
