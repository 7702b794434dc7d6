"""What two views of an image have in common (the paper's figure 2, c to h)."""

from __future__ import annotations

import typing

import numpy as np
from matplotlib import patches

from amdim_tf import cells, charts, heat_maps
from amdim_tf.model import AMDIM

_CELL_NAMES = ("A", "B")
_FROM_CELLS = [f"from {name}" for name in _CELL_NAMES]
# How much of the overlay the components' colours make; the rest is the grey picture.
_COLOUR_SHARE = 0.75


class Similarities(typing.NamedTuple):
    """Cosines between embeddings of x¹ and all cells of x², for P pairs of views."""

    chosen: np.ndarray  # int [P, 2, 2]: row and column of cells A and B in the 7×7 map of x¹
    f1_f7: np.ndarray  # [P, 7, 7]; with a mixture, of the component that is most similar
    of_mixture: bool
    f7_f7: np.ndarray  # [P, 2, 7, 7], of A and of B
    f5_f5: np.ndarray  # [P, 2, 5, 5]


def similarities(first: dict, second: dict, antecedents: np.ndarray) -> Similarities:
    """Similarities of x¹ to x².

    A and B are the two cells of x¹ whose φ7 differ most, within the part that f5 covers: often one
    on an object and one beside it.

    Args:
        first, second: phi5 and phi7 of the two views, as `AMDIM.encode` gives them.
        antecedents: of f1 of the first view, [P, K, D], as `AMDIM.antecedents` gives them.
    """
    first, second = (
        {name: _unit(np.asarray(v)) for name, v in both.items()} for both in (first, second)
    )
    antecedents = _unit(np.asarray(antecedents))
    P, K, _ = antecedents.shape
    inner = first["phi7"][:, 1:-1, 1:-1].reshape(P, 25, -1)  # [P, 25, D]
    between = (inner @ inner.swapaxes(1, 2)).reshape(P, -1)  # [P, 625]
    pair = np.stack(np.unravel_index(between.argmin(axis=1), (25, 25)), axis=1)  # [P, 2]
    places5 = np.stack(np.divmod(pair, 5), axis=2)  # [P, 2, 2], in the 5×5 map
    places7 = places5 + 1  # f5 has its middle where f7 has it, with a cell less on each side
    pairs = np.arange(P)[:, None]
    chosen7 = first["phi7"][pairs, places7[..., 0], places7[..., 1]]  # [P, 2, D]
    chosen5 = first["phi5"][pairs, places5[..., 0], places5[..., 1]]
    return Similarities(
        places7,
        np.einsum("pkd,phwd->kphw", antecedents, second["phi7"]).max(axis=0),
        K > 1,
        np.einsum("pcd,phwd->pchw", chosen7, second["phi7"]),
        np.einsum("pcd,phwd->pchw", chosen5, second["phi5"]),
    )


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def draw_similarities(pictures1: np.ndarray, pictures2: np.ndarray, found: Similarities):
    """A row per pair: both views, and three kinds of similarity over the second.

    Args:
        pictures1, pictures2: uint8 [P, S, S, 3].
        found: of the same pairs.
    """
    rows = len(pictures1)
    figure, axes = heat_maps.grid(
        [heat_maps.TITLED] * rows, 7, "Similarity (cosine) of features of x¹ to the cells of x²"
    )
    of_f1 = "best of f1¹…f1ᴷ" if found.of_mixture else "from f1"
    kinds = {
        "f1 to f7": (found.f1_f7[:, None], [2], [of_f1]),
        "f7 to f7": (found.f7_f7, [3, 4], _FROM_CELLS),
        "f5 to f5": (found.f5_f5, [5, 6], _FROM_CELLS),
    }
    for row in range(rows):
        heat_maps.show(axes[row, 0], pictures1[row], "x¹")
        heat_maps.show(axes[row, 1], pictures2[row], "x²")
        for (i, j), name, colour in zip(
            found.chosen[row], _CELL_NAMES, charts.COLOURS, strict=False
        ):
            heat_maps.mark_cell(axes[row, 0], i, j, cells.SIDE, name, colour)
    for label, (maps, columns, names) in kinds.items():
        limits = heat_maps.limits_of(maps)
        for row in range(rows):
            for number, (column, name) in enumerate(zip(columns, names, strict=True)):
                drawn = heat_maps.show_heat(
                    axes[row, column], pictures2[row], maps[row, number], limits, name
                )
        heat_maps.scale(figure, drawn, axes[-1, columns], label)
    return figure


def posteriors(model: AMDIM, first: dict, second: dict) -> np.ndarray:
    """Shares [P, 7, 7, K] of the components of x¹ in the cells of x² (paper section 3.7)."""
    return model.posterior(first["f1"], second["phi7"]).numpy()


def draw_segmentation(pictures1: np.ndarray, pictures2: np.ndarray, posterior: np.ndarray):
    """x¹, x², and x² with a colour for each component, two pairs in a row.

    Args:
        pictures1, pictures2: uint8 [P, S, S, 3].
        posterior: [P, 7, 7, K].
    """
    K, size = posterior.shape[-1], pictures1.shape[1]
    overlays = overlay(pictures2, cells.upsample(posterior, size))
    figure, axes = heat_maps.grid(
        [heat_maps.TITLED] * -(-len(pictures1) // 2),
        6,
        "Which component of x¹ explains which part of x²",
    )
    groups = axes.reshape(-1, 3)
    for group, one, two, three in zip(groups, pictures1, pictures2, overlays, strict=False):
        for place, picture, title in zip(
            group, (one, two, three), ("x¹", "x²", "components over x²"), strict=True
        ):
            heat_maps.show(place, picture, title)
    colours = heat_maps.component_colours(K) / 255
    handles = [patches.Patch(color=colours[k], label=f"component {k}") for k in range(K)]
    figure.get_layout_engine().set(h_pad=0.06)  # else the legend touches the pictures
    figure.legend(handles=handles, loc="outside lower center", ncols=min(K, 4), fontsize=8)
    return figure


def overlay(pictures: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Grey pictures tinted by the components' colours.

    Args:
        pictures: uint8 [P, S, S, 3].
        shares: [P, S, S, K], sums to 1 over K.

    Returns:
        uint8 [P, S, S, 3].
    """
    grey = pictures.astype(np.float32).mean(axis=-1, keepdims=True)
    colours = shares @ heat_maps.component_colours(shares.shape[-1])
    mixed = (1 - _COLOUR_SHARE) * grey + _COLOUR_SHARE * colours
    return np.clip(np.round(mixed), 0, 255).astype(np.uint8)
