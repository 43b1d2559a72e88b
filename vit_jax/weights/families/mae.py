"""MAE: masked autoencoders. It has the names and classes of the ViT."""

from vit_jax.weights.family import Family, Release

FAMILY = Family(
    finetuning_rule="mae",
    releases=(
        Release(
            name="MAE",
            addresses=(
                "hf://timm/vit_{base_patch16,large_patch16,huge_patch14}_224.mae",
                "hf://facebook/vit-mae-{base,large,huge}",
            ),
            pattern=r"\.mae$|vit-mae-|^vit_mae$",
            use="fine-tuning",
            licence="cc-by-nc-4.0",
            pixels="short side 256 bicubic, middle 224",
            accuracy="fine-tuned B 83.6, L 85.9, H 86.9; linear B 68.0, L 75.8, H 76.6",
            source="arXiv:2111.06377",
        ),
    ),
    model_types={"vit_mae": {}},
)
