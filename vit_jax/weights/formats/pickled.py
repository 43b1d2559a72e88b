"""The command that converts weights of PyTorch: pickles can run code, so none is opened here."""

import re
import shlex
from collections.abc import Iterable, Sequence

SUFFIXES = (".bin", ".pth", ".pt", ".ckpt", ".pth.tar")
# Files beside weights, by the trainer of transformers.
_NO_WEIGHTS = (
    "training_args.bin",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "scheduler.bin",
    "rng_state.pth",
)
_USUAL = ("pytorch_model.bin", "adapter_model.bin", "model.pth")
_SHARD = re.compile(r"-\d+-of-\d+\.\w+$")
# Entries in entries, as checkpoints of training have them, get names joined by dots. The
# optimiser's state, twice as large as the weights, is omitted. Namespaces hold the arguments of a
# training script, and run no code.
_PROGRAM = """\
import sys, argparse, torch, safetensors.torch as s; \
torch.serialization.add_safe_globals([argparse.Namespace]); \
flat = lambda d, p='': {k: v for n, x in d.items() if n != 'optimizer' for k, v in \
(flat(x, f'{p}{n}.').items() if isinstance(x, dict) else [(f'{p}{n}', x)]) \
if torch.is_tensor(v)}; \
s.save_file({k: v.contiguous().clone() for f in sys.argv[2:] for k, v in \
flat(torch.load(f, 'cpu', weights_only=True)).items()}, sys.argv[1])"""


def write_command(output: str, inputs: Sequence[str]) -> str:
    """Return a shell command that writes the tensors of pickled files into one .safetensors."""
    files = shlex.join([output, *inputs])
    return f'python -c "{_PROGRAM}" {files}'


def advise(output: str, inputs: Sequence[str]) -> str:
    """Return the advice for pickled files: the reason why they are not read, and the command."""
    return (
        "which runs code when it is opened and is therefore not read. If you trust it, convert it "
        f"where torch and safetensors are installed: {write_command(output, inputs)}"
    )


def find_pickles(names: Iterable[str]) -> list[str]:
    """Return the names of files that hold weights of PyTorch, by their suffix."""
    return sorted(name for name in names if name.endswith(SUFFIXES) and name not in _NO_WEIGHTS)


def choose_pickles(names: Iterable[str]) -> list[str]:
    """Return the files to convert together: one file, all shards of a model, or none."""
    pickles = find_pickles(names)
    for name in pickles:
        if name in _USUAL:
            return [name]
    shards = list(filter(_SHARD.search, pickles))
    return shards or pickles[:1]


def name_replacement(pickles: Sequence[str]) -> str:
    """Return the usual name of the file that replaces pickled ones."""
    if pickles[0].startswith("adapter_model"):
        return "adapter_model.safetensors"
    return "model.safetensors"
