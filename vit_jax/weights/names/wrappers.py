"""Prefixes that wrappers and checkpoints of training put before the names of a network, and the parts beside it.

`module.` is of data parallelism, `_orig_mod.` of torch.compile, `student.` and `teacher.` of DINO,
`state_dict.` and `state_dict_ema.` of timm's checkpoints. Only listed words are prefixes, so a
network that is not known stays unknown.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from vit_jax.weights.formats import ArrayFile

AVERAGED = frozenset(
    ("teacher", "target_encoder", "momentum_encoder", "state_dict_ema", "model_ema", "ema")
)
"""Averages over training, which their authors evaluate: taken where the file has another network, too."""

WRAPPERS = AVERAGED | {
    *(
        "module",
        "_orig_mod",
        "model",
        "backbone",
        "student",
        "encoder",
        "base_encoder",
        "net",
        "network",
    ),
    *("state_dict", "model_state_dict", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"),
}
_INNER = re.compile(
    r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)  # at any depth
# Reason → the first words of names, below wrappers, of arrays that are no part of a network
_PARTS = {
    "state of training": (
        *(
            "optimizer",
            "optimizers",
            "optimizer_states",
            "opt",
            "scheduler",
            "lr_scheduler",
            "lr_schedulers",
        ),
        *(
            "scaler",
            "amp_scaler",
            "loss_scaler",
            "epoch",
            "step",
            "global_step",
            "iteration",
            "loss",
            "loss_fn",
        ),
        *(
            "criterion",
            "dino_loss",
            "ibot_loss",
            "ibot_patch_loss",
            "koleo_loss",
            "center",
            "rng_state",
            "metric",
        ),
    ),
    "a part of pre-training": (
        *(
            "dino_head",
            "ibot_head",
            "decoder",
            "decoder_embed",
            "decoder_blocks",
            "decoder_norm",
            "decoder_pred",
        ),
        *(
            "decoder_pos_embed",
            "predictor",
            "projector",
            "projection_head",
            "prototypes",
            "mask_token",
        ),
    ),
}
_REASONS = {word: reason for reason, words in _PARTS.items() for word in words}
_LEFT_TO_FORMATS = {
    "decoder",
    "mask_token",
    "epoch",
}  # below the prefix, where each format knows them
_HEADS = {"head", "heads", "head_dist", "fc_norm", "fc", "classifier", "linear_head"}
_HEAD_REASON = "a head beside the network"
_OTHER_REASON = "another network of the file"


class Ignored(NamedTuple):
    """An array that is no part of the network."""

    part: str  # the beginning of its name
    reason: str


@dataclasses.dataclass(frozen=True)
class Wrapping:
    """The network of a file without its prefix, and the arrays that are no part of it."""

    names: Mapping[str, str]  # without the prefix → in the file
    prefix: str = ""
    ignored: Mapping[str, "Ignored"] = dataclasses.field(
        default_factory=dict
    )  # by name in the file

    def unwrap(self, file: ArrayFile) -> ArrayFile:
        """Return the file with the network's names only."""
        if all(name == in_file for name, in_file in self.names.items()) and not self.ignored:
            return file
        arrays = {name: file.arrays[in_file] for name, in_file in self.names.items()}
        return dataclasses.replace(
            file, arrays=arrays, read_array=lambda name: file.read_array(self.names[name])
        )

    def notes(self) -> list[str]:
        """Return a sentence about the prefix, and one about arrays that are not read."""
        notes = []
        if self.prefix:
            notes.append(
                f"The names of the network begin with {self.prefix!r} in the file; this prefix is removed."
            )
        elif any(name != in_file for name, in_file in self.names.items()):
            notes.append(
                "The names of wrappers inside the network's names, such as '_orig_mod.', are removed."
            )
        if self.ignored:
            counts = collections.Counter(self.ignored.values())
            listed = ", ".join(
                f"{part} ({count}, {reason})" for (part, reason), count in counts.items()
            )
            has_head = any(reason == _HEAD_REASON for _, reason in counts)
            mark = "WARNING: " if has_head else ""
            end = " The outputs of this head are not computed." if has_head else ""
            notes.append(f"{mark}Arrays of the file that are not read: {listed}.{end}")
        return notes


