"""What the values of each recipe do, on tiny networks, against numbers from the authors' formulas.

`test_recipes.py` compares the values themselves.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax import pytree
from vit_jax.config import load_recipe
from vit_jax.config.adaptation import adapt_architecture
from vit_jax.config.architecture import Architecture
from vit_jax.config.lengths import convert_lengths
from vit_jax.config.networks import build_architecture
from vit_jax.config.schema import FinetuneConfig, ModelConfig, OptimizerConfig
from vit_jax.data import augment
from vit_jax.data.crops import sample_inception_box
from vit_jax.data.mixing import mix
from vit_jax.data.records import Record
from vit_jax.data.transforms import TrainTransform
from vit_jax.models import abstract_model, build_model
from vit_jax.optim.optimizers import build_optimizer
from vit_jax.train.assemble import schedule_of

DEPTH = 4
TINY = {
    "width": 16,
    "depth": DEPTH,
    "mlp_dim": 16,
    "num_heads": 2,
    "compute_dtype": "float32",
}
FAMILIES = {
    "paper": "pretrain_imagenet21k:ViT-B/16",
    "paper, fine-tuning": "finetune:ViT-B/16,cifar10",
    "BiT": "finetune:R50x1,cifar10,rule=bit",
    "AugReg": "pretrain_augreg:L/16,aug=strong1,sd=0.1",
    "DeiT III": "pretrain_deit3:L/16",
    "DeiT III, fine-tuning": "pretrain_deit3:L/16,data=i21k,stage=finetune",
    "MAE": "finetune:mae,imagenet",
    "DINOv3": "finetune:dinov3,imagenet",
    "SigLIP 2": "finetune:siglip2,imagenet",
    "baseline S/16": "pretrain_s16_baseline",
}


@functools.cache
def recipe(family: str):
    return load_recipe(FAMILIES[family])


def tiny_architecture(family: str) -> Architecture:
    """Return the network of a recipe with small sizes."""
    config = recipe(family)
    model = config.model
    is_tuned = isinstance(config, FinetuneConfig)

    if is_tuned:
        model = ModelConfig(name="ViT-Ti/8", head="linear")

    model = dataclasses.replace(model, **TINY, name="ViT-Ti/8", remat="none")
    architecture = build_architecture(model, image_size=(16, 16), num_classes=5)

    if not is_tuned:
        return architecture

    changes = {
        "name": None,
        "head": "zero",
        "remat": "none",
        "compute_dtype": "float32",
    }
    adapted = dataclasses.replace(config.model, **changes)

    return adapt_architecture(architecture, adapted, image_size=(16, 16), num_classes=5)


DROP_RATES = {
    "paper": [0.0] * DEPTH,
    "AugReg": [0.1 * block / (DEPTH - 1) for block in range(DEPTH)],
    "DeiT III": [0.4] * DEPTH,
    "DeiT III, fine-tuning": [0.3] * DEPTH,
    "MAE": [0.1 * block / (DEPTH - 1) for block in range(DEPTH)],
    "DINOv3": [0.1 * block / (DEPTH - 1) for block in range(DEPTH)],
    "SigLIP 2": [0.0] * DEPTH,
    "baseline S/16": [0.0] * DEPTH,
}


@pytest.mark.parametrize("family", DROP_RATES)
def test_drop_rate_of_each_block(family):
    """A block leaves an image as it is with the square of its rate, for it has two residual branches."""
    architecture = dataclasses.replace(tiny_architecture(family), dropout_fraction=0.0)
    if not any(DROP_RATES[family]):
        assert architecture.stochastic_depth_fraction == 0
        return

    model = jax.jit(build_model, static_argnums=0)(architecture, jax.random.key(0))
    images = jnp.asarray(np.random.default_rng(0).normal(size=(1500, 16, 16, 3)), jnp.float32)

    @jax.jit
    def count_unchanged(model, images):
        outputs = model(
            images, dropout_key=jax.random.key(1), intermediates=("blocks",)
        ).blocks_LBSD
        return (outputs[1:] == outputs[:-1]).all(axis=(2, 3)).mean(axis=1)

    unchanged = np.asarray(count_unchanged(model, images))
    rates = np.asarray(DROP_RATES[family])[1:]  # blocks return outputs, no inputs

    np.testing.assert_allclose(unchanged, np.square(rates), atol=0.035)
    assert np.all(unchanged[rates > 0.09] > 0)


def initial_parameters(family: str) -> dict[str, np.ndarray]:
    """Return the parameters of a recipe's network before the first step, wider and so with exact deviations."""
    architecture = dataclasses.replace(tiny_architecture(family), width=64, mlp_dim=96)
    model = jax.jit(build_model, static_argnums=0)(architecture, jax.random.key(0))

    return {name: np.asarray(leaf) for name, leaf in pytree.named_leaves(model).items()}


