"""The figures of a model with the numbers that they show.

Arithmetic is in `attention_maps`, `components`, `grad_cam` and `reconstructions`; `missing` has the
reasons why a network lacks a figure.
"""

import io
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.api import Model
from vit_jax.arrays import ModelOutput
from vit_jax.config import Architecture
from vit_jax.config.sizes import resnet_downsampling
from vit_jax.tools.figures import attention_maps, missing, sheets
from vit_jax.tools.figures.components import cosine_similarities, principal_components
from vit_jax.tools.figures.drawing import BLUE, GREY, new_figure, shorten, to_bytes
from vit_jax.tools.figures.grad_cam import class_activations
from vit_jax.tools.figures.reconstructions import reconstruct
from vit_jax.tools.figures.sheets import MOST_INCHES
from vit_jax.tools.figures.view import View, require_finite_rows, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.image import AxesImage

NUM_FILTERS = 28  # the number in Figure 7 of the paper
NUM_NEIGHBOURS = 6
MOST_HEADS = 8  # heads of a sheet, if the user selects none
MOST_ROWS = 10_000  # tokens that determine the principal components
MOST_TICKS = 14
MOST_TABLES = 4  # tables of position embeddings in a figure, if every block has one
KERNEL_PIXELS = 32  # least height of a kernel in a figure
TILE_CELLS = 24  # least number of cells of a side of a tile; the gap between tiles is one cell
CAPTION_LETTERS = 12  # letters of a class name in a caption


class Figure(NamedTuple):
    """A figure as a PNG file, and the numbers that it shows by name."""

    png: bytes
    data: Mapping[str, np.ndarray]

    def files(self, path: Path) -> dict[Path, bytes]:
        """Return the contents of the files `path` with the suffixes .png and .npz."""
        numbers = io.BytesIO()
        arrays = dict[str, Any](self.data)
        np.savez_compressed(numbers, **arrays)
        return {
            path.with_suffix(".png"): self.png,
            path.with_suffix(".npz"): numbers.getvalue(),
        }


def draw_filters(model: Model, view: View) -> Figure:
    """Principal components of the patch embedding (ViT, Fig. 7 left), or the root of a ResNet."""
    del view
    if model.architecture.has_resnet:
        return _draw_root_kernels(model)
    return _draw_embedding_components(model)


def _draw_root_kernels(model: Model) -> Figure:
    """Draw the kernels of the first convolution of a ResNet or a hybrid."""
    a = model.architecture
    module = cast(Any, model.module)
    resnet = module.stem if a.has_transformer else module.body
    kernel_HWCN = np.asarray(resnet.root.conv.kernel[...])
    kernel_NHWC = np.moveaxis(kernel_HWCN, -1, 0)

    title = f"{len(kernel_NHWC)} kernels of the root of {a.name}"
    png = sheets.draw_sheet([[_join_kernels(kernel_NHWC)]], title)
    return Figure(png, {"filters": kernel_NHWC})


def _draw_embedding_components(model: Model) -> Figure:
    """Draw the principal components of the patch embedding."""
    a = model.architecture
    module = cast(Any, model.module)
    kernel_HWCD = np.asarray(module.embedding.kernel[...])
    weights_DV = kernel_HWCD.reshape(-1, a.width).T
    components = principal_components(weights_DV, NUM_FILTERS)
    kernel_shape = kernel_HWCD.shape[:3]
    filter_KHWC = components.component_KV.reshape(-1, *kernel_shape)

    explained = components.explained_K.sum()
    title = (
        f"{len(filter_KHWC)} principal components of the embedding filters of {a.name} "
        f"({explained:.0%} of the variance of {a.width})"
    )
    png = sheets.draw_sheet([[_join_kernels(filter_KHWC)]], title)
    numbers = {
        "filters": filter_KHWC,
        "explained": components.explained_K,
    }
    return Figure(png, numbers)


