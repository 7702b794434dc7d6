"""Softmax regression with L2, solved to convergence on features that are read in blocks.

The objective is that of scikit-learn's LogisticRegression with C = 1 / regularization: the sum of
the cross-entropies plus regularization / 2 · ‖W‖², the bias left free. It is convex, so the result
depends on no learning rate, batch size or number of epochs.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from amdim_tf.feature_splits import blocks

_MOST_ITERATIONS = 300
_HISTORY = 10
# The solver stops where a step promises less than this, in nats per image.
_TOLERANCE = 1e-7
_MOST_RESIDENT_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class Solution:
    """Parameters for standardized features, and how they do on the rows that were held out."""

    parameters: np.ndarray  # [D + 1, K], the bias last
    iterations: int
    held_out_loss: float
    held_out_accuracy: float


class SoftmaxRegression:
    """One data set on which several regularizations are solved.

    Features are standardized without a copy: the mean and the deviation go into the weights.
    Correlated features make L-BFGS slow. It works in coordinates in which the Hessian at W = 0,
    where all K classes have probability 1/K, is the identity: 3 to 12 times fewer passes.

    Args:
        values: [N, D], of any float type; read in blocks, so it may be a memory map.
        labels: int [N]; −1 marks a row that does not count.
        classes: K.
        mean, std: [D], of the rows that count.
    """

    def __init__(self, values, labels, classes, mean, std):
        self._values, self._labels, self._classes = values, labels.astype(np.int32), classes
        self._mean, self._std = mean.astype(np.float64), std.astype(np.float64)
        self._resident = None
        if 4 * values.size <= _MOST_RESIDENT_BYTES:
            self._resident = [(rows, tf.constant(block)) for rows, block in blocks(values)]
        eigenvalues, eigenvectors = np.linalg.eigh(self._correlation())
        self._curvatures = np.maximum(eigenvalues, 0)[:, None] / classes  # [D, 1]
        self._directions = tf.constant(eigenvectors)  # [D, D], in columns

    def solve(
        self,
        regularization: float,
        trained: np.ndarray,
        start: np.ndarray | None = None,
        report: Callable[[int], None] = lambda iteration: None,
    ) -> Solution:
        """The minimum for the rows `trained`, measured on the other rows that have a label.

        Args:
            regularization: weight of ‖W‖² / 2 beside the sum of the cross-entropies.
            trained: bool [N]; rows to learn from, all with a label.
            start: parameters [D + 1, K] to begin at, such as the solution of a close problem.
            report: called with the number of each iteration.
        """
        count = trained.sum()
        weight = regularization / count
        # Roots of the Hessian's eigenvalues; those of the bias come last.
        roots = np.sqrt(np.append(self._curvatures + weight, [[1 / self._classes]], axis=0))

        def objective(coordinates):
            parameters = self._rotated(coordinates / roots)
            sums, gradient = self._sums(parameters, trained)
            weights = parameters[:-1]
            gradient /= count
            gradient[:-1] += weight * weights
            value = sums["loss"] / count + weight / 2 * np.sum(weights**2)
            return value, self._rotated(gradient, transpose=True) / roots

        if start is None:
            start = np.zeros([len(self._mean) + 1, self._classes])
        start = self._rotated(start, transpose=True) * roots
        coordinates, iterations = minimize(objective, start, report)
        parameters = self._rotated(coordinates / roots)
        sums, _ = self._sums(parameters, trained)
        held_out = max((self._labels >= 0).sum() - count, 1)
        return Solution(
            parameters,
            iterations,
            float(sums["held_out_loss"] / held_out),
            float(sums["held_out_correct"] / held_out),
        )

    def _rotated(self, parameters, transpose=False):
        """Weights along the eigenvectors -> weights of the features, or back; the bias stays."""
        weights = tf.matmul(self._directions, parameters[:-1], transpose_a=transpose)  # [D, K]
        return np.append(weights.numpy(), parameters[-1:], axis=0)  # [D + 1, K]

    def _sums(self, parameters, trained):
        """One pass over all rows: named sums, and the gradient [D + 1, K] of "loss"."""
        weights = parameters[:-1] / self._std[:, None]  # [D, K], for features as they are
        bias = parameters[-1] - self._mean @ weights  # [K]
        weights, bias = tf.constant(weights, tf.float32), tf.constant(bias, tf.float32)
        totals, gradient, errors = np.zeros(3), np.zeros(weights.shape), np.zeros(self._classes)
        for rows, block in self._blocks():
            parts = _block_sums(block, self._labels[rows], trained[rows], weights, bias)
            for total, part in zip((totals, gradient, errors), parts, strict=True):
                total += part.numpy()
        gradient = (gradient - self._mean[:, None] * errors) / self._std[:, None]
        names = ("loss", "held_out_loss", "held_out_correct")
        return dict(zip(names, totals, strict=True)), np.append(gradient, errors[None], axis=0)

    def _correlation(self):
        """Second moments [D, D] of the standardized rows that have a label."""
        total = np.zeros([len(self._mean), len(self._mean)])
        for rows, block in blocks(self._values):
            block = (block[self._labels[rows] >= 0] - self._mean) / self._std  # [B, D]
            block = block.astype(np.float32)
            total += tf.matmul(block, block, transpose_a=True).numpy()
        return total / (self._labels >= 0).sum()

    def _blocks(self):
        """(rows, their features); kept in TensorFlow's memory, a GPU's too, if they are few."""
        return blocks(self._values) if self._resident is None else self._resident


@tf.function(reduce_retracing=True)
def _block_sums(values, labels, trained, weights, bias):
    """What a block of B rows adds to the sums; losses are added in float64.

    Returns:
        ([loss, loss of the held-out rows, hits among them], gradient [D, K] and its bias [K]).
    """
    logits = tf.matmul(values, weights) + bias  # [B, K]
    log_probabilities = tf.nn.log_softmax(logits)  # [B, K]
    targets = tf.one_hot(labels, tf.shape(bias)[0])  # [B, K]; −1 gives a row of zeros
    losses = tf.cast(-tf.reduce_sum(log_probabilities * targets, axis=1), tf.float64)  # [B]
    errors = tf.where(trained[:, None], tf.exp(log_probabilities) - targets, 0.0)  # [B, K]
    held_out = (labels >= 0) & ~trained
    correct = held_out & (tf.argmax(logits, axis=1, output_type=labels.dtype) == labels)
    sums = [
        tf.reduce_sum(tf.where(trained, losses, 0)),
        tf.reduce_sum(tf.where(held_out, losses, 0)),
        tf.reduce_sum(tf.cast(correct, tf.float64)),
    ]
    gradient = tf.matmul(values, errors, transpose_a=True)  # [D, K]
    return tf.stack(sums), gradient, tf.reduce_sum(errors, axis=0)


def minimize(objective, start, report):
    """L-BFGS (Liu and Nocedal 1989) with a backtracking line search.

    Args:
        objective: parameters -> (value, gradient); smooth and convex.
        start: parameters to begin at.
        report: called with the number of each iteration.

    Returns:
        (parameters, iterations).
    """
    parameters, (value, gradient) = start, objective(start)
    pairs = collections.deque(maxlen=_HISTORY)
    for iteration in range(_MOST_ITERATIONS):
        report(iteration)
        direction = -_inverse_hessian_times(gradient, pairs)
        slope = _dot(gradient, direction)
        if -slope / 2 < _TOLERANCE:
            return parameters, iteration
        found = _line_search(objective, parameters, direction, value, slope)
        if found is None:  # the sums of float32 resolve no further decrease
            return parameters, iteration
        moved, value, moved_gradient = found
        step, change = moved - parameters, moved_gradient - gradient
        if _dot(step, change) > 0:
            pairs.append((step, change))
        parameters, gradient = moved, moved_gradient
    return parameters, _MOST_ITERATIONS


def _dot(first, second):
    """The inner product, without BLAS, whose threads wait for each other on a busy machine."""
    return np.sum(first * second)


def _inverse_hessian_times(gradient, pairs):
    """The two-loop recursion over (step, change of the gradient) pairs, the oldest first."""
    result, factors = gradient.copy(), []
    for step, change in reversed(pairs):
        factors.append(_dot(step, result) / _dot(step, change))
        result -= factors[-1] * change
    if pairs:
        step, change = pairs[-1]
        result *= _dot(step, change) / _dot(change, change)
    for (step, change), factor in zip(pairs, reversed(factors), strict=True):
        result += (factor - _dot(change, result) / _dot(step, change)) * step
    return result


def _line_search(objective, parameters, direction, value, slope):
    """(parameters, value, gradient) after the first halved step that decreases enough, or None."""
    for halvings in range(15):
        length = 0.5**halvings
        moved = parameters + length * direction
        moved_value, moved_gradient = objective(moved)
        if moved_value <= value + 1e-4 * length * slope:
            return moved, moved_value, moved_gradient
    return None
