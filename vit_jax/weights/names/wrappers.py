"""Prefixes that wrappers and checkpoints of training put before the names of a network.

`module.` is of data parallelism, `_orig_mod.` of torch.compile, `student.` and `teacher.` of DINO,
`state_dict.` and `state_dict_ema.` of timm's checkpoints. Only listed words are prefixes, so a
network that is not known stays unknown. The arrays beside the network are ignored, with a reason.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.weights.formats import ArrayFile

AVERAGED = frozenset(
    ("teacher", "target_encoder", "momentum_encoder", "state_dict_ema", "model_ema", "ema")
)
"""Averages over training, which their authors evaluate: preferred to other networks of a file."""

_INSIDE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Wrappers of parts of a network, whose words are at any depth of a name."""

WRAPPERS = AVERAGED.union(
    _INSIDE,
    ("module", "model", "backbone", "student", "encoder", "base_encoder", "net", "network"),
    ("state_dict", "model_state_dict"),
)
_INNER = re.compile(rf"(?<![^.])(?:{'|'.join(_INSIDE)})\.")

# The first words of names, below wrappers, of arrays that are not part of a network.
_TRAINING_WORDS = """
optimizer optimizers optimizer_states opt scheduler lr_scheduler lr_schedulers
scaler amp_scaler loss_scaler epoch step global_step iteration loss loss_fn
criterion dino_loss ibot_loss ibot_patch_loss koleo_loss center rng_state metric
"""
_PRETRAINING_WORDS = """
dino_head ibot_head decoder decoder_embed decoder_blocks decoder_norm decoder_pred
decoder_pos_embed predictor projector projection_head prototypes mask_token
"""
_REASONS = {
    **dict.fromkeys(_TRAINING_WORDS.split(), "state of training"),
    **dict.fromkeys(_PRETRAINING_WORDS.split(), "a part of pre-training"),
}
"""First word → the reason why its arrays are ignored."""

_KNOWN_TO_FORMATS = {"decoder", "mask_token", "epoch"}
"""Words below the prefix that stay, since each format knows them."""

_HEADS = {"head", "heads", "head_dist", "fc_norm", "fc", "classifier", "linear_head"}
_HEAD_REASON = "a head beside the network"
_OTHER_REASON = "another network of the file"
_MOST_LISTED = 4


class Ignored(NamedTuple):
    """An array that is not part of the network."""

    part: str  # the beginning of its name
    reason: str


@dataclasses.dataclass(frozen=True)
class Wrapping:
    """The network of a file without its prefix, and the arrays that are not part of it."""

    names: Mapping[str, str]  # without the prefix → in the file
    prefix: str = ""
    # By name in the file.
    ignored: Mapping[str, Ignored] = dataclasses.field(default_factory=dict)

    def unwrap(self, file: ArrayFile) -> ArrayFile:
        """Return the file with the network's names only."""
        if not self._has_changed_names() and not self.ignored:
            return file
        arrays = {}
        for name, in_file in self.names.items():
            arrays[name] = file.arrays[in_file]

        def read(name: str) -> np.ndarray:
            return file.read_array(self.names[name])

        return dataclasses.replace(file, arrays=arrays, read_array=read)

    def _has_changed_names(self) -> bool:
        return list(self.names) != list(self.names.values())

    def notes(self) -> list[str]:
        """Return a sentence about the prefix, and one about arrays that are not read."""
        notes = []
        if self.prefix:
            notes.append(
                f"The names of the network begin with {self.prefix!r} in the file; "
                "this prefix is removed."
            )
        elif self._has_changed_names():
            notes.append(
                "The names of wrappers inside the network's names, such as '_orig_mod.', "
                "are removed."
            )
        if self.ignored:
            notes.append(self._describe_ignored())
        return notes

    def _describe_ignored(self) -> str:
        """Return a sentence about arrays that are not read, a warning if a head is among them."""
        words = []
        has_head = False
        counts = collections.Counter(self.ignored.values())
        for (part, reason), count in counts.items():
            words.append(f"{part} ({count}, {reason})")
            has_head = has_head or reason == _HEAD_REASON

        sentence = f"Arrays of the file that are not read: {', '.join(words)}."
        if has_head:
            return f"WARNING: {sentence} The outputs of this head are not computed."
        return sentence


