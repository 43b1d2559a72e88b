"""Compare our training step and inference with timm's on one machine: images/s, memory, share of the peak.

    python tests/bench/against_timm.py --json=FILE [--models S/16 L/16@384 ...] [--rounds=3] [--steps=30]
    python tests/bench/against_timm.py --models B/16 --batches=256 --rounds=2    # ten minutes on a GPU
    python tests/bench/against_timm.py --small --rounds=1                        # on a CPU, to see that it works

Needs jax, flax and optax, and for timm's half torch and timm, in the same environment or in that of
`--timm=PYTHON`; no package that reads data. Both compute in bfloat16 with parameters and Adam's
moments in float32, a class token, a linear head, softmax, decoupled weight decay, no clipping, no
dropout and no rematerialisation, on a random batch that lies on the device. Ours competes with
several forms of attention and with unrolled layers. timm's model is compiled by torch.compile
(forward pass and loss), with scaled dot product attention and fused AdamW.

Each contender first tries batches twice as large each time until memory ends, and keeps its
fastest. Then all take turns for several rounds. Every measurement has a process of its own, so JAX
and PyTorch never share the GPU's memory. The ceiling is the fastest product of two square matrices
in bfloat16, by either library.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODELS = ("S/16", "B/16", "L/16", "H/14", "L/16@384")
TIMM = {
    "S": "vit_small_patch16_224",
    "B": "vit_base_patch16_224",
    "L": "vit_large_patch16_224",
    "H": "vit_huge_patch14_224",
}
OURS = {
    "ours, xla": ("xla", False),
    "ours, cudnn": ("cudnn", False),
    "ours, cudnn, unrolled": ("cudnn", True),
}
CONTENDERS = (*OURS, "timm")
CLASSES = 1000
WARM_UP = 3
SEARCH_STEPS = 5
# The line of a traceback that names the error
ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")


def parse(model):
    """Return the name of the network and the side of its images, from a text such as "L/16@384"."""
    name, _, side = model.partition("@")
    return name, int(side or 224)


def time_calls(start, wait, steps):
    """Return seconds between the ends of calls, each started before the previous one has ended."""
    pending = start()
    ends = []
    for _ in range(WARM_UP + steps):
        previous = pending
        pending = start()
        wait(previous)
        ends.append(time.perf_counter())
    wait(pending)
    ends.append(time.perf_counter())

    measured = ends[WARM_UP:]
    return [after - before for before, after in itertools.pairwise(measured)]


def load_our_config(model, batch, form):
    """Return the recipe of ImageNet-1k without everything that timm's step does not do."""
    from vit_jax.config import load_recipe

    name, _ = parse(model)
    recipe = load_recipe(f"pretrain_imagenet1k:ViT-{name},loss=softmax")
    network = dataclasses.replace(
        recipe.model,
        head="linear",
        dropout_fraction=0.0,
        remat="none",
        attention=form,
        scan_unroll=1,
    )
    return dataclasses.replace(
        recipe,
        global_batch=batch,
        model=network,
        optimizer=dataclasses.replace(recipe.optimizer, clip_global_norm=None),
    )


def build_step(config, architecture, device):
    """Return the parts of the training step of a run."""
    from vit_jax.config import resolve
    from vit_jax.objectives import build_objective
    from vit_jax.optim.optimizers import build_optimizer
    from vit_jax.optim.schedules import build_schedule
    from vit_jax.train.step import StepParts
    from vit_jax.train.step_norms import choose_norms

    lengths = resolve(config, num_examples=1_281_167, num_devices=1)
    schedule = build_schedule(config.schedule, lengths)
    objective = build_objective(config.objective, architecture)
    return StepParts(
        config=config,
        architecture=architecture,
        objective=objective,
        trained=None,
        optimizer=build_optimizer(config.optimizer, schedule, config.schedule.learning_rate),
        schedule=schedule,
        steps=lengths,
        norms=choose_norms(config, lengths, device.platform),
    )


