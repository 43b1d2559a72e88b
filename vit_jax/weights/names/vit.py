"""The parts of a transformer by the arrays of a file, alike for all PyTorch formats: their names come from rules.

Legend: D width, M MLP dimension, N patches.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.weights.names.entry import Facts, Rule, count, name_of, shape_of
from vit_jax.weights.names.ours import Shape

_BLOCK = "encoder/blocks/0"


def vit_facts(
    shapes: Mapping[str, Shape],
    rules: Sequence[Rule],
    *,
    num_classes: int,
    defaults: Mapping[str, Any],
    head: str = "linear",
    **others: Any,
) -> Facts:
    """Return what the arrays of a ViT determine; not the number of heads.

    Args:
      shapes: of the file, by the names of the rules.
      rules: names of our parameters in this file.
      num_classes: of the head; 0 for none.
      defaults: fields of the architecture that the format fixes, such as epsilons.
      head: "linear" or "mlp".
      **others: further fields of `Facts`, of hybrids.

    Raises:
      ValueError: as for `shape_of`.
    """

    def find(ours: str) -> Shape | None:
        return shapes.get(name_of(rules, ours))

    def has(ours: str) -> bool:
        return find(ours) is not None

    width, _, *patch_size = shape_of(shapes, name_of(rules, "embedding/kernel"), 4)
    first_layer = name_of(rules, f"{_BLOCK}/attention_norm/scale")
    positions = name_of(rules, "positions/table")
    registers = find("register_tokens")
    is_distilled = has("distillation_token")
    tokens = int(has("class_token")) + int(is_distilled)
    pooled_norm = has("pooled_norm/scale")
    biases = [has(f"{_BLOCK}/attention/{name}/bias") for name in ("query", "key")]
    gated = "swiglu_norm" if has(f"{_BLOCK}/mlp/norm/scale") else "swiglu"
    parts = {
        "class_tokens": tokens,
        "registers": registers[-2] if registers is not None and len(registers) > 1 else 0,
        "layer_scale": 1.0 if has(f"{_BLOCK}/attention_scale") else None,
        "mlp": gated if has(f"{_BLOCK}/mlp/gate/kernel") else "gelu",
        "norm": "layer" if has(f"{_BLOCK}/attention_norm/bias") else "rms",
        "embedding_norm": "tokens" if has("embedding_norm/scale") else None,
        "final_norm": "pooled" if pooled_norm else "tokens" if has("encoder/norm/scale") else "none",
        "attention_norm": has(f"{_BLOCK}/attention/norm/scale"),
        "patch_bias": has("embedding/bias"),
        "qkv_bias": "all" if all(biases) else "query_value" if any(biases) else "none",
        "linear_bias": has(f"{_BLOCK}/mlp/contract/bias"),
    }
    is_pooled = has("pooling/probe")
    return Facts(
        patch_size=(patch_size[0], patch_size[1]),
        width=width,
        depth=count(shapes, re.escape(first_layer.partition("0")[0]) + r"(\d+)\."),
        mlp_dim=shape_of(shapes, name_of(rules, f"{_BLOCK}/mlp/contract/kernel"), 2)[1],
        num_heads=None,
        pool="map" if is_pooled else "gap" if pooled_norm or not tokens else "token",
        head=head,
        num_classes=num_classes,
        position_rows=shapes[positions][-2] if len(shapes.get(positions, ())) > 1 else None,
        defaults=defaults,
        parts=parts,
        is_distilled=is_distilled,
        **others,
    )
