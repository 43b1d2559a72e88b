"""The paper's own points, to be laid under ours: pre-trained on JFT-300M, fine-tuned on ImageNet at 384 pixels."""

from typing import NamedTuple


class Row(NamedTuple):
    """A row of Table 6."""

    model: str  # as the recipe `pretrain_jft` names it
    epochs: int
    imagenet_percent: float  # top-1
    exaflops: float  # of pre-training


TABLE_6 = (
    Row("ViT-B/32", 7, 80.73, 55),
    Row("ViT-B/16", 7, 84.15, 224),
    Row("ViT-L/32", 7, 84.37, 196),
    Row("ViT-L/16", 7, 86.30, 783),
    Row("ViT-L/16", 14, 87.12, 1567),
    Row("ViT-H/14", 14, 88.08, 4262),
    Row("R50x1", 7, 77.54, 50),
    Row("R50x2", 7, 82.12, 199),
    Row("R101x1", 7, 80.67, 96),
    Row("R152x1", 7, 81.88, 141),
    Row("R152x2", 7, 84.97, 563),
    Row("R152x2", 14, 85.56, 1126),
    Row("R200x3", 14, 87.22, 3306),
    Row("R50+ViT-B/32", 7, 84.90, 106),
    Row("R50+ViT-B/16", 7, 85.58, 274),
    Row("R50+ViT-L/32", 7, 85.68, 246),
    Row("R50+ViT-L/16", 7, 86.60, 859),
    Row("R50+ViT-L/16", 14, 87.12, 1668),
)
