"""Names of the files of released AugReg weights, which state how the weights were trained."""

import re

RATE = 1e-3  # learning rate of all released weights

# For example B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0. Names of fine-tuned weights
# go on with "--" and their data.
_FILE_NAME = re.compile(
    r"(?P<model>\w+)-(?P<data>i\w+)-(?P<epochs>\d+)ep"
    r"-lr_(?P<rate>\d+(?:\.\d+)?(?:e-?\d+)?)-aug_(?P<aug>\w+)"
    r"-wd_(?P<wd>[\d.]+)-do_(?P<do>[\d.]+)-sd_(?P<sd>[\d.]+)"
)


def translate_file_name(argument: str) -> str:
    """Return the argument of the recipe `pretrain_augreg` that the name of a file stands for.

    Any other argument is returned as it is.

    Raises:
      ValueError: the name has another learning rate than the released ones.
    """
    pretraining, _, _ = argument.removesuffix(".npz").partition("--")
    match = _FILE_NAME.fullmatch(pretraining)
    if match is None:
        return argument

    values = match.groupdict()
    rate = values.pop("rate")
    if float(rate) != RATE:
        raise ValueError(f"lr_{rate}: must be {RATE}, the rate of all released weights.")
    *resnet, size, patch = values["model"].split("_")  # B_16 is B/16, R26_S_32 is R26+S/32
    values["model"] = "+".join([*resnet, f"{size}/{patch}"])
    return ",".join(f"{name}={value}" for name, value in values.items())
