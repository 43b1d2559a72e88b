"""Compare our training step and inference with timm's on one machine: images/s, memory, share of the peak.

    python tests/bench/against_timm.py --json=FILE [--models S/16 L/16@384 ...] [--rounds=3]
    [--steps=30] python tests/bench/against_timm.py --models B/16 --batches=256 --rounds=2    # ten
    minutes on a GPU python tests/bench/against_timm.py --small --rounds=1                        #
    on a CPU, to see that it works

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
TIMM = {"S": "vit_small_patch16_224", "B": "vit_base_patch16_224", "L": "vit_large_patch16_224"}
TIMM |= {"H": "vit_huge_patch14_224"}
OURS = {
    "ours, xla": ("xla", False),
    "ours, cudnn": ("cudnn", False),
    "ours, cudnn, unrolled": ("cudnn", True),
}
CONTENDERS = (*OURS, "timm")
CLASSES = 1000
WARM_UP = 3
SEARCH_STEPS = 5
ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")  # the line of a traceback that names it


def parse(model):
    """ "L/16@384" as the name of the network and the side of its images."""
    name, _, side = model.partition("@")
    return name, int(side or 224)


def timed(start, wait, steps):
    """Seconds between the ends of calls, each started before the one before has ended."""
    pending = start()
    ends = []
    for _ in range(WARM_UP + steps):
        before = pending
        pending = start()
        wait(before)
        ends.append(time.perf_counter())
    wait(pending)
    ends.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(ends[WARM_UP:])]


def build_ours(model, batch, form, unrolled, device):
    """Build what a run trains: the initial leaves, the training step and the inference, as functions to compile.

    Steps take leaves by name, as the training loop's do: modules take Python milliseconds more to
    hand over.
    """
    import jax
    import jax.numpy as jnp

    from vit_jax import pytree
    from vit_jax.arrays import Batch, normalise
    from vit_jax.config import load_recipe, resolve
    from vit_jax.config.networks import build_architecture
    from vit_jax.kernels.devices import trace_for
    from vit_jax.models import build_model
    from vit_jax.objectives import build_objective
    from vit_jax.optim.optimizers import build_optimizer
    from vit_jax.sharding import Placement, batch_sharding, build_mesh, replicated
    from vit_jax.train.assemble import schedule_of
    from vit_jax.train.state import init_state
    from vit_jax.train.step import StepParts, TrainingLoss, make_freeze, make_prepare_batch

    name, side = parse(model)
    recipe = load_recipe(f"pretrain_imagenet1k:ViT-{name},loss=softmax")
    changes = {
        "head": "linear",
        "dropout_fraction": 0.0,
        "remat": "none",
        "attention": form,
        "scan_unroll": 1,
    }
    config = dataclasses.replace(
        recipe,
        global_batch=batch,
        model=dataclasses.replace(recipe.model, **changes),
        optimizer=dataclasses.replace(recipe.optimizer, clip_global_norm=None),
    )
    architecture = build_architecture(config.model, image_size=(side, side), num_classes=CLASSES)
    if unrolled:
        architecture = dataclasses.replace(architecture, scan_unroll=architecture.depth)
    lengths = resolve(config, num_examples=1_281_167, num_devices=1)
    schedule = schedule_of(config, lengths)
    optimizer = build_optimizer(config.optimizer, schedule, config.schedule.learning_rate)
    objective = build_objective(config.objective, architecture)
    mesh = build_mesh([device])
    on_mesh = trace_for(Placement(mesh))
    parts = StepParts(
        seed=config.seed,
        num_micro_batches=1,
        prepare_batch=make_prepare_batch(config.input, config.objective, architecture, objective),
        loss=TrainingLoss(objective=objective, prepare_network=make_freeze(None), has_dropout=True),
        optimizer=optimizer,
        schedule=schedule,
        polyak=config.polyak,
        steps=lengths,
        measures_all_updates=device.platform == "gpu",
    )
    take_step = on_mesh(parts.train_step)

    def init():
        return init_state(
            build_model(architecture, jax.random.key(0)), optimizer, with_polyak=False
        )

    abstract = jax.eval_shape(init)

    def train(leaves, data):
        state, metrics = take_step(pytree.from_named_leaves(abstract, leaves), data)
        return pytree.named_leaves(state), metrics

    @on_mesh
    def infer(leaves, image):
        return (
            pytree.from_named_leaves(abstract, leaves).model(normalise(image, "bfloat16")).logits_BK
        )

    def shaped(tree, sharding):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    images = jax.ShapeDtypeStruct((batch, side, side, 3), jnp.uint8)
    labels, mask = (jax.ShapeDtypeStruct((batch,), dtype) for dtype in (jnp.int32, jnp.float32))
    data = shaped(Batch(image_BHWC=images, label_B=labels, mask_B=mask), batch_sharding(mesh))
    leaves = shaped(pytree.named_leaves(abstract), replicated(mesh))
    return (
        jax.jit(lambda: pytree.named_leaves(init()), out_shardings=replicated(mesh)),
        jax.jit(train, donate_argnums=0).trace(leaves, data),
        jax.jit(infer).trace(leaves, data.image_BHWC),
    )


def measure_ours(model, batch, steps, form="xla", unrolled=False):
    """Return seconds of each training step and of each inference, and the peak of memory in bytes or None."""
    import jax
    import numpy as np

    from vit_jax.arrays import Batch

    device = jax.devices()[0]
    side = parse(model)[1]
    init, *traced = build_ours(model, batch, form, unrolled, device)
    step, infer = (
        each.lower().compile() for each in traced
    )  # so that nothing is compiled while it is timed
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (batch, side, side, 3), np.uint8)
    labels = rng.integers(0, CLASSES, batch, np.int32)
    given = Batch(image_BHWC=images, label_B=labels, mask_B=np.ones(batch, np.float32))
    data = jax.device_put(given, device)
    state = init()

    def train():
        nonlocal state
        state, metrics = step(state, data)
        return metrics

    training = timed(train, jax.block_until_ready, steps)
    loss = float(train()["train_loss"])
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    inference = timed(lambda: infer(state, data.image_BHWC), jax.block_until_ready, steps)
    return {"training": training, "inference": inference, "peak_bytes": peak, "loss": loss}


def marked_by(device):
    """Return two functions: one gives an event that ends when all work until now is done, one waits for it.

    `torch.cuda.synchronize` would also wait for the call that was started after.
    """
    import torch

    def mark():
        event = torch.cuda.Event() if device == "cuda" else None
        if event:
            event.record()
        return event

    return mark, lambda event: event.synchronize() if event else None


def measure_timm(model, batch, steps):
    """Return the same of timm's model."""
    import timm
    import torch

    name, side = parse(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mark, wait = marked_by(device)
    torch._dynamo.reset()  # programs and sizes of the batch before
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.set_float32_matmul_precision("high")
    network = timm.create_model(TIMM[name[0]], img_size=side, num_classes=CLASSES).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.3, fused=True)
    images = torch.randn(batch, 3, side, side, device=device)
    labels = torch.randint(CLASSES, (batch,), device=device)

    @torch.compile(dynamic=False)  # else a second batch would be compiled for every size
    def loss():
        with torch.autocast(device, torch.bfloat16):
            return torch.nn.functional.cross_entropy(network(images), labels)

    @torch.compile(dynamic=False)
    def infer():
        with torch.autocast(device, torch.bfloat16):
            return network(images)

    last = None

    def train():
        nonlocal last
        optimizer.zero_grad(set_to_none=True)
        last = loss()
        last.backward()
        optimizer.step()
        return mark()

    def run_inference():
        infer()
        return mark()

    training = timed(train, wait, steps)
    found = float(last)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    optimizer.zero_grad(set_to_none=True)
    network.eval()
    with torch.inference_mode():
        inference = timed(run_inference, wait, steps)
    return {"training": training, "inference": inference, "peak_bytes": peak, "loss": found}


