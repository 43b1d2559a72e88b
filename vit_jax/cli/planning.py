"""The verb plan: memory, time and cost of a recipe on a machine that need not be available."""

import json
import os
import sys
from typing import Annotated

from vit_jax.cli.options import REQUIRED, Recipe, UsageError, option, switch, verb
from vit_jax.cli.outputs import output_file
from vit_jax.config.rules import Count, NotNegative, When

SEARCHING = When("search")
COMPILING = When("arithmetic", False)


@verb(
    "--config=pretrain_imagenet1k:ViT-B/16 --topology=v5e:16x16 --price=1.2",
    "--config=pretrain_imagenet1k:ViT-L/16 --topology=h100:8 --search",
)
class Plan(Recipe):
    """Memory, time and cost of a recipe on TPUs or GPUs that you do not have.

    The run's own step is compiled where the compiler is installed (extras tpu and plan-gpu). Without one, memory and
    time come from arithmetic.
    """

    topology: str = option(
        "NAME",
        "v5e:16x16 or v5litepod-256; 2*v5e:16x16 is two slices; h100:8 or 4*h100:8 are nodes of GPUs",
        REQUIRED,
    )
    slices: Count | None = option("N", "of this topology")
    price: NotNegative | None = option("N", "of one chip for one hour")
    num_examples: Count | None = option("N", "of data that the recipe does not name")
    num_classes: Count | None = option("N", "of data that the recipe does not name")
    arithmetic: bool = switch("compile nothing")
    search: bool = switch(
        "find the fastest layout that fits: rematerialisation, sharding and micro-batches"
    )
    batches: Annotated[bool, SEARCHING] = switch("search other batches, too")
    tries: Annotated[Count | None, SEARCHING, COMPILING] = option(
        "N", "best layouts to compile; default: 4"
    )
    hlo: Annotated[str | None, When("search", False), COMPILING] = option(
        "FILE", "write the compiled program"
    )
    json: bool = switch("print all figures as JSON")

    def run(self) -> None:
        target = output_file(self.hlo, "--hlo=") if self.hlo is not None else None
        os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is executed, so no accelerator is used
        from vit_jax.storage.files import write_atomically
        from vit_jax.tools.plan.aot import Executable
        from vit_jax.tools.plan.dataset import choose_dataset
        from vit_jax.tools.plan.estimate import make_plan
        from vit_jax.tools.plan.report import result_to_json, result_to_text, to_json, to_text
        from vit_jax.tools.plan.search import search
        from vit_jax.tools.plan.topology import parse_topology

        topology = parse_topology(self.topology, num_slices=self.slices)
        config = self.load()
        dataset = choose_dataset(self.config, config, **self.chosen("num_examples", "num_classes"))
        if self.search:
            layouts = search(
                config,
                topology,
                dataset,
                price_per_chip_hour=self.price,
                num_tries=self.tries or 4,
                other_batches=self.batches,
                can_compile=not self.arithmetic,
                report=lambda text: print(text, file=sys.stderr, flush=True),
            )
            text = (
                json.dumps(result_to_json(layouts), indent=2) + "\n"
                if self.json
                else result_to_text(layouts)
            )
            print(text, end="")
            return
        result = make_plan(
            config,
            topology,
            dataset,
            price_per_chip_hour=self.price,
            can_compile=not self.arithmetic,
        )
        print(
            json.dumps(to_json(result), indent=2) + "\n" if self.json else to_text(result), end=""
        )
        if target is None:
            return
        if not isinstance(result.compiled, Executable):
            raise UsageError(
                f"--hlo={target}: must have a compiled program. {result.reason.splitlines()[0]}."
            )
        write_atomically(target, result.compiled.text)
