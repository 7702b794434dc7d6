"""Nearest images by f1, with the matching scores over them (the paper's figure 2, a and b)."""

from __future__ import annotations

import typing

import numpy as np
import tensorflow as tf

from amdim_tf import heat_maps

NEIGHBOURS = 7


class Gallery(typing.NamedTuple):
    """Images to choose from, with what the model makes of them."""

    pictures: np.ndarray  # uint8 [N, S, S, 3]
    labels: np.ndarray  # int [N]; −1 for none
    f1: np.ndarray  # [N, D]
    class_names: tuple[str, ...]

    def name(self, number: int) -> str:
        """The class of an image; empty where it has none."""
        label = self.labels[number]
        return self.class_names[label] if label >= 0 and self.class_names else ""


class Retrieved(typing.NamedTuple):
    """Queries and their neighbours."""

    queries: np.ndarray  # int [Q], places in the gallery
    neighbours: np.ndarray  # int [Q, NEIGHBOURS], the most similar first, without the query
    cosines: np.ndarray  # [Q, NEIGHBOURS]
    scores: np.ndarray  # [Q, 1 + NEIGHBOURS, 7, 7]: φ1(query)·φ7 / sqrt(D), of the query first
    of_mixture: bool  # scores are those of the component with the highest one


def retrieve(gallery: Gallery, queries: np.ndarray, antecedents_of, phi7_of) -> Retrieved:
    """The images of the gallery whose f1 is most similar to that of each query.

    Args:
        gallery: with more images than NEIGHBOURS.
        queries: int [Q].
        antecedents_of: from f1 [n, D] to [n, K, D], as `AMDIM.antecedents`.
        phi7_of: from places in the gallery, int [n], to φ7 [n, 7, 7, D].
    """
    unit = gallery.f1 / np.maximum(np.linalg.norm(gallery.f1, axis=1, keepdims=True), 1e-12)
    cosines = unit[queries] @ unit.T  # [Q, N]
    cosines[np.arange(len(queries)), queries] = -np.inf
    neighbours = np.argsort(-cosines, axis=1, kind="stable")[:, :NEIGHBOURS]
    shown = np.concatenate([queries[:, None], neighbours], axis=1)  # [Q, 1 + NEIGHBOURS]
    maps = phi7_of(shown.ravel())
    maps = maps.reshape(*shown.shape, *maps.shape[1:])  # [Q, n, 7, 7, D]
    antecedents = np.asarray(antecedents_of(gallery.f1[queries]))  # [Q, K, D]
    _, K, D = antecedents.shape
    scores = np.einsum("qkd,qnhwd->kqnhw", antecedents, maps).max(axis=0) / np.sqrt(D)
    nearest = np.take_along_axis(cosines, neighbours, 1)
    return Retrieved(queries, neighbours, nearest, scores, K > 1)


def draw(gallery: Gallery, found: Retrieved):
    """Two rows per query: images with their cosine, and the scores over them."""
    rows = len(found.queries)
    figure, axes = heat_maps.grid(
        [heat_maps.TITLED, 1.0] * rows,
        1 + NEIGHBOURS,
        "Nearest images by cosine of f1, which is above each; below, how "
        f"{'the best component' if found.of_mixture else 'f1'} of the query matches its f7",
    )
    limits = heat_maps.limits_of(found.scores)
    for row, query in enumerate(found.queries):
        above, below = axes[2 * row], axes[2 * row + 1]
        heat_maps.show(above[0], gallery.pictures[query], f"query {gallery.name(query)}")
        for column, number in enumerate(found.neighbours[row], start=1):
            title = f"{found.cosines[row, column - 1]:.2f} {gallery.name(number)}"
            heat_maps.show(above[column], gallery.pictures[number], title)
        for column, number in enumerate([query, *found.neighbours[row]]):
            drawn = heat_maps.show_heat(
                below[column], gallery.pictures[number], found.scores[row, column], limits
            )
    of_query = "best component of the query" if found.of_mixture else "φ1(query)"
    heat_maps.scale(figure, drawn, axes[-1], f"score: {of_query} · φ7 / √D")
    return figure


def phi7_function(model, normalize, pictures: np.ndarray):
    """`phi7_of` for `retrieve`: encodes pictures by their places in the gallery.

    Args:
        model: the AMDIM.
        normalize: from pictures 0..255 to what the model takes.
        pictures: uint8 [N, S, S, 3].
    """

    def phi7_of(places):
        images = normalize(tf.cast(pictures[places], tf.float32))
        return model.encode(images)["phi7"].numpy()

    return phi7_of