def add_sharding(tree, sharding):
    """Return the shapes and dtypes of a tree with a sharding."""
    import jax

    def describe(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(describe, tree)


def build_ours(model, batch, form, unrolled, device):
    """Return three functions to compile: the initial leaves, the training step and the inference.

    Steps take leaves by name, as in the training loop: passing modules takes Python milliseconds
    more.
    """
    import jax
    import jax.numpy as jnp

    from vit_jax import pytree, sharding
    from vit_jax.arrays import Batch, normalise
    from vit_jax.config.networks import build_architecture
    from vit_jax.kernels.devices import trace_for
    from vit_jax.models import build_model
    from vit_jax.train.state import init_state

    config = load_our_config(model, batch, form)
    _, side = parse(model)
    architecture = build_architecture(
        config.model,
        image_size=(side, side),
        num_classes=CLASSES,
    )
    if unrolled:
        architecture = dataclasses.replace(architecture, scan_unroll=architecture.depth)
    parts = build_step(config, architecture, device)
    mesh = sharding.build_mesh([device])
    on_mesh = trace_for(sharding.Placement(mesh))
    take_step = on_mesh(parts.train_step)

    def init():
        network = build_model(architecture, jax.random.key(0))
        return init_state(network, parts.optimizer, with_polyak=False)

    abstract = jax.eval_shape(init)

    def train(leaves, data):
        state, metrics = take_step(pytree.from_named_leaves(abstract, leaves), data)
        return pytree.name_leaves(state), metrics

    @on_mesh
    def infer(leaves, image):
        network = pytree.from_named_leaves(abstract, leaves).model
        return network(normalise(image, "bfloat16")).logits_BK

    options = sharding.compiler_options(mesh)
    step = jax.jit(train, donate_argnums=0, compiler_options=options)
    images = jax.ShapeDtypeStruct((batch, side, side, 3), jnp.uint8)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    mask = jax.ShapeDtypeStruct((batch,), jnp.float32)
    data = Batch(image_BHWC=images, label_B=labels, mask_B=mask)
    data = add_sharding(data, sharding.batch_sharding(mesh))
    leaves = add_sharding(pytree.name_leaves(abstract), sharding.replicate(mesh))
    return (
        jax.jit(lambda: pytree.name_leaves(init()), out_shardings=sharding.replicate(mesh)),
        step.trace(leaves, data),
        jax.jit(infer).trace(leaves, data.image_BHWC),
    )


def measure_ours(model, batch, steps, form="xla", unrolled=False):
    """Return seconds of each training step and of each inference, and the peak of memory in bytes
    or None.
    """
    import jax

    device = jax.devices()[0]
    init, traced_step, traced_inference = build_ours(
        model,
        batch,
        form,
        unrolled,
        device,
    )
    # Nothing is compiled while it is timed.
    step = traced_step.lower().compile()
    infer = traced_inference.lower().compile()
    _, side = parse(model)
    data = jax.device_put(draw_batch(batch, side), device)
    state = init()

    def train():
        nonlocal state
        state, metrics = step(state, data)
        return metrics

    training = time_calls(train, jax.block_until_ready, steps)
    loss = float(train()["train_loss"])
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    inference = time_calls(
        lambda: infer(state, data.image_BHWC),
        jax.block_until_ready,
        steps,
    )
    return {
        "training": training,
        "inference": inference,
        "peak_bytes": peak,
        "loss": loss,
    }


def draw_batch(batch, side):
    """Return random images and labels."""
    import numpy as np

    from vit_jax.arrays import Batch

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (batch, side, side, 3), np.uint8)
    labels = rng.integers(0, CLASSES, batch, np.int32)
    mask = np.ones(batch, np.float32)
    return Batch(image_BHWC=images, label_B=labels, mask_B=mask)


def make_markers(device):
    """Return two functions: one returns an event that ends when all work until now is done, one waits for it.

    `torch.cuda.synchronize` would also wait for the call that was started after.
    """
    import torch

    def mark():
        if device != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(event):
        if event:
            event.synchronize()

    return mark, wait


def reset_torch(device):
    """Forget the compiled programs and the memory of the previous batch."""
    import torch

    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.set_float32_matmul_precision("high")


def measure_timm(model, batch, steps):
    """Return the measurements of `measure_ours` for timm's model."""
    import timm
    import torch

    name, side = parse(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mark, wait = make_markers(device)
    reset_torch(device)
    network = timm.create_model(
        TIMM[name[0]],
        img_size=side,
        num_classes=CLASSES,
    ).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.3, fused=True)
    images = torch.randn(batch, 3, side, side, device=device)
    labels = torch.randint(CLASSES, (batch,), device=device)

    # Dynamic programs would be compiled for every size from the second batch on.
    @torch.compile(dynamic=False)
    def compute_loss():
        with torch.autocast(device, torch.bfloat16):
            return torch.nn.functional.cross_entropy(network(images), labels)

    @torch.compile(dynamic=False)
    def infer():
        with torch.autocast(device, torch.bfloat16):
            return network(images)

    loss = None

    def train():
        nonlocal loss
        optimizer.zero_grad(set_to_none=True)
        loss = compute_loss()
        loss.backward()
        optimizer.step()
        return mark()

    def run_inference():
        infer()
        return mark()

    training = time_calls(train, wait, steps)
    last_loss = float(loss)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None

    optimizer.zero_grad(set_to_none=True)
    network.eval()
    with torch.inference_mode():
        inference = time_calls(run_inference, wait, steps)
    return {
        "training": training,
        "inference": inference,
        "peak_bytes": peak,
        "loss": last_loss,
    }


