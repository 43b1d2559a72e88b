"""Versions of the installed packages beside those that the distribution requires."""

import importlib.metadata

from packaging.requirements import Requirement

DISTRIBUTION = "vit_jax"


def list_unmet_requirements() -> list[str]:
    """Return a sentence for each required package that is missing or of another version.

    Extras are not considered. Empty if the package was not installed as a distribution.
    """
    sentences = []
    for requirement in _list_requirements():
        sentence = _compare(requirement)
        if sentence:
            sentences.append(sentence)
    return sentences


def explain_version(package: str) -> str:
    """Return a sentence if a required package is of another version than required, or ""."""
    for requirement in _list_requirements():
        if requirement.name == package:
            return _compare(requirement)
    return ""


def find_other_distribution() -> str:
    """Return a sentence if the installed distribution is Google's package of this name, or ""."""
    try:
        metadata = importlib.metadata.metadata(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return ""
    addresses = [*(metadata.get_all("Home-page") or []), *(metadata.get_all("Project-URL") or [])]
    if not any("google-research/vision_transformer" in address for address in addresses):
        return ""
    return (
        "google-research/vision_transformer is installed, whose package is named vit_jax too: "
        "install this code into a separate environment"
    )


def _list_requirements() -> list[Requirement]:
    """Return the requirements of this environment, without those of extras."""
    try:
        texts = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return []
    requirements = []
    for text in texts:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirements.append(requirement)
    return requirements


def _compare(requirement: Requirement) -> str:
    """Return a sentence on the installed version if it does not meet a requirement, or ""."""
    needed = f"{requirement.name}{requirement.specifier}"
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed: pip install '{needed}'"
    if requirement.specifier.contains(version, prereleases=True):
        return ""
    return f"{requirement.name} {version} is installed: pip install '{needed}'"
