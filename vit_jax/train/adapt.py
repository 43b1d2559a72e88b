"""From given weights to the network that is fine-tuned: which architecture, and which parameters it starts with."""

from vit_jax.config import Architecture, FinetuneConfig, adapt_architecture
from vit_jax.data.records import Source
from vit_jax.weights import Weights, load_weights
from vit_jax.weights.transfer import Fitted, fit, without_head


def adapt(config: FinetuneConfig, train: Source) -> tuple[Architecture, Fitted, str]:
    """Loads the weights of `config.init_from` and fits them to the data.

    Args:
      config: as loaded.
      train: the training split; its classes become those of the head.

    Returns:
      The network, its parameters, and lines on where they come from.

    Raises:
      ValueError: no weights are given, they cannot be read, or are of another network than the config wants.
    """
    if config.init_from is None:
        raise ValueError(
            "config.init_from is not set: give the weights to fine-tune, --config.init_from=PATH with a workdir, an "
            ".npz or a .safetensors."
        )
    weights = load_weights(config.init_from)
    if config.model.head == "keep":
        _require_same_classes(weights, train)
    else:
        weights = without_head(weights)
    architecture = adapt_architecture(
        weights.architecture, config.model, image_size=config.input.image_size, num_classes=train.num_classes
    )
    fitted = fit(weights, architecture, position_resize=config.model.position_resize)
    notes = [f"note     {note}" for note in weights.notes]
    lines = [f"weights  {weights.source}", f"         {fitted.summary()}", *notes]
    return architecture, fitted, "\n".join(lines)


def _require_same_classes(weights: Weights, train: Source) -> None:
    there, here = weights.class_names, train.class_names
    if weights.architecture.num_classes != len(here) or there not in (None, here):
        known = list(there)[:10] if there else "not named"
        raise ValueError(
            f"config.model.head='keep', but {weights.source} has {weights.architecture.num_classes} classes ({known}) "
            f"and the data {len(here)} ({list(here)[:10]}). For other classes use config.model.head=zero."
        )
