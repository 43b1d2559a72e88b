"""Versions of installed packages are compared with the requirements of the distribution."""

import email.message
import importlib.metadata
import re

import pytest

from vit_jax.imports import requirements
from vit_jax.tools.machine import checks

REQUIRED = [
    "numpy>=2.2",
    "safetensors>=0.8.0",
    "missing-package>=1",
    'unneeded>=1; python_version < "3"',
    'extra-package>=1; extra == "gcs"',
]
INSTALLED = {"numpy": "2.4.6", "safetensors": "0.7.0"}


@pytest.fixture
def environment(monkeypatch):
    """An environment with these versions; a test may change them."""
    versions = dict(INSTALLED)

    def find_version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRED)
    monkeypatch.setattr(importlib.metadata, "version", find_version)
    return versions


def test_packages_that_are_missing_or_old_are_listed(environment):
    old, missing = requirements.list_unmet_requirements()

    assert old == "safetensors 0.7.0 is installed: pip install 'safetensors>=0.8.0'"
    assert missing == "missing-package is not installed: pip install 'missing-package>=1'"


def test_newer_packages_and_previews_are_accepted(environment):
    environment["safetensors"] = "0.9.0rc1"
    environment["missing-package"] = "1"

    assert requirements.list_unmet_requirements() == []
    assert requirements.explain_version("safetensors") == ""


@pytest.mark.parametrize(
    ("field", "address", "is_google"),
    [
        ("Home-page", "https://github.com/google-research/vision_transformer", True),
        ("Project-URL", "home, https://github.com/google-research/vision_transformer", True),
        ("Project-URL", "home, https://example.org/vit_jax", False),
    ],
)
def test_the_other_distribution_of_this_name(
    monkeypatch,
    field,
    address,
    is_google,
):
    metadata = email.message.Message()
    metadata[field] = address
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: metadata)

    sentence = requirements.find_other_distribution()

    assert sentence.startswith("google-research/vision_transformer is installed") == is_google
    assert bool(sentence) == is_google


def test_this_environment_meets_the_requirements():
    assert requirements.list_unmet_requirements() == []


def test_doctor_names_packages_that_are_old(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy>=99"])

    remedy = checks.check_versions().remedy

    assert re.fullmatch(r"numpy [\d.]+ is installed: pip install 'numpy>=99'", remedy)