def measure_ceiling(contender, side, steps):
    """FLOP/s of products of two square bfloat16 matrices of this side, at the median."""
    if contender == "timm":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        a = torch.randn(side, side, device=device, dtype=torch.bfloat16)

        mark, wait = marked_by(device)

        def product():
            torch.mm(a, a)
            return mark()
    else:
        import jax
        import jax.numpy as jnp

        a = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
        multiply = jax.jit(lambda a: a @ a)
        wait = jax.block_until_ready

        def product():
            return multiply(a)

    return 2 * side**3 / statistics.median(timed(product, wait, steps))


def versions(contender):
    """Of the libraries, and the device."""
    if contender == "timm":
        import timm
        import torch

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        return {"torch": torch.__version__, "timm": timm.__version__, "device": device}
    import jax

    return {"jax": jax.__version__, "device": jax.devices()[0].device_kind}


def flops_per_image(model):
    """Of our forward pass, twice the multiply-adds."""
    from vit_jax.config import ModelConfig
    from vit_jax.config.networks import build_architecture
    from vit_jax.models.flops import FLOPS_PER_MAC, forward_macs

    name, side = parse(model)
    config = ModelConfig(name=f"ViT-{name}", head="linear")
    return FLOPS_PER_MAC * forward_macs(
        build_architecture(config, image_size=(side, side), num_classes=CLASSES)
    )


def child(words):
    """Print one line of JSON for each batch, and end at the first that does not fit or fails."""
    if words.ceiling:
        ceiling = max(measure_ceiling(words.contender, side, words.steps) for side in words.ceiling)
        print(json.dumps({"flops_per_second": ceiling, **versions(words.contender)}), flush=True)
        return
    for batch in words.batches:
        if words.contender == "timm":
            found = measure_timm(words.models[0], batch, words.steps)
        else:
            found = measure_ours(words.models[0], batch, words.steps, *OURS[words.contender])
        print(json.dumps({"batch": batch, **found}), flush=True)
        gc.collect()  # what a cycle holds is memory that the next batch needs


