"""The figures of a model, each with the numbers that it shows; which of them a network has, and why not.

Arithmetic is in `attention`, `components`, `grad_cam` and `reconstructions`.
"""

import io
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.api import Model
from vit_jax.arrays import ModelOutput
from vit_jax.config import Architecture
from vit_jax.config.sizes import resnet_downsampling
from vit_jax.tools.figures import attention_maps, sheets
from vit_jax.tools.figures.components import cosine_similarities, principal_components
from vit_jax.tools.figures.drawing import BLUE, GREY, new_figure, short, to_bytes
from vit_jax.tools.figures.grad_cam import class_activations
from vit_jax.tools.figures.reconstructions import reconstruct
from vit_jax.tools.figures.sheets import MOST_INCHES
from vit_jax.tools.figures.view import View, finite, spread

NUM_FILTERS = 28  # as in Figure 7 of the paper
NUM_NEIGHBOURS = 6
MOST_HEADS = 8  # of a sheet, where none are chosen
MOST_ROWS = 10_000  # tokens from which directions of colours are found
MOST_TICKS = 14
MOST_TABLES = 4  # of a figure, where every block has positions of its own
TILE_CELLS = 24  # of a side of a tile at least, between which one is left out


class Figure(NamedTuple):
    """A figure as a PNG file, and the numbers that it shows by name."""

    png: bytes
    data: Mapping[str, np.ndarray]

    def files(self, path: Path) -> dict[Path, bytes]:
        """Return the contents of the files `path` with the suffixes .png and .npz."""
        numbers = io.BytesIO()
        arrays = dict[str, Any](self.data)
        np.savez_compressed(numbers, **arrays)
        return {path.with_suffix(".png"): self.png, path.with_suffix(".npz"): numbers.getvalue()}