XAVIER = (2 / (64 + 64)) ** 0.5
XAVIER_MLP = (2 / (64 + 96)) ** 0.5
LECUN = (1 / (8 * 8 * 3)) ** 0.5
PAPER_STDDEVS = {
    "embedding/kernel": LECUN,
    "encoder/blocks/attention/query/kernel": XAVIER,
    "encoder/blocks/attention/out/kernel": XAVIER,
    "encoder/blocks/mlp/expand/kernel": XAVIER_MLP,
    "encoder/blocks/mlp/contract/kernel": XAVIER_MLP,
    "encoder/blocks/mlp/expand/bias": 1e-6,
    "positions/table": 0.02,
    "class_token": 0.0,
    "head/linear/kernel": 0.0,
}
DEIT3_STDDEVS = {
    name: 0.02 for name in PAPER_STDDEVS if name.endswith(("kernel", "table", "token"))
}
INITIAL_STDDEVS = {
    "paper": PAPER_STDDEVS,
    "AugReg": PAPER_STDDEVS,
    "DeiT III": DEIT3_STDDEVS
    | {"encoder/blocks/mlp/expand/bias": 0.0, "encoder/blocks/attention/query/bias": 0.0},
    "baseline S/16": {
        n: s for n, s in PAPER_STDDEVS.items() if n not in ("positions/table", "class_token")
    },
}


@pytest.mark.parametrize("family", INITIAL_STDDEVS)
def test_standard_deviations_of_initial_values(family):
    parameters = initial_parameters(family)
    for name, stddev in INITIAL_STDDEVS[family].items():
        tolerance = 5 * stddev / np.sqrt(2 * parameters[name].size)  # of an estimated deviation

        assert parameters[name].std() == pytest.approx(stddev, abs=tolerance), name
        assert abs(parameters[name].mean()) <= 5 * stddev / np.sqrt(parameters[name].size), name

    if family == "DeiT III":
        largest = 2 * 0.02 / 0.8796

        assert all(np.abs(parameters[name]).max() <= largest + 1e-6 for name in DEIT3_STDDEVS)
        assert np.unique(parameters["encoder/blocks/attention_scale"]).tolist() == [
            np.float32(1e-4)
        ]


IMAGENET = 1_281_167
IMAGENET_21K = 14_200_000


def cosine(progress: float, peak: float, end: float = 0.0) -> float:
    return end + (peak - end) * (1 + math.cos(math.pi * progress)) / 2


def rates_by_epoch(peak: float, end: float, epochs: int, warmup: int):
    """Return a cosine schedule of the epoch, as MAE and timm have it, with a warm-up from 0."""

    def rate(epoch: float) -> float:
        return (
            peak * epoch / warmup
            if epoch < warmup
            else cosine((epoch - warmup) / (epochs - warmup), peak, end)
        )

    return rate


def rates_by_step(peak: float, total: int, warmup: int, decay):
    """Return a schedule of the step: a linear warm-up times a decay of the progress after it."""
    return lambda step: (
        peak * min(1, step / warmup) * decay(max(0, step - warmup) / (total - warmup))
    )


