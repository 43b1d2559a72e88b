"""TIPSv2. It has the names of DINOv2 and of timm's VisionTransformer."""

from vit_jax.weights.family import Family, Release, read_models

_MODELS = """
768/12/12
  vit_base_patch14_reg1_tipsv2
1024/24/16
  vit_large_patch14_reg1_tipsv2
1152/27/16
  vit_so400m_patch14_reg1_tipsv2
1536/40/24
  vit_giant_patch14_reg1_tipsv2
"""


FAMILY = Family(
    finetuning_rule="dinov3",
    releases=(
        Release(
            name="TIPSv2",
            addresses=(
                "hf://timm/vit_{base,large,so400m,giant}_patch14_reg1_tipsv2.webli",
                "hf://google/tipsv2-b14",
            ),
            pattern="tipsv2",
            use="dense features with text supervision",
            licence="apache-2.0",
            pixels="both sides 448 bilinear, pixels in [0, 1]",
        ),
    ),
    models=read_models(_MODELS),
    registry_rows={
        "TIPSv2": r"vit_\w+_tipsv2",
    },
    doubled_ratio="_giant_patch14_",
    model_types={"tipsv2": {}, "tipsv2_vision_model": {}},
)