def _join_kernels(kernel_NHWC: np.ndarray) -> np.ndarray:
    """Return kernels in rows as one image, each from its smallest to its largest number."""
    _, height, _, _ = kernel_NHWC.shape
    scaled = np.stack([sheets.scale_to_full_range(kernel) for kernel in kernel_NHWC])
    colours = sheets.select_colours(scaled)
    times = max(1, KERNEL_PIXELS // height)
    tiles = colours.repeat(times, axis=1).repeat(times, axis=2)
    rows = sheets.arrange_in_rows(tiles, 1.0)
    return sheets.join_tiles(rows, 1.0, gap=3)


def draw_positions(model: Model, view: View) -> Figure:
    """Cosine similarities of the position embeddings of patches (ViT, Fig. 7 centre, 10)."""
    del view
    a = model.architecture
    rows, columns = a.grid
    similarities = _compare_positions(model)
    has_many_layers = len(similarities) > 1

    layers = spread(len(similarities), MOST_TABLES)
    width = MOST_INCHES if len(layers) > 1 else 6.0
    panel_width = (width - 1.6) / len(layers)
    side_ratio = min(max(rows / columns, 0.3), 3)
    figure = new_figure(width, panel_width * side_ratio + 0.9)
    (all_axes,) = figure.subplots(1, len(layers), squeeze=False)
    most_ticks = MOST_TICKS // len(layers)
    for axes, layer in zip(all_axes, layers, strict=True):
        image = _draw_similarities(axes, similarities[layer], most_ticks)
        if has_many_layers:
            axes.set_title(f"layer {layer + 1}", fontsize=9)

    all_axes[0].set_ylabel("row of the patch")
    figure.supxlabel(
        "column of the patch that a tile compares with all others",
        fontsize="medium",
    )
    figure.colorbar(
        image,
        ax=list(all_axes),
        label="cosine similarity",
        shrink=0.8,
    )
    title = f"positions ({a.position_embedding}) of {a.name}, grid {rows}x{columns}"
    figure.suptitle(title, fontsize=9)

    png = to_bytes(figure)
    if has_many_layers:
        return Figure(png, {"similarity": np.stack(similarities)})
    return Figure(png, {"similarity": similarities[0]})


def _compare_positions(model: Model) -> list[np.ndarray]:
    """Return for each table the similarities of all pairs of patches, by rows and columns."""
    rows, columns = model.architecture.grid
    num_patches = rows * columns
    similarities = []
    for table_SD in missing.position_tables(model):
        similarity_NN = cosine_similarities(table_SD[-num_patches:])
        similarities.append(similarity_NN.reshape(rows, columns, rows, columns))
    return similarities


def _draw_similarities(
    axes: "Axes",
    similarity: np.ndarray,
    most_ticks: int,
) -> "AxesImage":
    """Draw a tile for each patch, with its similarities (rows, columns) to all patches.

    Returns:
      the image of matplotlib, for a colour bar.
    """
    rows, columns = similarity.shape[:2]
    times = max(1, TILE_CELLS // max(rows, columns))
    tiles = similarity.repeat(times, axis=2).repeat(times, axis=3)
    joined = sheets.join_tiles(tiles, np.nan)
    image = axes.imshow(
        joined,
        cmap="cividis",
        vmin=-1,
        vmax=1,
        interpolation="nearest",
    )
    _number_tiles(axes.yaxis, rows, rows * times, most_ticks)
    _number_tiles(axes.xaxis, columns, columns * times, most_ticks)
    return image


def _number_tiles(axis: "Axis", count: int, side: int, most_ticks: int) -> None:
    """Write the numbers of some tiles at their middles; `side` is the length of a tile."""
    stride = math.ceil(count / most_ticks)
    indices = np.arange(0, count, stride)
    middles = indices * (side + 1) + (side - 1) / 2
    numbers = [str(index + 1) for index in indices]
    axis.set_ticks(middles, numbers)


def draw_distance(model: Model, view: View) -> Figure:
    """Mean distance and entropy of the attention of each head (ViT, Fig. 7 right, 11)."""
    a = model.architecture
    cell = cell_size(a)

    def reduce(output: ModelOutput) -> dict[str, jax.Array]:
        weights = output.attention_LBTQS
        return {
            "distance_pixels": attention_maps.mean_distances(weights, a.grid, cell),
            "entropy_nats": attention_maps.mean_entropies(weights),
        }

    statistics = attention_maps.reduce_attention(model, view.all_images, reduce)
    distance_BLT = statistics["distance_pixels"].astype(np.float64)
    distance_LT = distance_BLT.mean(axis=0)
    entropy_BLT = statistics["entropy_nats"].astype(np.float64)
    entropy_LT = entropy_BLT.mean(axis=0)

    uniform_distance = _measure_uniform_distance(a)
    uniform_entropy = math.log(a.sequence_length)
    figure = new_figure(7.5, 3.6)
    title = f"{a.name}, {a.num_heads} heads in each layer, {len(view.all_images)} images"
    figure.suptitle(title, fontsize=9)
    left, right = figure.subplots(1, 2)
    left.set_title("attention distance", fontsize=9)
    _draw_heads_by_layer(
        left,
        a,
        distance_LT,
        uniform_distance,
        "mean distance (pixels)",
    )
    right.set_title("attention entropy", fontsize=9)
    _draw_heads_by_layer(
        right,
        a,
        entropy_LT,
        uniform_entropy,
        "mean entropy (nats)",
    )
    lines, names = right.get_legend_handles_labels()
    figure.legend(
        lines,
        names,
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=8,
    )

    numbers = {
        "distance_pixels": distance_LT,
        "entropy_nats": entropy_LT,
        "uniform_distance_pixels": np.float64(uniform_distance),
        "uniform_entropy_nats": np.float64(uniform_entropy),
    }
    return Figure(to_bytes(figure), numbers)


def _measure_uniform_distance(a: Architecture) -> float:
    """Return the mean distance in pixels of uniform attention; that to the class token is 0."""
    distances = attention_maps.token_distances(a.grid, cell_size(a))
    sum_of_distances = float(distances.sum())
    num_patches = math.prod(a.grid)
    return sum_of_distances / num_patches / a.sequence_length


def _draw_heads_by_layer(
    axes: "Axes",
    a: Architecture,
    value_LT: np.ndarray,
    uniform: float,
    label: str,
) -> None:
    """Draw a point for each head, and a line at the value of uniform attention."""
    num_layers = len(value_LT)
    layers = np.arange(1, num_layers + 1)
    axes.plot(
        np.repeat(layers, a.num_heads),
        value_LT.ravel(),
        "o",
        label="one head",
        color=BLUE,
        alpha=0.6,
        markersize=5,
    )
    axes.axhline(
        uniform,
        color=GREY,
        linestyle="--",
        label="uniform attention",
    )

    axes.set_xlabel("layer")
    if num_layers != a.depth:
        axes.set_xlabel(f"attention, {num_layers // a.depth} in each block")
    axes.set_ylabel(label)
    axes.set_xlim(0.5, num_layers + 0.5)
    axes.set_ylim(0, 1.08 * max(uniform, value_LT.max()))
    axes.locator_params(axis="x", integer=True)


def draw_rollout(model: Model, view: View) -> Figure:
    """Attention from the representation of an image back to its patches (ViT, Fig. 6, 14)."""
    a = model.architecture
    num_patches = math.prod(a.grid)

    def reduce(output: ModelOutput) -> dict[str, jax.Array]:
        weights = attention_maps.rollout(output.attention_LBTQS)
        return {"rollout": attention_maps.select_patch_weights(weights, num_patches)}

    images = view.shown_images
    rollout = attention_maps.reduce_attention(model, images, reduce)["rollout"]
    maps = rollout.reshape(-1, *a.grid)
    title = f"attention rollout of {a.name}{_describe_queries(a)}"
    if a.num_classes:
        title += ", with predicted classes"
    captions = _write_captions(model, images)
    return _draw_over_images(model, view, maps, "rollout", title, captions)


def draw_heads(model: Model, view: View) -> Figure:
    """Raw attention of single heads, with the predicted class of each image."""
    a = model.architecture
    selected = np.array(select_heads(model, view.heads))  # counted from 1
    layer_indices, head_indices = selected.T - 1
    num_patches = math.prod(a.grid)

    def reduce(output: ModelOutput) -> dict[str, jax.Array]:
        weights_LTBQS = jnp.moveaxis(output.attention_LBTQS, 1, 2)
        selected_weights = weights_LTBQS[layer_indices, head_indices]  # selected heads, B, Q, S
        of_patches = attention_maps.select_patch_weights(selected_weights, num_patches)
        return {"attention": jnp.moveaxis(of_patches, 0, 1)}

    images = view.shown_images
    attention = attention_maps.reduce_attention(model, images, reduce)["attention"]
    maps = attention.reshape(len(images), -1, *a.grid)

    head_names = [f"layer {layer}, head {head}" for layer, head in selected]
    class_names = _write_captions(model, images)
    cells = []
    captions = []
    for image, head_maps, class_name in zip(view.shown_pixels, maps, class_names, strict=True):
        cells.append([image, *head_maps])
        captions.append([class_name or "image", *head_names])

    title = f"attention in {a.name}{_describe_queries(a)}, bright: most"
    numbers = {
        "attention": maps,
        "heads": selected,
        "names": _list_shown_names(view),
    }
    png = sheets.draw_sheet(cells, title, captions=captions)
    return Figure(png, numbers)


def draw_gradcam(model: Model, view: View) -> Figure:
    """Draw Grad-CAM of a ResNet's last map for the predicted class."""
    activations = class_activations(model, view.shown_images)
    captions = _write_class_captions(model, activations["label"], activations["probability"])
    title = f"Grad-CAM of {model.architecture.name} for its most probable class"
    maps = activations.pop("activation")
    figure = _draw_over_images(model, view, maps, "activation", title, captions)
    return Figure(figure.png, {**figure.data, **activations})


def draw_similar(model: Model, view: View) -> Figure:
    """Draw the nearest neighbours of some images by the cosine of their features."""
    images = view.all_images
    if len(images) < 2:
        raise ValueError("similar: there is one image only; give at least two.")
    rows = list(_compute_rows(model, images, "features_BD"))
    similarity_NN = cosine_similarities(np.stack(rows))
    np.fill_diagonal(similarity_NN, -np.inf)

    queries = view.shown_indices
    similarity_QN = similarity_NN[queries]
    num_neighbours = min(NUM_NEIGHBOURS, len(images) - 1)
    order_QN = np.argsort(-similarity_QN, axis=1, kind="stable")
    nearest = order_QN[:, :num_neighbours]
    cosines = np.take_along_axis(similarity_QN, nearest, axis=1)

    cells = []
    captions = []
    pixels = sheets.to_pixels(images)
    for query, neighbours, row in zip(queries, nearest, cosines, strict=True):
        cells.append([pixels[query], *pixels[neighbours]])
        texts = [f"{cosine:.3f}" for cosine in row]
        captions.append(["image", *texts])

    title = (
        f"the most similar of {len(images)} images by the cosine of their features "
        f"({model.architecture.name})"
    )
    numbers = {
        "images": queries,
        "nearest": nearest,
        "cosine": cosines,
        "names": np.array(view.names),
    }
    png = sheets.draw_sheet(cells, title, captions=captions)
    return Figure(png, numbers)


def draw_pca(model: Model, view: View) -> Figure:
    """Patches coloured by the first three principal components of their features."""
    a = model.architecture
    images = view.all_images
    num_tokens = len(images) * math.prod(a.grid)
    stride = math.ceil(num_tokens / MOST_ROWS)
    shown_indices = set(view.shown_indices.tolist())
    sampled_tokens = list[np.ndarray]()
    shown_tokens = list[np.ndarray]()
    for index, tokens_ND in enumerate(_compute_rows(model, images, "tokens_BND")):
        first = index % stride
        sampled_tokens.append(tokens_ND[first::stride])
        if index in shown_indices:
            shown_tokens.append(tokens_ND)

    # The components are the same for all images, so that colours are comparable.
    components = principal_components(np.concatenate(sampled_tokens), 3)
    projected = components.project(np.stack(shown_tokens))
    values = projected.reshape(len(shown_tokens), *a.grid, -1)
    colours = _choose_colours(values)

    explained = components.explained_K.sum()
    title = (
        f"features of the patches of {a.name} in red, green and blue: "
        f"{explained:.0%} of their variance over {len(images)} images"
    )
    png = sheets.draw_sheet(
        [view.shown_pixels, colours],
        title,
        row_names=("image", "components"),
    )
    numbers = {
        "components": values,
        "explained": components.explained_K,
        "names": _list_shown_names(view),
    }
    return Figure(png, numbers)


def _choose_colours(values: np.ndarray) -> np.ndarray:
    """Return red, green and blue for at most three components, of which each has its full range."""
    low, high = np.percentile(values, (1, 99), axis=(0, 1, 2))
    span = np.where(high > low, high - low, 1)
    shares = np.clip((values - low) / span, 0, 1)

    *map_shape, num_components = values.shape
    colours = np.zeros((*map_shape, 3))
    colours[..., :num_components] = shares
    return colours


def draw_reconstructions(model: Model, view: View) -> Figure:
    """Draw what a network predicts for masked patches (ViT, sec. 4.6)."""
    images = reconstruct(model, view.shown_images)
    title = f"half of the patches hidden from {model.architecture.name}, and predicted"
    png = sheets.draw_sheet(
        [images["original"], images["seen"], images["predicted"], images["target"]],
        title,
        row_names=("original", "what it sees", "prediction", "best possible"),
    )
    return Figure(png, {**images, "names": _list_shown_names(view)})


def cell_size(a: Architecture) -> tuple[int, int]:
    """Return height and width of the pixels of one token."""
    height, width = a.patch_size
    if not a.has_resnet:
        return height, width
    times = resnet_downsampling(a.units)
    return height * times, width * times


def select_heads(model: Model, heads: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Return the heads to draw: `heads`, or without any the first heads of the last layer.

    Raises:
      ValueError: the network does not have a head.
    """
    a = model.architecture
    num_layers, *_ = missing.find_attention_shape(model)
    for layer, head in heads:
        has_layer = 1 <= layer <= num_layers
        has_head = 1 <= head <= a.num_heads
        if not (has_layer and has_head):
            raise ValueError(
                f"--heads={layer}:{head}: {a.name} has layers 1 to {num_layers} "
                f"and heads 1 to {a.num_heads}."
            )
    if heads:
        return heads
    num_shown = min(a.num_heads, MOST_HEADS)
    return tuple((num_layers, head) for head in range(1, num_shown + 1))


def _describe_queries(a: Architecture) -> str:
    if a.pool == "token":
        return " from the class token"
    return ", mean over all patches as queries"


def _compute_rows(
    model: Model,
    images_NHWC: np.ndarray,
    field: str,
) -> Iterator[np.ndarray]:
    """Yield an output of the network for each image; raise ValueError if one is not finite."""
    for index, row in enumerate(model.stream(images_NHWC, field)):
        assert isinstance(row, np.ndarray), "prepared images are readable"
        require_finite_rows(model, row[None], index)
        yield row


def _write_captions(model: Model, images_NHWC: np.ndarray) -> list[str]:
    """Return the most probable class of each image; empty texts for a network without classes."""
    if not model.architecture.num_classes:
        return [""] * len(images_NHWC)
    probability_NK = np.asarray(model.predict(images_NHWC))
    require_finite_rows(model, probability_NK)
    label_N = probability_NK.argmax(axis=1)
    probability_N = probability_NK.max(axis=1)
    return _write_class_captions(model, label_N, probability_N)


def _write_class_captions(
    model: Model,
    label_N: np.ndarray,
    probability_N: np.ndarray,
) -> list[str]:
    captions = []
    for label, probability in zip(label_N, probability_N, strict=True):
        class_name = shorten(model.class_names[label], CAPTION_LETTERS)
        captions.append(f"{class_name} {probability:.0%}")
    return captions


def _list_shown_names(view: View) -> np.ndarray:
    """Return the names of the images of a sheet; none if they have no names."""
    if not view.names:
        return np.array([])
    return np.array([view.names[index] for index in view.shown_indices])


def _draw_over_images(
    model: Model,
    view: View,
    maps: np.ndarray,
    name: str,
    title: str,
    captions: list[str],
) -> Figure:
    """Draw images, maps of their patches, and images that are dark where the map is low."""
    images = view.shown_pixels
    cell = cell_size(model.architecture)
    drawn_maps = []
    highlighted = []
    for image, map_hw in zip(images, maps, strict=True):
        drawn_map = sheets.limit_outliers(map_hw)
        drawn_maps.append(drawn_map)
        highlighted.append(sheets.highlight(image, drawn_map, cell))

    png = sheets.draw_sheet(
        [images, drawn_maps, highlighted],
        title,
        row_names=("image", name, "both"),
        column_names=captions,
    )
    numbers = {
        name: maps,
        "names": _list_shown_names(view),
    }
    return Figure(png, numbers)


class _Kind(NamedTuple):
    """A figure of a network.

    Attributes:
      draw: draws it.
      explain_missing: returns the reason why a network lacks it, or None.
      needs_images: False for a figure of the weights alone.
      least_images: least number of images.
    """

    draw: Callable[[Model, View], Figure]
    explain_missing: Callable[[Model], str | None]
    needs_images: bool = True
    least_images: int = 1


KINDS: Mapping[str, _Kind] = {
    "filters": _Kind(draw_filters, missing.explain_custom, needs_images=False),
    "positions": _Kind(draw_positions, missing.explain_positions, needs_images=False),
    "distance": _Kind(draw_distance, missing.explain_attention),
    "rollout": _Kind(draw_rollout, missing.explain_attention),
    "heads": _Kind(draw_heads, missing.explain_attention),
    "gradcam": _Kind(draw_gradcam, missing.explain_map),
    "similar": _Kind(draw_similar, missing.explain_features, least_images=2),
    "pca": _Kind(draw_pca, missing.explain_tokens),
    "reconstructions": _Kind(draw_reconstructions, missing.explain_prediction),
}


def explain_missing(model: Model) -> dict[str, str | None]:
    """Return for each figure the reason why this network does not have it, or None."""
    return {name: kind.explain_missing(model) for name, kind in KINDS.items()}