LINEAR_TO_1E5 = rates_by_step(1e-3, 312_012, 10_000, lambda progress: 1 - 0.99 * progress)
RATES = {  # number of images, steps in an epoch or None, rate
    "paper": (IMAGENET_21K, None, LINEAR_TO_1E5),
    "AugReg": (
        IMAGENET_21K,
        None,
        rates_by_step(1e-3, 1_040_039, 10_000, lambda progress: cosine(progress, 1)),
    ),
    "baseline S/16": (
        IMAGENET,
        None,
        rates_by_step(1e-3, 112_603, 10_000, lambda progress: cosine(progress, 1)),
    ),
    "DeiT III": (IMAGENET, IMAGENET / 2048, rates_by_epoch(3e-3, 1e-5, 400, 5)),
    "DeiT III, fine-tuning": (IMAGENET, IMAGENET / 2048, rates_by_epoch(3e-4, 1e-5, 50, 5)),
    "MAE": (IMAGENET, IMAGENET / 1024, rates_by_epoch(2e-3, 1e-6, 100, 5)),
    "DINOv3": (IMAGENET, IMAGENET / 1024, rates_by_epoch(4e-4, 1e-6, 50, 5)),
    "SigLIP 2": (IMAGENET, IMAGENET / 2048, rates_by_epoch(6e-4, 1e-6, 50, 10)),
    "BiT": (
        50_000,
        None,
        lambda step: 0.003 * min(1, step / 500) * 0.1 ** sum(step >= s for s in (3000, 6000, 9000)),
    ),
}


@pytest.mark.parametrize("family", RATES)
def test_learning_rate_of_each_step(family):
    num_examples, steps_in_an_epoch, rate_at = RATES[family]
    config = recipe(family)
    steps = convert_lengths(config, num_examples)
    schedule = schedule_of(config, steps)

    for fraction in (0.001, 0.01, 0.04, 0.2, 0.5, 0.75, 0.95, 1.0):
        step = round(fraction * steps.total)
        time = step if steps_in_an_epoch is None else step / steps_in_an_epoch

        assert float(schedule(step)) == pytest.approx(rate_at(time), rel=5e-3, abs=2e-8), fraction


@functools.cache
def made_up_parameters() -> dict[str, jax.Array]:
    """Return normal numbers for the parameters of a tiny network with LayerScale."""
    architecture = dataclasses.replace(tiny_architecture("DeiT III"), layer_scale=0.1)
    generator = np.random.default_rng(0)
    shapes = pytree.named_leaves(abstract_model(architecture))

    return {
        name: jnp.asarray(generator.normal(size=leaf.shape), jnp.float32)
        for name, leaf in shapes.items()
    }


def first_step(config: OptimizerConfig, peak: float, gradient: float) -> dict[str, np.ndarray]:
    """Return the first update where every gradient has this value, at the peak of the learning rate."""
    parameters = made_up_parameters()
    optimizer = build_optimizer(config, lambda step: jnp.float32(peak), peak)
    gradients = jax.tree.map(lambda leaf: jnp.full_like(leaf, gradient), parameters)
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(parameters), parameters)

    return {name: np.asarray(update) for name, update in updates.items()}


LAYER_DECAY = {"MAE": 0.65, "DINOv3": 0.75, "SigLIP 2": 0.6, "paper": 1.0}


@pytest.mark.parametrize("family", LAYER_DECAY)
def test_learning_rate_of_each_layer(family):
    """Adam's first step is its rate.

    The decay has the power L - i in block i of L, and L + 1 before (BEiT).
    """
    decay = LAYER_DECAY[family]
    config = recipe(family).optimizer
    without_decay = dataclasses.replace(
        config,
        weight_decay=0.0,
        weight_decay_meaning="paper",
        clip_global_norm=None,
    )
    updates = first_step(without_decay, peak=1.0, gradient=0.5)
    powers = {
        "embedding/kernel": DEPTH + 1,
        "class_token": DEPTH + 1,
        "positions/table": DEPTH + 1,
    }
    powers |= {
        "encoder/norm/scale": 0,
        "head/linear/kernel": 0,
        "head/linear/bias": 0,
    }

    for name, power in powers.items():
        np.testing.assert_allclose(updates[name], -(decay**power), rtol=2e-3)

    for block in range(DEPTH):
        for name in ("encoder/blocks/mlp/expand/kernel", "encoder/blocks/attention_norm/scale"):
            np.testing.assert_allclose(updates[name][block], -(decay ** (DEPTH - block)), rtol=2e-3)