def find_wrapping(names: Collection[str], is_network: Callable[[Iterable[str]], bool]) -> Wrapping:
    """Return the network among the arrays of a file, whose names `is_network` recognises.

    Without such a network, a prefix of all names is removed, so that an error describes the network
    below it.

    Raises:
      ValueError: several networks of equal standing, or arrays of unknown parts beside the network;
        they are listed.
    """
    plain = {name: _INNER.sub("", name) for name in names}
    if len(set(plain.values())) < len(plain):
        plain = {name: name for name in names}
    prefix = _find_prefix(plain.values(), is_network)

    kept: dict[str, str] = {}
    ignored: dict[str, Ignored] = {}
    unknown = []
    for in_file, name in plain.items():
        rest = name.removeprefix(prefix)
        word = rest.partition(".")[0]
        if not name.startswith(prefix):
            beside = _explain(name, prefix)
            if beside.reason:
                ignored[in_file] = beside
            else:
                unknown.append(in_file)
        elif word in _REASONS and word not in _LEFT_TO_FORMATS:
            ignored[in_file] = Ignored(f"{prefix}{word}", _REASONS[word])
        else:
            kept[rest] = in_file
    if unknown:
        listed = ", ".join(sorted(unknown)[:4]) + (", ..." if len(unknown) > 4 else "")
        raise ValueError(
            f"it has a network whose names begin with {prefix!r}, and {len(unknown)} arrays of unknown parts beside "
            f"it ({listed}). Write a file without them, if the network computes the same alone"
        )
    return Wrapping(kept, _prefix_in_file(kept), ignored)


def _find_prefix(names: Collection[str], is_network: Callable[[Iterable[str]], bool]) -> str:
    """Return the prefix of the network to read; "" if the names have none, or no network is recognised."""
    if is_network(names):
        return ""
    chains = sorted({prefix for name in names for prefix in _prefixes_of(name)}, key=len)
    found: list[str] = []
    for prefix in chains:
        below = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        if not prefix.startswith(tuple(found)) and is_network(below):
            found.append(prefix)
    if not found:
        return next(
            (
                prefix
                for prefix in reversed(chains)
                if all(name.startswith(prefix) for name in names)
            ),
            "",
        )

    averaged = [prefix for prefix in found if AVERAGED & set(prefix.split("."))]
    best = averaged or found
    if len(best) > 1:
        raise ValueError(
            f"it has several networks ({', '.join(best)}). Write a file with the arrays of one of them"
        )
    return best[0]


def _prefixes_of(name: str) -> list[str]:
    """Return the prefixes of a name that consist of words for wrappers, the shortest first."""
    prefixes = []
    prefix = ""
    for word in name.split(".")[:-1]:
        if word not in WRAPPERS:
            break
        prefix = f"{prefix}{word}."
        prefixes.append(prefix)
    return prefixes


def _explain(name: str, prefix: str) -> Ignored:
    """Return the part that an array beside the network belongs to; its reason is empty for an unknown part."""
    shared = [place for place in _prefixes_of(name) if prefix.startswith(place)]
    common = shared[-1] if shared else ""
    word, _, rest = name.removeprefix(common).partition(".")
    if word in WRAPPERS and rest:
        reason = _OTHER_REASON
    elif word in _HEADS:
        reason = _HEAD_REASON
    else:
        reason = _REASONS.get(word, "")
    return Ignored(f"{common}{word}", reason)


def _prefix_in_file(names: Mapping[str, str]) -> str:
    """Return what is before the names of the network in the file."""
    for name, in_file in names.items():
        if in_file.endswith(name):
            return in_file.removesuffix(name)
    return ""
