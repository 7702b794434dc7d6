"""f1 of many images at once: a plane of two principal components, and TensorBoard's projector."""

from __future__ import annotations

import csv
import io
import pathlib

import numpy as np
import tensorflow as tf
from matplotlib import pyplot
from tensorboard.plugins import projector

from amdim_tf import charts, safe_files
from amdim_tf.retrieval_figure import Gallery

# What the projector can show as pictures: a sheet of at most 8192 pixels.
_SHEET_SIDE, _MOST_PICTURE = 8192, 64
# Classes beyond this many cannot be told apart by colour and marker.
_NAMED_CLASSES = 20


def principal_components(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two directions of greatest variance.

    Args:
        values: [N, D].

    Returns:
        (coordinates [N, 2], share of the variance [2]). The largest coordinate of each is positive,
        so that figures repeat.
    """
    centred = values.astype(np.float64) - values.mean(axis=0, dtype=np.float64)
    variances, directions = np.linalg.eigh(centred.T @ centred)
    order = np.argsort(-variances)[:2]
    places = centred @ directions[:, order]  # [N, 2]
    signs = np.sign(places[np.abs(places).argmax(axis=0), [0, 1]])
    return places * signs, variances[order] / max(variances.sum(), 1e-12)


def draw(gallery: Gallery):
    """The plane of the two principal components of f1, a colour and marker per class."""
    places, shares = principal_components(gallery.f1)
    figure, axes = pyplot.subplots(figsize=(7.5, 6), layout="constrained")
    classes = len(gallery.class_names)
    named = 0 < classes <= _NAMED_CLASSES
    for label in range(classes) if named else [None]:
        rows = slice(None) if label is None else gallery.labels == label
        colour, marker = charts.COLOURS[0], "o"
        if named:
            colour = charts.COLOURS[label % len(charts.COLOURS)]
            # Another marker in the second round of colours.
            marker = charts.MARKERS[(label + label // len(charts.COLOURS)) % len(charts.MARKERS)]
        axes.scatter(
            *places[rows].T, s=20, color=colour, marker=marker, alpha=0.65, linewidths=0,
            label=charts.drawable(gallery.class_names[label]) if named else None,
        )  # fmt: skip
    axes.set(
        xlabel=f"first principal component ({100 * shares[0]:.1f}% of the variance)",
        ylabel=f"second ({100 * shares[1]:.1f}%)",
    )
    figure.suptitle(f"f1 of {len(places)} images", fontsize=10)
    axes.grid(alpha=0.3)
    if named:
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def write_projector(gallery: Gallery, directory: pathlib.Path, step: int) -> None:
    """Files of TensorBoard's projector: vectors, labels, and small pictures of the images.

    Args:
        gallery: what to show.
        directory: below the one that TensorBoard is pointed at; made if need be.
        step: of the checkpoint.
    """
    directory.mkdir(parents=True, exist_ok=True)
    pictures = sprite_pictures(gallery.pictures)
    vectors = "".join("\t".join(f"{x:.5g}" for x in row) + "\n" for row in gallery.f1)
    safe_files.write_whole(directory / "f1.tsv", vectors.encode())
    labels = io.StringIO(newline="")
    writer = csv.writer(labels, delimiter="\t", lineterminator="\n")
    writer.writerow(["class", "number"])
    names = (gallery.name(number) or "none" for number in range(len(gallery.labels)))
    # The projector reads line by line, whatever is quoted.
    writer.writerows((charts.one_line(name), number) for number, name in enumerate(names))
    safe_files.write_whole(directory / "labels.tsv", labels.getvalue().encode(errors="replace"))
    sheet = tf.io.encode_png(sprite_sheet(pictures)).numpy()
    safe_files.write_whole(directory / "sprites.png", sheet)
    config = projector.ProjectorConfig()
    embedding = config.embeddings.add(
        tensor_name="f1", tensor_path="f1.tsv", metadata_path="labels.tsv"
    )
    embedding.sprite.image_path = "sprites.png"
    embedding.sprite.single_image_dim.extend([pictures.shape[2], pictures.shape[1]])
    projector.visualize_embeddings(str(directory), config)
    # TensorBoard shows directories with events only.
    with tf.summary.create_file_writer(str(directory)).as_default(step=step):
        tf.summary.text("f1", f"f1 of {len(gallery.labels)} images")


def sprite_pictures(pictures: np.ndarray) -> np.ndarray:
    """Pictures small enough for one sheet, by averaging: uint8 [N, s, s, 3]."""
    per_row = int(np.ceil(np.sqrt(len(pictures))))
    side = min(pictures.shape[1], _MOST_PICTURE, _SHEET_SIDE // per_row)
    if side == pictures.shape[1]:
        return pictures
    smaller = tf.image.resize(pictures, [side, side], "area")
    return tf.cast(tf.round(smaller), tf.uint8).numpy()


def sprite_sheet(pictures: np.ndarray) -> np.ndarray:
    """Pictures row by row in a square, as the projector wants them: uint8 [n·s, n·s, 3]."""
    N, side, _, _ = pictures.shape
    per_row = int(np.ceil(np.sqrt(N)))
    sheet = np.full([per_row * per_row, side, side, 3], 255, np.uint8)
    sheet[:N] = pictures
    sheet = sheet.reshape(per_row, per_row, side, side, 3).swapaxes(1, 2)
    return sheet.reshape(per_row * side, per_row * side, 3)