KERNELS = ("embedding/kernel", "encoder/blocks/attention/query/kernel", "head/linear/kernel")
VECTORS = ("class_token", "positions/table", "encoder/blocks/mlp/expand/bias", "encoder/norm/scale")
DECAYS = {  # of a kernel and of other parameters in one step at the peak, relative to the parameter
    "paper": (1e-3 * 0.03, 1e-3 * 0.03),
    "AugReg": (1e-4, 0.0),
    "baseline S/16": (1e-4, 0.0),
    "MAE": (2e-3 * 0.05, 0.0),
    "DINOv3": (4e-4 * 0.05, 0.0),
    "SigLIP 2": (6e-4 * 0.05, 0.0),
    "BiT": (0.0, 0.0),
}


@pytest.mark.parametrize("family", DECAYS)
def test_weight_decay_of_each_group(family):
    """Without gradients the update is the decay alone."""
    config = recipe(family)
    optimizer = dataclasses.replace(config.optimizer, layer_decay=1.0)
    updates = first_step(optimizer, config.schedule.learning_rate, gradient=0.0)
    of_kernels, of_others = DECAYS[family]

    for names, decay in ((KERNELS, of_kernels), (VECTORS, of_others)):
        for name in names:
            expected = -decay * np.asarray(made_up_parameters()[name])
            np.testing.assert_allclose(updates[name], expected, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("family", ["DeiT III", "DeiT III, fine-tuning"])
def test_lamb_has_decay_and_norms_of_kernels_alone(family):
    """The direction is Adam's, with a decay of 0.02 for kernels; the step of a kernel is its norm times the rate."""
    updates = first_step(recipe(family).optimizer, 1e-3, gradient=0.5)
    for name in VECTORS:
        np.testing.assert_allclose(updates[name], -1e-3, rtol=1e-3)

    for name in KERNELS:
        parameter = np.asarray(made_up_parameters()[name])
        axes = tuple(range(name.startswith("encoder/"), parameter.ndim))
        direction = 1 + 0.02 * parameter
        norms = [np.sqrt(np.sum(x**2, axis=axes, keepdims=True)) for x in (parameter, direction)]

        np.testing.assert_allclose(
            updates[name],
            -1e-3 * direction * norms[0] / norms[1],
            rtol=1e-3,
        )


NUM_CLASSES = 10
FEATURES = 16
HEAD_STEPS = 200


def separable_data() -> tuple[np.ndarray, np.ndarray]:
    """Return features with the spread of a normed token, around ten centres, and labels."""
    generator = np.random.default_rng(0)
    label = np.arange(80) % NUM_CLASSES
    centres = generator.normal(size=(NUM_CLASSES, FEATURES))

    return centres[label] + 0.1 * generator.normal(size=(80, FEATURES)), label


def train_head_by_formula(
    kind: str, rate: float, decay: float, clip: float | None, start: np.ndarray
) -> float:
    """Return the loss of softmax regression after 200 steps of Adam, LAMB or momentum, in float64."""
    features, label = separable_data()
    target = np.eye(NUM_CLASSES)[label]
    kernel = start.astype(np.float64)
    first = 0.0
    second = 0.0

    for step in range(1, HEAD_STEPS + 1):
        logits = features @ kernel
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        gradient = features.T @ (shares - target) / len(label)

        if clip is not None:
            gradient = gradient * min(1.0, clip / np.linalg.norm(gradient))

        if kind == "sgd":
            first = 0.9 * first + gradient
            kernel = kernel - rate * first
            continue

        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        direction = (
            first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8) + decay * kernel
        )

        if kind == "lamb":
            least = 0.02 * math.sqrt(kernel.size)
            direction = direction * max(np.linalg.norm(kernel), least) / np.linalg.norm(direction)

        kernel = kernel - rate * direction

    return softmax_loss(features @ kernel, label)


