"""AugReg, "How to train your ViT" (2106.10270), on ImageNet-21k and ImageNet-1k: augmentation and regularisation.

Networks have a class token and a linear head, as the released weights; big_vision's later configs
have mean pooling on ImageNet-21k. The test split is ImageNet's validation split; a part of
ImageNet-21k is held out (configs/README.md).
"""

import re

from vit_jax.config import (
    CheckpointConfig,
    Duration,
    EvaluationConfig,
    InputConfig,
    LoggingConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PretrainConfig,
    ScheduleConfig,
    parse_argument,
)

# Augmentation by data; of ViTs the choice of the authors' configs, of hybrids that of the released
# weights
MODELS = {
    "Ti/16": {"i21k": "none", "i1k": "light1"},
    "S/32": {"i21k": "none", "i1k": "medium1"},
    "S/16": {"i21k": "light1", "i1k": "medium2"},
    "B/32": {"i21k": "light2", "i1k": "medium2"},
    "B/16": {"i21k": "light2", "i1k": "medium2"},
    "L/16": {"i21k": "medium2", "i1k": "medium2"},
    "R+Ti/16": {"i21k": "none"},
    "R26+S/32": {"i21k": "light1"},
    "R50+L/32": {"i21k": "medium1"},
}
DATA = ("i21k", "i1k")
AUGMENTATIONS = {  # layers and magnitude of RandAugment, alpha of mixup
    "none": (0, 0, 0.0),
    "light1": (2, 0, 0.0),  # operations without a magnitude still act
    "light2": (2, 10, 0.2),
    "medium1": (2, 15, 0.2),
    "medium2": (2, 15, 0.5),
    "strong1": (2, 20, 0.5),
    "strong2": (2, 20, 0.8),
}
FILE_NAME = re.compile(  # of released weights
    r"(?P<model>\w+)-(?P<data>i\w+)-(?P<epochs>\d+)ep-lr_(?P<rate>[\d.e-]+)-aug_(?P<aug>\w+)"
    r"-wd_(?P<wd>[\d.]+)-do_(?P<do>[\d.]+)-sd_(?P<sd>[\d.]+)"
)


def get_config(argument: str = "") -> PretrainConfig:
    """Argument: MODEL[,data=i21k|i1k][,aug=…][,wd=N][,do=N][,sd=N][,epochs=N] or a file name; MODEL is one of `MODELS`.

    `aug` is one of `AUGMENTATIONS`; by default the authors' choice. wd is the decay that multiplies
    the learning rate (0.1 or 0.03), do the dropout and sd the stochastic depth (0 or 0.1 both). The
    name of a released file, such as B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0, says
    all of these.
    """
    named = FILE_NAME.match(argument.removesuffix(".npz").partition("--")[0])
    defaults = {
        "model": "B/16",
        "data": "i21k",
        "aug": "",
        "wd": 0.1,
        "do": 0.0,
        "sd": 0.0,
        "epochs": 300,
    }
    chosen = parse_argument(_to_argument(named) if named else argument, **defaults)
    model = chosen["model"].replace("ViT-", "")
    data = chosen["data"]
    if model not in MODELS:
        raise ValueError(f"model={chosen['model']}: must be one of {', '.join(MODELS)}.")
    if data not in DATA:
        raise ValueError(f"data={data}: must be one of {', '.join(DATA)}.")
    aug = chosen["aug"] or MODELS[model].get(data, "")
    if aug not in AUGMENTATIONS:
        missing = (
            "" if chosen["aug"] else " The authors name no choice for this model on ImageNet-1k."
        )
        raise ValueError(f"aug={aug}: must be one of {', '.join(AUGMENTATIONS)}.{missing}")
    layers, magnitude, mixup_alpha = AUGMENTATIONS[aug]
    is_21k = data == "i21k"
    return PretrainConfig(
        data=None if is_21k else "tfds:imagenet2012",
        total=Duration(f"{chosen['epochs']} epochs"),
        global_batch=4096,
        model=ModelConfig(
            name=model if "+" in model else f"ViT-{model}",
            head_bias_init=-10.0 if is_21k else -6.9,
            dropout_fraction=chosen["do"],
            stochastic_depth_fraction=chosen["sd"],
        ),
        input=InputConfig(
            train_split="train"
            if is_21k
            else "train[:99%]",  # the last percent is for choosing hyper-parameters
            test_split="validation",
            **({"holdout_fraction": 0.0036} if is_21k else {}),  # 51,200 of 14.2 million
            image_size=(224, 224),
            randaugment_layers=layers,
            randaugment_magnitude=magnitude,
            mixup_alpha=mixup_alpha,
        ),
        objective=ObjectiveConfig(loss="sigmoid"),
        optimizer=OptimizerConfig(
            first_moment_dtype="bfloat16",
            weight_decay=chosen["wd"],
            weight_decay_meaning="paper_kernels",
            clip_global_norm=1.0,
        ),
        schedule=ScheduleConfig(learning_rate=1e-3, warmup=Duration("10000 steps"), decay="cosine"),
        evaluation=EvaluationConfig(every=Duration("5000 steps")),
        checkpoint=CheckpointConfig(every=Duration("2500 steps")),
        logging=LoggingConfig(every=Duration("100 steps")),
    )


def _to_argument(name: re.Match[str]) -> str:
    """Return the argument that the name of a released file stands for: R26_S_32 is R26+S/32."""
    if float(name["rate"]) != 1e-3:
        raise ValueError(f"lr_{name['rate']}: must be 0.001, the rate of all released weights.")
    *resnet, size, patch = name["model"].split("_")
    model = "+".join([*resnet, f"{size}/{patch}"])
    return f"model={model}," + ",".join(
        f"{key}={name[key]}" for key in ("data", "aug", "wd", "do", "sd", "epochs")
    )