def make_torch_product(side):
    """Return functions that start a product of two square bfloat16 matrices and wait for it."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    mark, wait = make_markers(device)

    def multiply():
        torch.mm(matrix, matrix)
        return mark()

    return multiply, wait


def make_jax_product(side):
    """Return functions that start a product of two square bfloat16 matrices and wait for it."""
    import jax
    import jax.numpy as jnp

    matrix = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
    square = jax.jit(lambda a: a @ a)
    return lambda: square(matrix), jax.block_until_ready


def measure_ceiling(contender, side, steps):
    """Return FLOP/s of products of two square bfloat16 matrices of this side, at the median."""
    make_product = make_torch_product if contender == "timm" else make_jax_product
    multiply, wait = make_product(side)
    seconds = statistics.median(time_calls(multiply, wait, steps))
    return 2 * side**3 / seconds


def versions(contender):
    """Return the versions of the libraries, and the device."""
    if contender == "timm":
        import timm
        import torch

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        return {"torch": torch.__version__, "timm": timm.__version__, "device": device}
    import jax

    return {"jax": jax.__version__, "device": jax.devices()[0].device_kind}


def flops_per_image(model):
    """Return the FLOPs of our forward pass, twice the multiply-adds."""
    from vit_jax.config import ModelConfig
    from vit_jax.config.networks import build_architecture
    from vit_jax.models.flops import FLOPS_PER_MAC, forward_macs

    name, side = parse(model)
    config = ModelConfig(name=f"ViT-{name}", head="linear")
    architecture = build_architecture(
        config,
        image_size=(side, side),
        num_classes=CLASSES,
    )
    return FLOPS_PER_MAC * forward_macs(architecture)


def run_child(words):
    """Print one line of JSON for each batch, and end at the first that does not fit or fails."""
    if words.ceiling:
        ceilings = []
        for side in words.ceiling:
            ceilings.append(measure_ceiling(words.contender, side, words.steps))
        figures = {"flops_per_second": max(ceilings)}
        figures |= versions(words.contender)
        print(json.dumps(figures), flush=True)
        return

    for batch in words.batches:
        if words.contender == "timm":
            found = measure_timm(words.models[0], batch, words.steps)
        else:
            found = measure_ours(
                words.models[0],
                batch,
                words.steps,
                *OURS[words.contender],
            )
        print(json.dumps({"batch": batch, **found}), flush=True)
        # The next batch needs the memory that reference cycles hold.
        gc.collect()


def ask(words, contender, *arguments):
    """Return the lines that a separate process prints, and why it ended before the last one, or ""."""
    python = words.timm if contender == "timm" else sys.executable
    command = [python, __file__, f"--contender={contender}", *arguments]

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            done = subprocess.run(
                command, stdout=out, stderr=err, env=words.environment, timeout=words.limit
            )
            problem = f"code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"stopped after {words.limit} s"
        out.seek(0)
        err.seek(0)
        complete = [line for line in out if line.startswith("{") and line.endswith("}\n")]
        errors = [line.strip() for line in err if ERROR.match(line)]

    lines = [json.loads(line) for line in complete]
    if not problem:
        return lines, ""
    return lines, ": ".join([problem, *errors[-1:]])[:300]


def time_per_image(line):
    return statistics.median(line["training"]) / line["batch"]


def find_best_batch(words, model, contender):
    """Try the batches; print their speed and return the fastest, or None if none fits."""
    batches = [f"--batches={batch}" for batch in words.batches]
    steps = min(SEARCH_STEPS, words.steps)
    lines, problem = ask(
        words,
        contender,
        f"--models={model}",
        *batches,
        f"--steps={steps}",
    )

    tried = [f"{line['batch']}: {1 / time_per_image(line):,.1f}" for line in lines]
    speeds = ", ".join(tried) or "none"
    print(f"{model}, {contender}: images/s by batch {speeds}; {problem}", flush=True)
    if not lines:
        return None
    return min(lines, key=time_per_image)["batch"]


def measure_round(words, model, contender, result):
    """Add the seconds of one more round to a result."""
    batch = result["batch"]
    one = (f"--models={model}", f"--batches={batch}", f"--steps={words.steps}")
    lines, problem = ask(words, contender, *one)
    if problem:
        print(f"{model}, {contender}, batch {batch}: {problem}", flush=True)
    for line in lines:
        result["peak_bytes"] = line["peak_bytes"]
        result["loss"] = line["loss"]
        result["training"] += line["training"]
        result["inference"] += line["inference"]


def compare(words, model):
    """Return the batch of every contender, and all seconds of all rounds."""
    results = {}
    for contender in CONTENDERS:
        batch = find_best_batch(words, model, contender)
        if batch is not None:
            results[contender] = {"batch": batch, "training": [], "inference": []}

    for _ in range(words.rounds):
        for contender, result in results.items():
            measure_round(words, model, contender, result)
    return {contender: result for contender, result in results.items() if result["training"]}


COLUMNS = (
    "batch",
    "images/s, quartiles",
    "of the ceiling",
    "x timm",
    "peak GiB",
    "inference images/s",
)


def table(results, ceiling):
    """Return a table in Markdown from the results of `compare` by model, and the ceiling in FLOP/s."""
    rows = []
    for model, contenders in results.items():
        speeds = {name: 1 / time_per_image(result) for name, result in contenders.items()}
        for name, result in contenders.items():
            cells = make_cells(result, speeds[name], speeds.get("timm"))
            share = 3 * flops_per_image(model) * speeds[name] / ceiling
            cells = [model, name, *cells[:2], f"{share:.0%}", *cells[2:]]
            rows.append(f"| {' | '.join(cells)} |")

    header = f"| | | {' | '.join(COLUMNS)} |"
    separator = "|---" * (len(COLUMNS) + 2) + "|"
    return "\n".join([header, separator, *rows]) + "\n"


def make_cells(result, speed, timm_speed):
    """Return the batch, speed, speed beside timm's, memory and speed of inference of a contender."""
    batch = result["batch"]
    peak = result["peak_bytes"]
    slow, _, fast = statistics.quantiles(result["training"], n=4, method="inclusive")
    return (
        f"{batch:,}",
        f"{speed:,.1f}, {batch / fast:,.1f} to {batch / slow:,.1f}",
        f"{speed / timm_speed:.2f}" if timm_speed else "–",
        f"{peak / 2**30:.1f}" if peak else "–",
        f"{batch / statistics.median(result['inference']):,.1f}",
    )


