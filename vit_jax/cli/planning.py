"""The verb plan: memory, time and cost of a recipe on a machine that need not be available."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from vit_jax.cli.groups import LoraOption, StartedRecipe, use_no_accelerator
from vit_jax.cli.options import REQUIRED, UsageError, option, switch
from vit_jax.cli.outputs import resolve_output_file
from vit_jax.cli.verbs import verb
from vit_jax.config.rules import Count, NotNegative, When

if TYPE_CHECKING:
    from vit_jax.config import RunConfig
    from vit_jax.tools.plan.dataset import Dataset
    from vit_jax.tools.plan.estimate import Plan as Estimate
    from vit_jax.tools.plan.topology import Topology

SEARCHING = When("search")
COMPILING = When("arithmetic", False)
_NUM_TRIES = 4


@verb(
    "--config=pretrain_imagenet1k:ViT-B/16 --topology=v5e:16x16 --price=1.2",
    "--config=pretrain_imagenet1k:ViT-L/16 --topology=h100:8 --search",
)
class Plan(StartedRecipe, LoraOption):
    """Memory, time and cost of a recipe on TPUs or GPUs that you do not have.

    The run's own step is compiled where the compiler is installed (extras tpu and plan-gpu).
    Without one, memory and time come from arithmetic.
    """

    topology: str = option(
        "NAME",
        "machine: v5e:16x16 or v5litepod-256; 2*v5e:16x16 is two slices; h100:8 or 8xH100 is a "
        "node of GPUs, 4*h100:8 four",
        REQUIRED,
    )

    slices: Count | None = option("N", "number of slices of this topology")
    price: NotNegative | None = option("N", "price of one chip for one hour")

    num_examples: Count | None = option("N", "number of training images, for data of unknown size")
    num_classes: Count | None = option("N", "number of classes, for data of unknown size")

    arithmetic: bool = switch("compile nothing")

    search: bool = switch(
        "find the fastest layout that fits: rematerialisation, sharding and micro-batches"
    )
    batches: Annotated[bool, SEARCHING] = switch("search other global batches, too")
    tries: Annotated[Count | None, SEARCHING, COMPILING] = option(
        "N", "number of layouts to compile, the best first; default: 4"
    )

    hlo: Annotated[str | None, When("search", False), COMPILING] = option(
        "FILE", "write the compiled program"
    )
    json: bool = switch("print all figures as JSON")

    def suggest_next(self) -> str:
        """Return the run of the recipe."""
        return self.suggest_run()

    def complete(self, words: Sequence[str]) -> Self:
        """Return the options with the rule of the weights, and with LoRA as overrides."""
        use_no_accelerator()
        completed = super().complete(words)
        return completed.expand_lora(completed.config)

    def run(self) -> None:
        target = None
        if self.hlo is not None:
            target = resolve_output_file(self.hlo, "--hlo=")

        from vit_jax.tools.plan.dataset import choose_dataset
        from vit_jax.tools.plan.topology import parse_topology

        topology = parse_topology(self.topology, num_slices=self.slices)
        config = self.load()
        sizes = self.collect_values("num_examples", "num_classes")
        dataset = choose_dataset(self.config, config, **sizes)
        if self.search:
            self._search(config, topology, dataset)
        else:
            self._estimate(config, topology, dataset, target)

    def _search(self, config: "RunConfig", topology: "Topology", dataset: "Dataset") -> None:
        """Print the fastest layouts."""
        from vit_jax.tools.plan.report import result_to_json, result_to_text
        from vit_jax.tools.plan.search import search

        def report(text: str) -> None:
            print(text, file=sys.stderr, flush=True)

        layouts = search(
            config,
            topology,
            dataset,
            price_per_chip_hour=self.price,
            num_tries=self.tries or _NUM_TRIES,
            other_batches=self.batches,
            can_compile=not self.arithmetic,
            report=report,
        )
        if self.json:
            print(json.dumps(result_to_json(layouts), indent=2))
        else:
            print(result_to_text(layouts), end="")

    def _estimate(
        self,
        config: "RunConfig",
        topology: "Topology",
        dataset: "Dataset",
        target: Path | None,
    ) -> None:
        """Print memory, time and cost; write the compiled program to a file."""
        from vit_jax.tools.plan.estimate import make_plan
        from vit_jax.tools.plan.report import to_json, to_text

        result = make_plan(
            config,
            topology,
            dataset,
            price_per_chip_hour=self.price,
            can_compile=not self.arithmetic,
        )
        if self.json:
            print(json.dumps(to_json(result), indent=2))
        else:
            print(to_text(result), end="")
        if target is not None:
            _write_program(result, target)


def _write_program(result: "Estimate", target: Path) -> None:
    """Write the compiled program; raise UsageError if nothing was compiled."""
    from vit_jax.storage.files import write_atomically
    from vit_jax.tools.plan.aot import Executable

    if not isinstance(result.compiled, Executable):
        reason = result.reason.splitlines()[0]
        raise UsageError(f"--hlo={target}: must have a compiled program. {reason}.")
    write_atomically(target, result.compiled.text)
