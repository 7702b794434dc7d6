"""Charts of results, drawn with matplotlib: readable in grey and for colour-blind people."""

from __future__ import annotations

import io
import pathlib
import warnings

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

from amdim_tf import safe_files

# Names of classes and runs may have dollar signs; they are no mathematics.
matplotlib.rcParams["text.parse_math"] = False
# Okabe and Ito's colours, which colour-blind people can tell apart, a grey and a wine red.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000",
    "#999999", "#882255",
)  # fmt: skip
MARKERS = "osD^vPX*"
DPI = 120
# Numbers from here on are damage; the ticks of an axis cannot tell them apart.
MOST_SHOWN = 1e15
# Beyond this many classes their names cannot be read beside a matrix.
_NAMED_CLASSES = 40
_PICTURES_IN_A_ROW = 9
# What rows of a history have beside accuracies.
PLACES = frozenset({"step", "hours"})


# What each format would note of its making, left out so that the same figure has the same bytes.
_UNDATED = {
    "png": {"Software": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}


def save(figure, path: pathlib.Path) -> None:
    """Writes a file, whole or not at all: PNG or PDF by its suffix."""
    kind, contents = path.suffix[1:], io.BytesIO()
    with warnings.catch_warnings():  # a box takes the place of letters that the font does not have
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(contents, format=kind, dpi=DPI, metadata=_UNDATED[kind])
    safe_files.write_whole(path, contents.getvalue())


def _save(figure, path: pathlib.Path) -> None:
    """Writes a figure that is not needed any more."""
    save(figure, path)
    pyplot.close(figure)


def drawable(text: str, most: int = 60) -> str:
    """A text that matplotlib shows: names of files may have bytes that are no Unicode, and lines.

    One of more than `most` letters is cut. Of names that begin with an underscore it makes no
    entry in a legend.
    """
    text = one_line(text.encode(errors="replace").decode())
    text = text if len(text) <= most else text[: most - 1] + "…"
    return f" {text}" if text.startswith("_") else text


def one_line(text: str) -> str:
    """A text with a space for every tab and line end."""
    return " ".join(text.splitlines()).replace("\t", " ")


def confusion_matrix(
    confusion: list[list[int]], classes: list[str], title: str, path: pathlib.Path
) -> None:
    """Which class is taken for which: a row per true class, in shares of its images.

    Args:
        confusion: K lists of K counts.
        classes: K names.
        title: of the chart.
        path: of the PNG.
    """
    counts = np.array(confusion, float)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)  # [K, K]
    side = float(np.clip(0.42 * len(classes) + 2.2, 4.5, 12))
    figure, axes = pyplot.subplots(figsize=(side, side), layout="constrained")
    picture = axes.imshow(100 * shares, cmap="cividis", vmin=0, vmax=100)
    figure.colorbar(picture, ax=axes, shrink=0.75, label="% of the true class")
    axes.set(xlabel="predicted class", ylabel="true class", title=drawable(title))
    if len(classes) <= _NAMED_CLASSES:
        places, names = range(len(classes)), [drawable(name) for name in classes]
        axes.set_xticks(places, names, rotation=90)
        axes.set_yticks(places, names)
    if len(classes) <= 15:
        for row, column in np.ndindex(shares.shape):
            if shares[row, column] >= 0.005:
                colour = "black" if shares[row, column] > 0.5 else "white"
                text = f"{100 * shares[row, column]:.0f}"
                axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
    _save(figure, path)


def neighbours(query: np.ndarray, found: list[tuple[str, np.ndarray | None]], path) -> None:
    """A query and the images that are most similar to it, in rows.

    Args:
        query: uint8 [H, W, 3].
        found: (what to write above it, image), the most similar first; None is drawn as a gap.
        path: of the PNG.
    """
    pictures = [("query", query), *found]
    columns = min(len(pictures), _PICTURES_IN_A_ROW)
    rows = -(-len(pictures) // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(1.6 * columns, 1.9 * rows), layout="constrained", squeeze=False
    )
    for axes in grid.flat:
        axes.axis("off")
    for axes, (text, image) in zip(grid.flat, pictures, strict=False):
        axes.set_title(drawable(text), fontsize=8)
        if image is None:
            axes.text(0.5, 0.5, "not found", ha="center", va="center", fontsize=8)
        else:
            axes.imshow(image)
    _save(figure, pathlib.Path(path))


def learning_curve(history: list[dict[str, float]], path: pathlib.Path) -> None:
    """Accuracy of each probe against the hours of training, or the step where they are not known.

    Args:
        history: rows with "step", maybe "hours", and one accuracy per probe, where it was measured.
        path: of the PNG.
    """
    x = "hours" if all("hours" in row for row in history) else "step"
    probes = dict.fromkeys(name for row in history for name in row if name not in PLACES)
    series = {
        name: [(row[x], 100 * row[name]) for row in history if name in row] for name in probes
    }
    described = {"hours": "hours of training", "step": "training step"}[x]
    lines(series, described, "test accuracy, %", "Accuracy during training", path)


def lines(series: dict[str, list[tuple]], x: str, y: str, title: str, path: pathlib.Path) -> None:
    """Named lines of (x, y) points, with markers where there are few.

    Args:
        series: name -> points.
        x, y: what the axes show.
        title: of the chart.
        path: of the PNG.
    """
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for number, (name, points) in enumerate(series.items()):
        axes.plot(
            *zip(*points, strict=True),
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)] if len(points) < 30 else None,
            label=drawable(name),
        )
    axes.set(xlabel=x, ylabel=y, title=drawable(title))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    _save(figure, path)