def parse_words():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument(
        "--batches",
        type=int,
        action="append",
        help="default: 32, 64, … 2048",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--timm", default=sys.executable, help="Python of an environment with torch and timm"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--limit",
        type=int,
        default=1800,
        help="seconds of each process",
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="S/16 at 32 pixels, batch 2, 2 steps",
    )
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--ceiling",
        type=int,
        action="append",
        help=argparse.SUPPRESS,
    )
    words = parser.parse_args()

    if words.small:
        words.models = ["S/16@32"]
        words.batches = [2]
        words.steps = 2
    words.batches = words.batches or [2**power for power in range(5, 12)]
    if not words.contender and words.steps < 2:
        parser.error(f"--steps={words.steps}: must be 2 or more, since quartiles are printed.")
    return words


def make_environment(cache):
    """Return the environment of measurements, which share the compiled programs in `cache`.

    Processes take turns, so each can have nearly all memory; JAX takes 75 % of it by default.
    """
    first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "JAX_COMPILATION_CACHE_DIR": f"{cache}/jax",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/torch",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        "CUDA_VISIBLE_DEVICES": first_gpu,
    }


def measure_products(words):
    """Return the products of both libraries, as their processes print them."""
    sides = (256,) if words.small else (4096, 8192)
    options = [f"--ceiling={side}" for side in sides]
    products = {}
    for contender in ("ours, xla", "timm"):
        products[contender], problem = ask(words, contender, *options)
        print(f"products, {contender}: {products[contender]}; {problem}", flush=True)
    return products


def main():
    words = parse_words()
    if words.contender:
        run_child(words)
        return

    with tempfile.TemporaryDirectory() as cache:
        words.environment = make_environment(cache)
        products = measure_products(words)
        speeds = [line["flops_per_second"] for lines in products.values() for line in lines]
        if not speeds:
            sys.exit("Neither library works here: see the lines above.")

        results = {}
        for model in words.models:
            results[model] = compare(words, model)
            # A session may end early, so results are written after every model.
            if words.json:
                content = {"ceiling": products, "results": results}
                words.json.write_text(json.dumps(content, indent=1) + "\n")
            print(table({model: results[model]}, max(speeds)), flush=True)
    print(table(results, max(speeds)))


if __name__ == "__main__":
    main()
