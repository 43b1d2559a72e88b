"""What weights remember of the images they were trained on: where they were, and which of them were held out.

Without it nobody could later judge them on the images that they have not seen.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data of the run that made the weights.

    Attributes:
      data: as in a config, a folder by its whole path.
      seed: of the run, which chose the hold-out of a folder without split sub-folders.
      holdout_fraction: of every class of such a folder.
      train_split: the name of the split that it was trained on.
      test_split: and of the one that it was not.
      classes: those chosen of the data; (): all.
    """

    data: str
    seed: int
    holdout_fraction: float
    train_split: str
    test_split: str
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(self.classes))  # JSON has lists


def stored_training_data(metadata: Mapping[str, Any]) -> TrainingData | None:
    """What stands in metadata, which may come from anybody's file; None where nothing does, or nothing that we know."""
    stored = metadata.get("training")
    config = metadata.get("config")
    if stored is None and isinstance(config, dict) and isinstance(config.get("input"), dict):
        stored = {**config["input"], **config}  # checkpoints of before this was written
    if not isinstance(stored, dict) or not isinstance(stored.get("classes"), list):
        return None
    known: dict[str, Any] = {field.name: stored.get(field.name) for field in dataclasses.fields(TrainingData)}
    texts = [known["data"], known["train_split"], known["test_split"], *(known["classes"])]
    is_sound = type(known["seed"]) is int and type(known["holdout_fraction"]) is float
    return TrainingData(**known) if is_sound and all(isinstance(text, str) for text in texts) else None
