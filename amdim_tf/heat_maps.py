"""Pictures with maps over them, where the cells lie; shared by the figures of a model."""

from __future__ import annotations

import numpy as np
from matplotlib import cm, colors, patches, pyplot

from amdim_tf import charts

HEAT = "viridis"
_HEAT_SHARE = 0.8  # of what is drawn over a picture
# In an order in which the first few differ in lightness, also to eyes that take red for green.
_COMPONENTS = ("#0072B2", "#D55E00", "#F0E442", "#CC79A7", "#009E73", "#56B4E9", "#E69F00")
# Inches of a picture's side.
SIDE = 1.15
# Pictures' sides of a row whose pictures have titles.
TITLED = 1.12
_TITLE_INCHES = 0.75
_TITLE_LETTERS = 24  # of a picture, before it covers that of the next


def grid(heights: list[float], columns: int, title: str):
    """A figure with axes [rows, columns] for pictures.

    Args:
        heights: of each row, in pictures; one with titles above needs some more than 1.
        columns: of pictures.
        title: of the figure.
    """
    figure, axes = pyplot.subplots(
        len(heights),
        columns,
        figsize=(columns * SIDE, sum(heights) * SIDE + _TITLE_INCHES),
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
        squeeze=False,
    )
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02, wspace=0.01, hspace=0.01)
    figure.suptitle(title, fontsize=10)
    for one in axes.flat:
        one.set_axis_off()
        one.set_anchor("S")  # below its title, level with the others
    return figure, axes


def show(axes, picture: np.ndarray, title: str = "") -> None:
    """A picture, uint8 [S, S, 3]."""
    axes.imshow(picture, interpolation="nearest", extent=(0, 1, 1, 0))
    axes.set_title(charts.drawable(title, _TITLE_LETTERS), fontsize=7, pad=2)


def show_heat(axes, picture: np.ndarray, values: np.ndarray, limits, title: str = ""):
    """A map [n, n] of the cells of f7 or f5 over a grey picture; returns what a scale is made of.

    The middles of the cells of both maps are an eighth of the side apart, around the middle.
    """
    grey = picture.astype(np.float32).mean(axis=-1)
    axes.imshow(grey, cmap="gray", vmin=0, vmax=255, interpolation="nearest", extent=(0, 1, 1, 0))
    edge = 0.5 - len(values) / 16
    scaled = cm.ScalarMappable(colors.Normalize(*limits), HEAT)
    # Of alpha=, a PDF would have the square: matplotlib gives it to the pixels and to the picture.
    pixels = scaled.to_rgba(values, alpha=_HEAT_SHARE)
    axes.imshow(pixels, interpolation="nearest", extent=(edge, 1 - edge, 1 - edge, edge))
    axes.set(xlim=(0, 1), ylim=(1, 0))
    axes.set_title(charts.drawable(title, _TITLE_LETTERS), fontsize=7, pad=2)
    return scaled


def mark_cell(axes, row: int, column: int, side: int, name: str, colour: str) -> None:
    """A named square around a cell of a map of the given side."""
    edge = 0.5 - side / 16
    left, top = edge + column / 8, edge + row / 8
    for line, width in (("white", 2.5), (colour, 1.2)):
        axes.add_patch(
            patches.Rectangle(
                (left, top), 1 / 8, 1 / 8, fill=False, edgecolor=line, linewidth=width
            )
        )
    behind = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
    axes.text(
        left + 1 / 16, top + 1 / 16, name, fontsize=7, ha="center", va="center", color="black",
        bbox=behind,
    )  # fmt: skip


def limits_of(values: np.ndarray) -> tuple[float, float]:
    """The range of a colour scale: all but the lowest and the highest hundredth."""
    low, high = np.percentile(values, [1, 99])
    return float(low), float(max(high, low + 1e-6))


def scale(figure, drawn, axes, label: str) -> None:
    """A colour scale below some axes."""
    bar = figure.colorbar(drawn, ax=axes, location="bottom", fraction=0.05, pad=0.02, aspect=30)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=7)


def component_colours(count: int) -> np.ndarray:
    """Colours of mixture components that colour-blind people tell apart, float [count, 3], 0..255.

    Beyond as many as there are, they come again, darker each time.
    """
    available = [[int(name[i : i + 2], 16) for i in (1, 3, 5)] for name in _COMPONENTS]
    rounds = -(-count // len(available))
    shades = np.linspace(1, 0, rounds, endpoint=False)[:, None, None]  # [rounds, 1, 1]
    return np.float32(shades * np.array(available)).reshape(-1, 3)[:count]