def softmax_loss(logits: np.ndarray, label: np.ndarray) -> float:
    logits = logits - logits.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(label)), label]))


HEADS = {  # optimiser, rate, decay, clipping, standard deviation of the head at the start
    "paper": ("adam", 1e-3, 0.03, None, 0.0),
    "paper, fine-tuning": ("sgd", 0.03, 0.0, 1.0, 0.0),
    "BiT": ("sgd", 0.003, 0.0, None, 0.0),
    "AugReg": ("adam", 1e-3, 0.1, 1.0, 0.0),
    "DeiT III": ("lamb", 3e-3, 0.02, 1.0, 0.02),
    "DeiT III, fine-tuning": ("lamb", 3e-4, 0.02, 1.0, 0.3),
    "MAE": ("adam", 2e-3, 0.05, None, 2e-5),
    "DINOv3": ("adam", 4e-4, 0.05, None, 0.0),
    "SigLIP 2": ("adam", 6e-4, 0.05, None, 0.0),
    "baseline S/16": ("adam", 1e-3, 0.1, 1.0, 0.0),
}


@pytest.mark.parametrize("family", HEADS)
def test_a_head_after_200_steps_on_separable_data(family):
    """At the peak of the learning rate; the loss begins at ln 10, or near to it."""
    kind, rate, decay, clip, stddev = HEADS[family]
    name = "head/linear/kernel"
    features, label = separable_data()
    inputs = jnp.asarray(features, jnp.float32)
    targets = jnp.asarray(label)
    start = stddev * np.random.default_rng(1).normal(size=(FEATURES, NUM_CLASSES))
    optimizer = build_optimizer(recipe(family).optimizer, lambda step: jnp.float32(rate), rate)

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(
            inputs @ params[name],
            targets,
        ).mean()

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)

        return (optax.apply_updates(params, updates), state), None

    first = {name: jnp.asarray(start, jnp.float32)}
    scan = jax.jit(lambda carry: jax.lax.scan(step, carry, length=HEAD_STEPS)[0])
    params, _ = scan((first, optimizer.init(first)))

    expected = train_head_by_formula(kind, rate, decay, clip, start)
    assert float(loss(params)) == pytest.approx(
        expected,
        rel=0.03,
    )  # a stored bfloat16 makes 0.9 0.8984
    assert float(loss(params)) < float(loss(first)) - 0.02


def mean_crop_area(family: str) -> float:
    """Return the mean area of the crops of a recipe, of a photograph of 500 x 375 pixels."""
    inputs = recipe(family).input
    generator = np.random.default_rng(0)
    fractions = []

    for _ in range(3000):
        box = sample_inception_box(
            generator,
            375,
            500,
            inputs.crop_area_fraction,
            inputs.crop_distribution,
        )
        fractions.append(box.height * box.width / (375 * 500))

    return float(np.mean(fractions))


def torchvision_area(low: float) -> float:
    """Return the mean area of torchvision's crops, from one draw each of area and shape; others are centred."""
    generator = np.random.default_rng(1)
    areas = np.zeros(20_000)
    fitted = np.zeros(20_000, bool)

    for _ in range(10):
        area = generator.uniform(low, 1, size=20_000)
        aspect = np.exp(generator.uniform(math.log(3 / 4), math.log(4 / 3), size=20_000))
        width = np.sqrt(area * 375 * 500 * aspect)
        height = np.sqrt(area * 375 * 500 / aspect)
        is_new = ~fitted & (width <= 500) & (height <= 375)
        areas[is_new] = area[is_new]
        fitted |= is_new

    return float(np.where(fitted, areas, 1.0).mean())


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("paper", 0.34),
        ("AugReg", 0.34),
        ("baseline S/16", 0.34),
        *((f, None) for f in ("DeiT III", "MAE", "DINOv3")),
    ],
)
def test_mean_area_of_crops(family, expected):
    """TensorFlow's crops of 5 % or more have a mean of 0.34; torchvision's of 8 % or more are larger."""
    expected = torchvision_area(0.08) if expected is None else expected
    assert mean_crop_area(family) == pytest.approx(expected, abs=0.015)