def draw_filters(model: Model, view: View) -> Figure:
    """Principal components of the patch embedding (ViT, Fig.

    7 left); of a ResNet or hybrid the kernels of its root.
    """
    del view
    a = model.architecture
    module = cast(Any, model.module)
    if a.has_resnet:
        root = module.stem.root if a.has_transformer else module.body.root
        filters = np.moveaxis(np.asarray(root.conv.kernel[...]), -1, 0)
        data = {"filters": filters}
        title = f"{len(filters)} kernels of the root of {a.name}"
    else:
        kernel_HWCD = np.asarray(module.embedding.kernel[...])
        components = principal_components(kernel_HWCD.reshape(-1, a.width).T, NUM_FILTERS)
        filters = components.component_KV.reshape(-1, *kernel_HWCD.shape[:3])
        data = {"filters": filters, "explained": components.explained_K}
        title = (
            f"{len(filters)} principal components of the embedding filters of {a.name} "
            f"({components.explained_K.sum():.0%} of the variance of {a.width})"
        )
    times = max(1, 32 // filters.shape[1])
    tiles = np.stack([sheets.full_range(one).repeat(times, 0).repeat(times, 1) for one in filters])
    return Figure(
        sheets.draw_sheet([[sheets.montage(sheets.in_rows(tiles, 1.0), 1.0, 3)]], title), data
    )


def draw_positions(model: Model, view: View) -> Figure:
    """Cosine similarity of the position embedding of each patch with that of every other (ViT, Fig.

    7 centre, 10).
    """
    del view
    a = model.architecture
    (rows, columns) = model.architecture.grid
    tables_LSD = position_tables(model)
    similar = np.stack(
        [cosine_similarities(table_SD[-rows * columns :]) for table_SD in tables_LSD]
    )
    similar = similar.reshape(-1, rows, columns, rows, columns)
    layers = spread(len(similar), MOST_TABLES)
    width = MOST_INCHES if len(layers) > 1 else 6.0
    figure = new_figure(width, (width - 1.6) / len(layers) * min(max(rows / columns, 0.3), 3) + 0.9)
    times = max(1, TILE_CELLS // max(rows, columns))
    for axes, layer in zip(
        every := figure.subplots(1, len(layers), squeeze=False)[0], layers, strict=True
    ):
        tiles = similar[layer].repeat(times, axis=2).repeat(times, axis=3)
        mapped = axes.imshow(
            sheets.montage(tiles, np.nan), cmap="cividis", vmin=-1, vmax=1, interpolation="nearest"
        )
        for axis, count in ((axes.yaxis, rows), (axes.xaxis, columns)):
            places = spread(count, MOST_TICKS // len(layers))
            side = count * times
            axis.set_ticks(
                places * (side + 1) + (side - 1) / 2, [str(place + 1) for place in places]
            )
        axes.set_title(f"layer {layer + 1}" if len(similar) > 1 else "", fontsize=9)
    every[0].set_ylabel("row of the patch")
    figure.supxlabel("column of the patch that a tile compares with all others", fontsize="medium")
    figure.colorbar(mapped, ax=list(every), label="cosine similarity", shrink=0.8)
    figure.suptitle(
        f"positions ({a.position_embedding}) of {a.name}, grid {rows}x{columns}", fontsize=9
    )
    return Figure(to_bytes(figure), {"similarity": similar[0] if len(similar) == 1 else similar})


def draw_distance(model: Model, view: View) -> Figure:
    """Mean attention distance of each head (ViT, Fig.

    7 right, 11), and the entropy of its attention.
    """
    a = model.architecture
    cell = cell_size(model.architecture)

    def reduce(output: ModelOutput) -> dict[str, jax.Array]:
        weights = output.attention_LBTQS
        distances = attention_maps.mean_distances(weights, a.grid, cell)
        return {
            "distance_pixels": distances,
            "entropy_nats": attention_maps.mean_entropies(weights),
        }

    statistics = attention_maps.over_images(model, view.all_images, reduce)
    means = {name: array.astype(np.float64).mean(axis=0) for name, array in statistics.items()}
    length = a.sequence_length
    layers = len(means["distance_pixels"])
    uniform = float(attention_maps.token_distances(a.grid, cell).sum()) / math.prod(a.grid) / length
    panels = [("distance_pixels", "attention distance", "mean distance (pixels)", uniform)]
    panels.append(("entropy_nats", "attention entropy", "mean entropy (nats)", math.log(length)))
    figure = new_figure(7.5, 3.6)
    figure.suptitle(
        f"{a.name}, {a.num_heads} heads in each layer, {len(view.all_images)} images", fontsize=9
    )
    for axes, (name, title, label, of_uniform) in zip(figure.subplots(1, 2), panels, strict=True):
        of_heads = np.repeat(np.arange(1, layers + 1), a.num_heads)
        axes.plot(
            of_heads,
            means[name].ravel(),
            "o",
            color=BLUE,
            alpha=0.6,
            markersize=5,
            label="one head",
        )
        axes.axhline(of_uniform, color=GREY, linestyle="--", label="uniform attention")
        depth = "layer" if layers == a.depth else f"attention, {layers // a.depth} in each block"
        axes.set(xlabel=depth, ylabel=label, xlim=(0.5, layers + 0.5))
        axes.set_title(title, fontsize=9)
        axes.set_ylim(0, 1.08 * max(of_uniform, means[name].max()))
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=8,
    )
    return Figure(
        to_bytes(figure),
        means | {f"uniform_{name}": np.float64(value) for name, *_, value in panels},
    )


def draw_rollout(model: Model, view: View) -> Figure:
    """Attention from the representation of an image back to its patches (ViT, Fig. 6, 14)."""
    a = model.architecture
    num_patches = math.prod(a.grid)

    def reduce(output: ModelOutput) -> dict[str, jax.Array]:
        return {
            "rollout": attention_maps.by_image(
                attention_maps.rollout(output.attention_LBTQS), num_patches
            )
        }

    maps = attention_maps.over_images(model, view.shown_images, reduce)["rollout"].reshape(
        -1, *a.grid
    )
    title = f"attention rollout of {a.name}{_queries(a)}{', with predicted classes' if a.num_classes else ''}"
    return _over_images(model, view, maps, "rollout", title, _captions(model, view.shown_images))


def draw_heads(model: Model, view: View) -> Figure:
    """Raw attention of single heads, with the predicted class of each image."""
    a = model.architecture
    chosen = chosen_heads(model, view.heads)
    layers, heads = (np.array(numbers) - 1 for numbers in zip(*chosen, strict=True))
    num_patches = math.prod(a.grid)

    def reduce(output: ModelOutput) -> dict[str, jax.Array]:
        of_heads = jnp.moveaxis(output.attention_LBTQS, 1, 2)[
            layers, heads
        ]  # heads, images, queries, tokens
        return {"attention": jnp.moveaxis(attention_maps.by_image(of_heads, num_patches), 0, 1)}

    images = view.shown_images
    maps = attention_maps.over_images(model, images, reduce)["attention"].reshape(
        len(images), -1, *a.grid
    )
    cells = [[image, *of_heads] for image, of_heads in zip(images, maps, strict=True)]
    names = [f"layer {layer}, head {head}" for layer, head in chosen]
    captions = [[caption or "image", *names] for caption in _captions(model, images)]
    png = sheets.draw_sheet(
        cells, f"attention in {a.name}{_queries(a)}, bright: most", captions=captions
    )
    return Figure(png, {"attention": maps, "heads": np.array(chosen), **_named(view)})


def draw_gradcam(model: Model, view: View) -> Figure:
    """Draw Grad-CAM of a ResNet's last map for the predicted class."""
    activations = class_activations(model, view.shown_images)
    captions = _caption_each(model, activations["label"], activations["probability"])
    title = f"Grad-CAM of {model.architecture.name} for its most probable class"
    figure = _over_images(model, view, activations.pop("activation"), "activation", title, captions)
    return Figure(figure.png, {**figure.data, **activations})


def draw_similar(model: Model, view: View) -> Figure:
    """Draw the nearest neighbours of some images by the cosine of their features."""
    images = view.all_images
    if len(images) < 2:
        raise ValueError("similar: there is one image only; give at least two.")
    features = np.stack([*_rows(model, images, "features_BD")])
    queries = view.shown_indices
    similarity = cosine_similarities(features)
    np.fill_diagonal(similarity, -np.inf)
    nearest = np.argsort(-similarity[queries], axis=1, kind="stable")[
        :, : min(NUM_NEIGHBOURS, len(images) - 1)
    ]
    values = np.take_along_axis(similarity[queries], nearest, axis=1)
    cells = [[images[query], *images[row]] for query, row in zip(queries, nearest, strict=True)]
    captions = [["image", *(f"{value:.3f}" for value in row)] for row in values]
    title = f"the most similar of {len(images)} images by the cosine of their features ({model.architecture.name})"
    png = sheets.draw_sheet(cells, title, captions=captions)
    return Figure(
        png,
        {"images": queries, "nearest": nearest, "cosine": values, "names": np.array(view.names)},
    )


def draw_pca(model: Model, view: View) -> Figure:
    """Patches coloured by the first three principal components of their features, the same for all images."""
    a = model.architecture
    images = view.all_images
    every = -(-len(images) * math.prod(a.grid) // MOST_ROWS)
    shown = {int(index): place for place, index in enumerate(view.shown_indices)}
    rows = list[np.ndarray]()
    of_shown = list[np.ndarray]()
    for index, tokens_ND in enumerate(_rows(model, images, "tokens_BND")):
        rows.append(tokens_ND[index % every :: every])
        if index in shown:
            of_shown.append(tokens_ND)
    components = principal_components(np.concatenate(rows), 3)
    values = components.project(np.stack(of_shown)).reshape(len(shown), *a.grid, -1)
    low, high = np.percentile(values, (1, 99), axis=(0, 1, 2))
    colours = np.zeros((*values.shape[:3], 3))
    colours[..., : values.shape[-1]] = np.clip(
        (values - low) / np.where(high > low, high - low, 1), 0, 1
    )
    title = (
        f"features of the patches of {a.name} in red, green and blue: "
        f"{components.explained_K.sum():.0%} of their variance over {len(images)} images"
    )
    png = sheets.draw_sheet(
        [list(view.shown_images), list(colours)], title, row_names=("image", "components")
    )
    return Figure(png, {"components": values, "explained": components.explained_K, **_named(view)})


def draw_reconstructions(model: Model, view: View) -> Figure:
    """Draw what a network predicts for masked patches (ViT, sec. 4.6)."""
    images = reconstruct(model, view.shown_images)
    rows = {
        "original": "original",
        "seen": "what it sees",
        "predicted": "prediction",
        "target": "best possible",
    }
    title = f"half of the patches hidden from {model.architecture.name}, and predicted"
    png = sheets.draw_sheet(
        [list(images[name]) for name in rows], title, row_names=list(rows.values())
    )
    return Figure(png, {**images, **_named(view)})


def cell_size(a: Architecture) -> tuple[int, int]:
    """Return height and width of the pixels that one token stands for."""
    times = resnet_downsampling(a.units) if a.has_resnet else 1
    return a.patch_size[0] * times, a.patch_size[1] * times


def chosen_heads(model: Model, heads: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Return the heads to draw; raise ValueError for one that the network does not have."""
    a = model.architecture
    layers = (_shape(model, "attention_LBTQS", "attention") or (0,))[0]
    for layer, head in heads:
        if not (1 <= layer <= layers and 1 <= head <= a.num_heads):
            raise ValueError(
                f"--heads={layer}:{head}: {a.name} has layers 1 to {layers} and heads 1 to {a.num_heads}."
            )
    return heads or tuple((layers, head + 1) for head in range(min(a.num_heads, MOST_HEADS)))


def position_tables(model: Model) -> np.ndarray:
    """Return position embeddings (1, S, D), of each block (L, S, D), or without any (0, S, D)."""
    a = model.architecture
    module = cast(Any, model.module)
    tables: Any = np.zeros((0, 0, 0))
    if callable(getattr(module, "positions", None)):
        tables = np.asarray(module.positions())
    elif (of_blocks := getattr(module.encoder.blocks, "positions", None)) is not None:
        tables = np.asarray(jax.vmap(lambda positions: positions()[0])(of_blocks))
    has_rows = tables.shape[1:] == (a.sequence_length, a.width) and tables.any()
    return tables if has_rows else np.zeros((0, a.sequence_length, a.width))


def _queries(a: Architecture) -> str:
    return " from the class token" if a.pool == "token" else ", mean over all patches as queries"


def _rows(model: Model, images_NHWC: np.ndarray, field: str) -> Iterator[np.ndarray]:
    for index, row in enumerate(model.stream(images_NHWC, field)):
        assert isinstance(row, np.ndarray), "prepared images can be read"
        yield finite(model, row[None], index)[0]


def _captions(model: Model, images_NHWC: np.ndarray) -> list[str]:
    """Return the most probable class of each image; empty texts for a network without classes."""
    if not model.architecture.num_classes:
        return [""] * len(images_NHWC)
    probability_NK = finite(model, np.asarray(model.predict(images_NHWC)))
    return _caption_each(model, probability_NK.argmax(axis=1), probability_NK.max(axis=1))


def _caption_each(model: Model, label_N: np.ndarray, probability_N: np.ndarray) -> list[str]:
    predictions = zip(label_N, probability_N, strict=True)
    return [f"{short(model.class_names[label], 12)} {share:.0%}" for label, share in predictions]


def _named(view: View) -> dict[str, np.ndarray]:
    return {
        "names": np.array([view.names[index] for index in view.shown_indices])
        if view.names
        else np.array([])
    }


def _over_images(
    model: Model,
    view: View,
    maps: np.ndarray,
    name: str,
    title: str,
    captions: list[str] | None = None,
) -> Figure:
    """Draw images, maps of their patches, and images that are dark where the map is low."""
    images = view.shown_images
    cell = cell_size(model.architecture)
    over = [sheets.lit(image, one, cell) for image, one in zip(images, maps, strict=True)]
    cells = [list(images), list(maps), over]
    png = sheets.draw_sheet(
        cells, title, row_names=("image", name, "both"), column_names=captions or ()
    )
    return Figure(png, {name: maps, **_named(view)})


# Which network has which figure.


def _is_custom(model: Model) -> str | None:
    return (
        None
        if model.architecture.network is None
        else f"{model.architecture.network} is a network of its own kind"
    )


def _without_positions(model: Model) -> str | None:
    a = model.architecture
    if not a.has_transformer:
        return f"{a.name} has no transformer, and no positions"
    if reason := _is_custom(model):
        return reason
    return (
        None
        if len(position_tables(model))
        else f"{a.position_embedding} positions add no row to each token"
    )


def _without_attention(model: Model) -> str | None:
    a = model.architecture
    if not a.has_transformer:
        return f"{a.name} has no attention"
    shape = _shape(model, "attention_LBTQS", "attention") or (0,)
    if shape[0] and shape[1:] == (1, a.num_heads, a.sequence_length, a.sequence_length):
        return None
    return (
        f"{a.block or a.network or a.name} does not give the weights of every block, head and token"
    )


def _without_map(model: Model) -> str | None:
    a = model.architecture
    if not a.has_resnet:
        return f"{a.name} has no ResNet"
    if not a.num_classes:
        return "the weights have no classes"
    if math.prod(a.map_size) == 1:
        return f"the last map of {a.name} is one cell for an image of {a.image_size[0]}x{a.image_size[1]}"
    return _is_custom(model)


def _without_features(model: Model) -> str | None:
    return None if _shape(model, "features_BD") else "the network returns no features"


def _without_tokens(model: Model) -> str | None:
    a = model.architecture
    is_grid = (_shape(model, "tokens_BND") or ())[:2] == (1, math.prod(a.grid))
    return None if is_grid else "the network returns no features of patches"


def _without_prediction(model: Model) -> str | None:
    a = model.architecture
    if a.patch_outputs:
        return _is_custom(model)
    return f"{a.name} predicts no patches; a run with config.objective.kind=masked_patch trains one that does"


def _shape(model: Model, field: str, *intermediates: str) -> tuple[int, ...] | None:
    """Return the shape of an output's field for one image without computing it; None if the network lacks it."""
    image = jax.ShapeDtypeStruct((1, *model.architecture.image_size, 3), jnp.uint8)
    try:
        output = jax.eval_shape(lambda images: model(images, intermediates=intermediates), image)
    except (TypeError, ValueError):
        return None
    return getattr(getattr(output, field, None), "shape", None)


class _Kind(NamedTuple):
    draw: Callable[[Model, View], Figure]
    why_not: Callable[[Model], str | None]
    needs_images: bool = True
    least_images: int = 1


KINDS: Mapping[str, _Kind] = {
    "filters": _Kind(draw_filters, _is_custom, needs_images=False),
    "positions": _Kind(draw_positions, _without_positions, needs_images=False),
    "distance": _Kind(draw_distance, _without_attention),
    "rollout": _Kind(draw_rollout, _without_attention),
    "heads": _Kind(draw_heads, _without_attention),
    "gradcam": _Kind(draw_gradcam, _without_map),
    "similar": _Kind(draw_similar, _without_features, least_images=2),
    "pca": _Kind(draw_pca, _without_tokens),
    "reconstructions": _Kind(draw_reconstructions, _without_prediction),
}


def available(model: Model) -> dict[str, str | None]:
    """Return for each figure the reason why this network does not have it, or None."""
    return {name: kind.why_not(model) for name, kind in KINDS.items()}
