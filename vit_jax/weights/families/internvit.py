"""InternViT. It has the names and the class of timm's VisionTransformer."""

from vit_jax.weights.family import Family, Release, read_models

_MODELS = """
1024/24/16
  vit_intern300m_patch14_448
"""


FAMILY = Family(
    releases=(
        Release(
            name="InternViT",
            addresses=("hf://timm/vit_intern300m_patch14_448.ogvl_2pt5",),
            pattern="vit_intern300m",
            use="vision tower of language models",
            licence="apache-2.0",
            pixels="both sides 448 bicubic",
        ),
    ),
    models=read_models(_MODELS),
    registry_rows={
        "InternViT": "vit_intern",
    },
)
