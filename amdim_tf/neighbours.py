"""Weighted nearest neighbours on cosine similarity: features measured without training anything.

Each of the k most similar training images votes for its class with weight exp(similarity / T)
(Wu et al. 2018, arXiv 1805.01978, who use T = 0.07). Similarities are computed block by block, of
which only each query's best are kept, so memory does not grow with training images × queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from amdim_tf.errors import UserError
from amdim_tf.feature_splits import Features, check, check_split
from amdim_tf.progress import Progress

# One block of similarities takes 128 MiB.
_TRAINING_BLOCK, _QUERY_BLOCK = 16384, 1024


def evaluate(
    train: Features,
    test: Features,
    class_names: Sequence[str],
    ks: Sequence[int] = (1, 5, 20, 200),
    temperature: float = 0.07,
    label: str = "nearest neighbours",
) -> dict[int, dict]:
    """Accuracy on the test images that have a label.

    Args:
        train, test: features and labels; −1 marks an image that does not count.
        class_names: of the K classes.
        ks: how many neighbours vote.
        temperature: T.
        label: for the progress bar.

    Returns:
        {k: {"accuracy", "top5", "neighbours"}}. Where fewer than k training images have a label
        they all vote, and "neighbours" says how many they are.
    """
    check(train, test, class_names)
    counted = test.labels >= 0
    queries, labels = test.values[counted], test.labels[counted]
    ranked = classify(train, queries, len(class_names), ks, temperature, label)
    voters = int((train.labels >= 0).sum())
    return {
        k: {
            "accuracy": float((classes[:, 0] == labels).mean()),
            "top5": float((classes == labels[:, None]).any(axis=1).mean()),
            "neighbours": min(k, voters),
        }
        for k, classes in ranked.items()
    }


def classify(
    train: Features,
    queries: np.ndarray,
    classes: int,
    ks: Sequence[int] = (1, 5, 20, 200),
    temperature: float = 0.07,
    label: str = "nearest neighbours",
) -> dict[int, np.ndarray]:
    """The classes with the most votes.

    Of equally similar images the one with the lower index is the nearer, of classes with equal
    votes the lower comes first.

    Args:
        train: features [N, D] and labels; images with −1 do not vote.
        queries: features [Q, D].
        classes: K.
        ks: how many neighbours vote; all of them where there are fewer.
        temperature: T.
        label: for the progress bar.

    Returns:
        {k: int32 [Q, min(5, K)]}, the best first; −1 where fewer classes have a vote.
    """
    check_split(train, classes, "training")
    if min(ks) < 1 or not temperature > 0:
        raise UserError(
            "nearest neighbours: expected k of at least 1 and a temperature above 0. "
            f"Received: k {list(ks)}, temperature {temperature}."
        )
    similarities, labels = _nearest(train, queries, max(ks), label)
    return {k: _votes(similarities[:, :k], labels[:, :k], classes, temperature) for k in ks}


def _nearest(train: Features, queries, k: int, label: str):
    """Similarities and labels [Q, k] of the nearest training images, the nearest first.

    With fewer than k training images the last columns are filled with −inf and −1.
    """
    voters = np.flatnonzero(train.labels >= 0)
    best = np.full([len(queries), k], -np.inf, np.float32)
    best_labels = np.full([len(queries), k], -1, np.int32)
    training_blocks = range(0, len(voters), _TRAINING_BLOCK)
    query_blocks = range(0, len(queries), _QUERY_BLOCK)
    with Progress(len(training_blocks) * len(queries), label, "image") as progress:
        for start in training_blocks:
            rows = voters[start : start + _TRAINING_BLOCK]
            block = unit_rows(train.values[rows]).astype(np.float64)  # [B, D]
            labels = tf.constant(train.labels[rows], tf.int32)
            for first in query_blocks:
                part = slice(first, first + _QUERY_BLOCK)
                unit = unit_rows(queries[part]).astype(np.float64)
                # Summed in float64 and rounded: in float32 the order of the sums, which differs
                # between the parts of a product, would make equal images more and less similar.
                # By NumPy, whose product is twice as fast in float64 as TensorFlow's.
                similarities = (unit @ block.T).astype(np.float32)  # [Q, B]
                best[part], best_labels[part] = _merge(
                    similarities, labels, best[part], best_labels[part]
                )
                progress.advance(len(unit))
    return best, best_labels


@tf.function(reduce_retracing=True)
def _merge(similarities, labels, best, best_labels):
    """The best k of those known and of a block of training images that come after them.

    top_k puts the lower index first where values are equal, and so does the merge, because what
    is known stands before what is new.
    """
    k = tf.shape(best)[1]
    found, places = tf.math.top_k(similarities, tf.minimum(k, tf.shape(labels)[0]))
    found = tf.concat([best, found], axis=1)
    found_labels = tf.concat([best_labels, tf.gather(labels, places)], axis=1)
    best, places = tf.math.top_k(found, k)  # [Q, k]
    return best, tf.gather(found_labels, places, batch_dims=1)


def unit_rows(values) -> np.ndarray:
    """Rows of length 1; a row of zeros stays, and is equally far from every other.

    The largest number of a row becomes 1 first, so that no square is too large or too small.
    """
    values = np.asarray(values, np.float32)
    largest = np.abs(values).max(axis=1, keepdims=True)  # [N, 1]
    scaled = values / np.where(largest > 0, largest, 1)
    norms = np.linalg.norm(scaled, axis=1, keepdims=True)
    return scaled / np.where(norms > 0, norms, 1)


def _votes(similarities, labels, classes: int, temperature: float) -> np.ndarray:
    """The classes int32 [Q, min(5, K)] with the most votes; −1 where there is no vote."""
    ranked = np.empty([len(labels), min(5, classes)], np.int32)
    for start in range(0, len(labels), _QUERY_BLOCK):
        part = slice(start, start + _QUERY_BLOCK)
        # Relative to the nearest, which changes no order and keeps the exponentials in range.
        relative = similarities[part].astype(np.float64) - similarities[part, :1]  # [q, k]
        weights = np.exp(relative / temperature) * (labels[part] >= 0)
        cells = np.arange(len(weights))[:, None] * classes + np.maximum(labels[part], 0)
        counts = np.bincount(cells.ravel(), weights.ravel(), len(weights) * classes)
        scores, order = tf.math.top_k(counts.reshape(-1, classes), min(5, classes))
        ranked[part] = np.where(scores.numpy() > 0, order.numpy(), -1)
    return ranked