def find_wrapping(names: Collection[str], is_network: Callable[[Iterable[str]], bool]) -> Wrapping:
    """Return the network among the arrays of a file, whose names `is_network` recognises.

    Without such a network, a prefix of all names is removed, so that an error describes the network
    below it.

    Raises:
      ValueError: several networks of equal standing, or arrays of unknown parts beside the network;
        they are listed.
    """
    plain_names = _remove_inner_wrappers(names)
    prefix = _find_prefix(plain_names.values(), is_network)

    kept: dict[str, str] = {}
    ignored: dict[str, Ignored] = {}
    unknown = []
    for in_file, name in plain_names.items():
        if not name.startswith(prefix):
            part = _describe_beside(name, prefix)
            if part.reason:
                ignored[in_file] = part
            else:
                unknown.append(in_file)
            continue

        below = name.removeprefix(prefix)
        word, _, _ = below.partition(".")
        if word in _REASONS and word not in _KNOWN_TO_FORMATS:
            ignored[in_file] = Ignored(f"{prefix}{word}", _REASONS[word])
        else:
            kept[below] = in_file

    if unknown:
        listed = ", ".join(sorted(unknown)[:_MOST_LISTED])
        if len(unknown) > _MOST_LISTED:
            listed += ", ..."
        raise ValueError(
            f"it has a network whose names begin with {prefix!r}, and {len(unknown)} arrays of "
            f"unknown parts beside it ({listed}). Write a file without them, if the network "
            "computes the same alone"
        )
    return Wrapping(kept, _find_prefix_in_file(kept), ignored)


def _remove_inner_wrappers(names: Collection[str]) -> dict[str, str]:
    """Return names in the file → names without wrappers of parts.

    All names stay as they are if two would become equal.
    """
    plain_names = {name: _INNER.sub("", name) for name in names}
    if len(set(plain_names.values())) < len(plain_names):
        return dict(zip(names, names, strict=True))
    return plain_names


def _find_prefix(names: Collection[str], is_network: Callable[[Iterable[str]], bool]) -> str:
    """Return the prefix of the network to read.

    If no network is recognised, it is the longest prefix of all names; "" without any.
    """
    if is_network(names):
        return ""
    prefixes = _list_all_prefixes(names)
    found: list[str] = []
    for prefix in prefixes:
        if prefix.startswith(tuple(found)):
            continue
        below = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        if is_network(below):
            found.append(prefix)

    if not found:
        return _find_common_prefix(names, prefixes)
    averaged = list(filter(_is_averaged, found))
    best = averaged or found
    if len(best) > 1:
        raise ValueError(
            f"it has several networks ({', '.join(best)}). "
            "Write a file with the arrays of one of them"
        )
    return best[0]


def _is_averaged(prefix: str) -> bool:
    return not AVERAGED.isdisjoint(prefix.split("."))


def _find_common_prefix(names: Collection[str], prefixes: list[str]) -> str:
    """Return the last of several prefixes that all names have; "" if none is one."""
    for prefix in reversed(prefixes):
        if all(name.startswith(prefix) for name in names):
            return prefix
    return ""


def _list_all_prefixes(names: Collection[str]) -> list[str]:
    """Return the prefixes of all names that consist of words for wrappers, the shortest first."""
    prefixes: set[str] = set()
    for name in names:
        prefixes.update(_list_prefixes(name))
    return sorted(sorted(prefixes), key=len)


def _list_prefixes(name: str) -> list[str]:
    """Return the prefixes of a name that consist of words for wrappers, the shortest first."""
    prefixes = []
    prefix = ""
    for word in name.split(".")[:-1]:
        if word not in WRAPPERS:
            break
        prefix = f"{prefix}{word}."
        prefixes.append(prefix)
    return prefixes


def _describe_beside(name: str, prefix: str) -> Ignored:
    """Return the part that an array beside the network belongs to.

    The reason is empty for an unknown part.
    """
    common = ""
    for shared in _list_prefixes(name):
        if prefix.startswith(shared):
            common = shared
    word, _, rest = name.removeprefix(common).partition(".")
    if word in WRAPPERS and rest:
        reason = _OTHER_REASON
    elif word in _HEADS:
        reason = _HEAD_REASON
    else:
        reason = _REASONS.get(word, "")
    return Ignored(f"{common}{word}", reason)


def _find_prefix_in_file(names: Mapping[str, str]) -> str:
    """Return the text before the names of the network in the file."""
    for name, in_file in names.items():
        if in_file.endswith(name):
            return in_file.removesuffix(name)
    return ""