def ask(words, contender, *arguments):
    """Return the lines that a process of its own prints, and why it ended before the last, or ""."""
    python = words.timm if contender == "timm" else sys.executable
    command = [python, __file__, f"--contender={contender}", *arguments]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            code = subprocess.run(
                command, stdout=out, stderr=err, env=words.environment, timeout=words.limit
            ).returncode
            problem = f"code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"stopped after {words.limit} s"
        out.seek(0)
        err.seek(0)
        lines = [json.loads(line) for line in out if line.startswith("{") and line.endswith("}\n")]
        errors = [line.strip() for line in err if ERROR.match(line)]
    return lines, ": ".join([problem, *errors[-1:]])[:300] if problem else ""


def compare(words, model):
    """Of every contender its batch, and all seconds of all rounds."""
    found = {}
    batches = [f"--batches={batch}" for batch in words.batches]
    for contender in CONTENDERS:
        lines, problem = ask(
            words,
            contender,
            f"--models={model}",
            *batches,
            f"--steps={min(SEARCH_STEPS, words.steps)}",
        )
        tried = ", ".join(
            f"{line['batch']}: {line['batch'] / statistics.median(line['training']):,.1f}"
            for line in lines
        )
        print(f"{model}, {contender}: images/s by batch {tried or 'none'}; {problem}", flush=True)
        if lines:
            best = min(lines, key=lambda line: statistics.median(line["training"]) / line["batch"])
            found[contender] = {"batch": best["batch"], "training": [], "inference": []}
    for _ in range(words.rounds):
        for contender, result in found.items():
            one = (f"--models={model}", f"--batches={result['batch']}", f"--steps={words.steps}")
            lines, problem = ask(words, contender, *one)
            if problem:
                print(f"{model}, {contender}, batch {result['batch']}: {problem}", flush=True)
            for line in lines:
                result |= {"peak_bytes": line["peak_bytes"], "loss": line["loss"]}
                for name in ("training", "inference"):
                    result[name] += line[name]
    return {contender: result for contender, result in found.items() if result["training"]}


def table(results, ceiling):
    """Markdown. `results`: what `compare` gives, by model; `ceiling` in FLOP/s."""
    columns = (
        "batch",
        "images/s, quartiles",
        "of the ceiling",
        "x timm",
        "peak GiB",
        "inference images/s",
    )
    rows = [f"| | | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for model, contenders in results.items():
        speeds = {
            name: result["batch"] / statistics.median(result["training"])
            for name, result in contenders.items()
        }
        for name, result in contenders.items():
            slow, _, fast = statistics.quantiles(result["training"], n=4, method="inclusive")
            batch = result["batch"]
            peak = result["peak_bytes"]
            cells = [
                *(model, name, f"{batch:,}"),
                f"{speeds[name]:,.1f}, {batch / fast:,.1f} to {batch / slow:,.1f}",
                f"{3 * flops_per_image(model) * speeds[name] / ceiling:.0%}",
                f"{speeds[name] / speeds['timm']:.2f}" if "timm" in speeds else "–",
                f"{peak / 2**30:.1f}" if peak else "–",
                f"{batch / statistics.median(result['inference']):,.1f}",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batches", type=int, action="append", help="default: 32, 64, … 2048")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--timm", default=sys.executable, help="Python of an environment with torch and timm"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=int, default=1800, help="seconds of each process")
    parser.add_argument("--small", action="store_true", help="S/16 at 32 pixels, batch 2, 2 steps")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--ceiling", type=int, action="append", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.small:
        words.models = ["S/16@32"]
        words.batches = [2]
        words.steps = 2
    words.batches = words.batches or [2**power for power in range(5, 12)]
    if words.contender:
        child(words)
        return
    if words.steps < 2:
        parser.error(f"--steps={words.steps}: must be 2 or more, since quartiles are printed.")
    with (
        tempfile.TemporaryDirectory() as cache
    ):  # of compiled programs: a round need not compile again
        words.environment = os.environ | {
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "JAX_COMPILATION_CACHE_DIR": f"{cache}/jax",
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/torch",
            # Processes take turns, so each can have nearly all memory; JAX takes 75 % of it by
            # default.
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
        }
        sides = [f"--ceiling={side}" for side in ((256,) if words.small else (4096, 8192))]
        products = {}
        found = []
        for contender in ("ours, xla", "timm"):
            products[contender], problem = ask(words, contender, *sides)
            found += [line["flops_per_second"] for line in products[contender]]
            print(f"products, {contender}: {products[contender]}; {problem}", flush=True)
        if not found:
            sys.exit("Neither library works here: see the lines above.")
        results = {}
        for model in words.models:
            results[model] = compare(words, model)
            if words.json:  # after every model: a session may end early
                words.json.write_text(
                    json.dumps({"ceiling": products, "results": results}, indent=1) + "\n"
                )
            print(table({model: results[model]}, max(found)), flush=True)
    print(table(results, max(found)))


if __name__ == "__main__":
    main()