def mean_weight_of_own_label(family: str) -> float:
    """Return the mean weight of an image's label after mixing, over 3,000 steps."""
    inputs = recipe(family).input
    image = jnp.zeros((2, 32, 32, 1))
    label = jnp.eye(2)
    mask = jnp.ones(2)
    weigh = jax.jit(jax.vmap(lambda key: mix(key, image, label, mask, inputs)[1][0, 0]))

    return float(weigh(jax.random.split(jax.random.key(0), 3000)).mean())


def beta_above_half(alpha: float) -> float:
    """Return the mean of max(a, 1 - a), a ~ Beta(alpha, alpha)."""
    shares = np.random.default_rng(0).beta(alpha, alpha, size=200_000)
    return float(np.maximum(shares, 1 - shares).mean())


CUTMIX = 1 - (1 / 2 - 1 / 5 + 1 / 48)  # without what is beyond the border
BOTH = (beta_above_half(0.8) + CUTMIX) / 2


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("AugReg", beta_above_half(0.5)),
        ("baseline S/16", beta_above_half(0.2)),
        ("BiT", beta_above_half(0.1)),
        ("DeiT III", BOTH),
        ("DeiT III, fine-tuning", CUTMIX),
        ("MAE", BOTH),
    ],
)
def test_mean_weight_of_an_images_own_label(family, expected):
    assert mean_weight_of_own_label(family) == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize(
    ("family", "fraction"),
    [
        ("MAE", 0.25),
        ("SigLIP 2", 0.25),
        ("DINOv3", 0.0),
    ],
)
def test_random_erasing_of_a_quarter_of_the_images(family, fraction):
    inputs = dataclasses.replace(recipe(family).input, image_size=(32, 32), randaugment_layers=0)
    transform = TrainTransform(inputs)
    record = Record(np.full((32, 32, 3), 127, np.uint8), 0)
    generator = np.random.default_rng(0)
    erased = [(transform(record, generator) != 127).any(axis=2).mean() for _ in range(1500)]

    assert np.mean(np.asarray(erased) > 0) == pytest.approx(fraction, abs=0.04)

    if fraction:
        assert np.mean([area for area in erased if area]) == pytest.approx(
            (0.02 + 1 / 3) / 2,
            abs=0.02,
        )


def test_three_augment_and_colours_of_deit3():
    """A third of the images is grey, a third solarized; the luma changes by at most 30 % each in three blends."""
    inputs = dataclasses.replace(recipe("DeiT III").input, image_size=(8, 8), color_jitter=0.0)
    record = Record(np.full((8, 8, 3), (200, 10, 60), np.uint8), 0)
    generator = np.random.default_rng(0)
    images = [TrainTransform(inputs)(record, generator)[0, 0].tolist() for _ in range(1500)]
    is_grey = np.mean([len(set(image)) == 1 for image in images])
    is_solarized = np.mean([image == [55, 10, 60] for image in images])

    assert is_grey == pytest.approx(1 / 3, abs=0.04)
    assert is_solarized == pytest.approx(1 / 3, abs=0.04)

    grey = np.full((8, 8, 3), 100, np.uint8)
    brightness = [augment.color_jitter(generator, grey, 0.3)[0, 0, 0] / 100 for _ in range(600)]

    assert np.mean(brightness) == pytest.approx(1.0, abs=0.03)
    assert np.std(brightness) == pytest.approx(0.6 / math.sqrt(12), abs=0.02)
