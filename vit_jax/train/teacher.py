"""The teacher of a distillation: a frozen network, beside the state of a run.

Checkpoints do not hold it. They record its digest, which a resumed run compares.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import hosts, pytree
from vit_jax.config import Architecture, InputConfig, RunConfig
from vit_jax.config.network_options import ComputeDtype
from vit_jax.data.decoding.bands import BandChoice, choose_bands, read_bands
from vit_jax.models import abstract_model
from vit_jax.sharding import shard_tree
from vit_jax.storage.files import JsonObject
from vit_jax.train.step import TeacherNetwork
from vit_jax.train.step_compiler import Leaves, StepCompiler, set_shardings
from vit_jax.weights import Weights, load_weights

FIELD = "config.objective.teacher"
_SCALE_TOLERANCE = 0.1
"""Part of a standard deviation: scales are measured on samples of images."""


@dataclasses.dataclass(frozen=True, eq=False)
class Teacher:
    """A frozen network whose predictions a run learns.

    Attributes:
      name: its weights, as the config names them.
      weights: its parameters, class names and network as stored.
      abstract: its network as the step computes it, with shapes, dtypes and shardings.
    """

    name: str
    weights: Weights
    abstract: TeacherNetwork

    @property
    def architecture(self) -> Architecture:
        """The network as the step computes it."""
        return self.abstract.architecture

    @functools.cached_property
    def sha256(self) -> str:
        """The digest of the parameters."""
        return pytree.parameters_sha256(self.weights.parameters)

    @property
    def metadata(self) -> JsonObject:
        """The name and the digest, for the metadata of checkpoints."""
        return {"name": self.name, "sha256": self.sha256}

    @functools.cached_property
    def network(self) -> TeacherNetwork:
        """The network with its parameters on the devices of the run."""
        placed = pytree.map_with_names(self._place, self.abstract.network)
        return dataclasses.replace(self.abstract, network=placed)

    @property
    def leaves(self) -> Leaves:
        """The parameters on the devices by name."""
        return pytree.name_leaves(self.network)

    @property
    def abstract_leaves(self) -> Leaves:
        """The shapes, dtypes and shardings of the parameters by name."""
        return pytree.name_leaves(self.abstract)

    def _place(self, name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        """Return a parameter on the devices; each process supplies the shards of its devices."""
        array = self.weights.parameters[name].astype(leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: array[index])

    def require_classes(self, class_names: Sequence[str]) -> None:
        """Raise ValueError unless its outputs are these classes in order, in every process alike."""
        there = self.weights.class_names
        if there is not None and tuple(there) != tuple(class_names):
            raise ValueError(
                f"{FIELD}={self.name!r}: must have the classes of the data in their order, "
                f"{list(class_names)[:10]}, and has {list(there)[:10]}. Use weights that were "
                "trained on these classes."
            )
        if len(set(hosts.gather(self.sha256))) > 1:
            raise ValueError(f"{FIELD}={self.name!r}: must be the same file in all processes.")


def read_teacher(config: RunConfig) -> Weights:
    """Return the weights of the teacher.

    Raises:
      ValueError: they do not exist, cannot be read, or have no classes.
    """
    name = config.objective.teacher
    assert name is not None, "the caller checks it"
    try:
        return load_weights(name, allow_code=config.allow_code)
    except ValueError as error:
        raise ValueError(f"{FIELD}={name!r}: {error}") from None


def choose_dtype(platform: str) -> ComputeDtype:
    """Return the dtype of a teacher on a platform."""
    return "float32" if platform == "cpu" else "bfloat16"


def count_bytes(weights: Weights, platform: str) -> int:
    """Return the memory of the parameters of a teacher on one device that holds all of them."""
    itemsize = jnp.dtype(choose_dtype(platform)).itemsize
    return sum(array.size * itemsize for array in weights.parameters.values())


def build_teacher(
    config: RunConfig,
    weights: Weights,
    student: Architecture,
    compiler: StepCompiler,
) -> Teacher:
    """Lay a teacher out on the devices, in bfloat16; on CPUs in float32.

    Raises:
      ValueError: its classes, channels, bands or their scale are not those of the student.
    """
    name = str(config.objective.teacher)
    _require_same_sizes(name, weights.architecture, student)
    _require_same_bands(name, weights, config.input)
    dtype = choose_dtype(compiler.platform)
    architecture = dataclasses.replace(
        weights.architecture,
        compute_dtype=dtype,
        remat="none",
        scan_unroll=1,
        attention="auto",
    )

    model = abstract_model(architecture)
    strategy = config.sharding.parameters
    try:
        shardings = shard_tree(model, compiler.mesh, strategy)
    except ValueError:  # FSDP would split less than half of it
        shardings = shard_tree(model, compiler.mesh, "replicated")
    frozen = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)), model)
    network = TeacherNetwork(set_shardings(frozen, shardings), architecture)
    return Teacher(name, weights, network)


def _require_same_sizes(name: str, teacher: Architecture, student: Architecture) -> None:
    """Raise ValueError for a teacher with other classes or channels than the student."""
    sizes: Mapping[str, tuple[int, int]] = {
        "classes": (teacher.num_classes, student.num_classes),
        "channels": (teacher.channels, student.channels),
    }
    for what, (there, here) in sizes.items():
        if there != here:
            raise ValueError(
                f"{FIELD}={name!r}: must have the {here} {what} of the run, and has {there}. "
                f"Use weights with {here} {what}."
            )


def _require_same_bands(name: str, weights: Weights, inputs: InputConfig) -> None:
    """Raise ValueError for a teacher that states other bands, or another scale, than the run has.

    A config whose channels are not measured yet has no scale.
    """
    there = read_bands(weights.preprocessing)
    if there is None:
        return
    here = choose_bands(inputs)
    bands_there = there.list_numbers()
    bands_here = None
    if here is not None:
        bands_here = here.list_numbers()
    if here is None or bands_there != bands_here:
        numbers = ",".join(map(str, bands_there))
        raise ValueError(
            f"{FIELD}={name!r}: must have the bands of the run, {bands_here or 'RGB'}, and has "
            f"{bands_there}. Set config.input.bands={numbers}, or use other weights."
        )
    if not _have_same_scale(there, here):
        mean = ",".join(map(str, there.mean))
        std = ",".join(map(str, there.std))
        raise ValueError(
            f"{FIELD}={name!r}: must have the scale of the channels of the run. "
            f"Set config.input.channel_mean={mean} and config.input.channel_std={std}, "
            "and no value_range."
        )


def _have_same_scale(there: BandChoice, here: BandChoice) -> bool:
    """Return whether equal values become nearly equal, where both scales are known."""
    if not there.mean or not here.mean:
        return True
    means_there = np.asarray(there.mean)
    shift = np.abs(means_there - here.mean) / there.std
    stretch = np.abs(np.divide(here.std, there.std) - 1)
    return bool(max(shift.max(), stretch.max()) <= _SCALE_TOLERANCE)
