"""How well a partition of an image into regions agrees with ground truth, and plain partitions.

Everything works on N images at once: a partition is an int array [N, P] of P places (cells or
pixels), whose numbers mean nothing but same or different.
"""

from __future__ import annotations

import numpy as np

_KMEANS_RESTARTS, _KMEANS_ITERATIONS = 4, 25


def contingency(regions: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """How many places region i and segment j of each image share: int [N, regions, segments].

    Args:
        regions, segments: int [N, P], from 0.
    """
    N = len(regions)
    rows, columns = int(regions.max()) + 1, int(segments.max()) + 1
    places = (np.arange(N)[:, None] * rows + regions) * columns + segments  # [N, P]
    counts = np.bincount(places.ravel(), minlength=N * rows * columns)
    return counts.reshape(N, rows, columns)


def adjusted_rand_index(counts: np.ndarray) -> np.ndarray:
    """Agreement of two partitions over pairs of places: 1 if equal, 0 on average by chance.

    (Hubert and Arabie 1985.) An image where both are trivial in the same way has 1.

    Args:
        counts: contingency tables, [N, regions, segments].

    Returns:
        float64 [N].
    """

    def pairs(numbers):
        numbers = numbers.astype(np.float64)
        return numbers * (numbers - 1) / 2

    both = pairs(counts).sum(axis=(1, 2))  # [N]
    first, second = (pairs(counts.sum(axis=axis)).sum(axis=1) for axis in (2, 1))
    expected = first * second / pairs(counts.sum(axis=(1, 2)))
    most = (first + second) / 2
    different = most != expected
    return np.where(different, (both - expected) / np.where(different, most - expected, 1), 1.0)


def best_matching_iou(counts: np.ndarray) -> np.ndarray:
    """Mean intersection over union of the segments, each with a region of its own.

    Regions are given to segments so that the sum is largest; those left over do not count, and a
    segment without a region counts as 0.

    Args:
        counts: contingency tables, [N, regions, segments].

    Returns:
        float64 [N].
    """
    unions = counts.sum(axis=2, keepdims=True) + counts.sum(axis=1, keepdims=True) - counts
    shares = counts / np.maximum(unions, 1)  # [N, regions, segments]
    present = counts.sum(axis=1) > 0  # [N, segments]
    return np.array(
        [_best_mean(share[:, there]) for share, there in zip(shares, present, strict=True)]
    )


def _best_mean(shares: np.ndarray) -> float:
    """Mean share [regions, segments] of the segments of one image, by the best assignment."""
    R, C = shares.shape
    wide = np.pad(shares, ((0, max(0, C - R)), (0, 0)))  # a region of no share for each left over
    return wide[assignment(wide), np.arange(C)].mean()


def assignment(gains: np.ndarray) -> np.ndarray:
    """The row for each column, each row at most once, for which the sum of gains is largest.

    The Hungarian method with potentials: columns enter one by one, each by the shortest augmenting
    path. (SciPy has this, and would be a dependency for it alone.)

    Args:
        gains: [R, C], with R at least C.

    Returns:
        int [C].
    """
    R, C = gains.shape
    potential_row, potential_column = np.zeros(R + 1), np.zeros(C + 1)
    column_of = np.full(R + 1, C)  # the last row and the last column stand for "none"
    for column in range(C):
        column_of[R], row = column, R
        slack, before = np.full(R, np.inf), np.full(R, R)
        visited = np.zeros(R + 1, bool)
        while column_of[row] != C:
            visited[row] = True
            here = column_of[row]
            reduced = -gains[:, here] - potential_row[:R] - potential_column[here]  # [R]
            nearer = ~visited[:R] & (reduced < slack)
            slack[nearer], before[nearer] = reduced[nearer], row
            open_slack = np.where(visited[:R], np.inf, slack)
            following = int(open_slack.argmin())
            step = open_slack[following]
            potential_column[column_of[visited]] += step
            potential_row[visited] -= step
            slack[~visited[:R]] -= step
            row = following
        while row != R:  # along the path, rows pass to the column that reached them
            column_of[row], row = column_of[before[row]], before[row]
    rows = np.empty(C, int)
    taken = np.flatnonzero(column_of[:R] != C)
    rows[column_of[taken]] = taken
    return rows


def kmeans(points: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """Clusters the points of each image by themselves: the best of a few runs of Lloyd's method.

    First centres are drawn as in k-means++ (Arthur and Vassilvitskii 2007).

    Args:
        points: [N, P, D].
        clusters: K.
        seed: of the draws.

    Returns:
        int [N, P].
    """
    random = np.random.default_rng(seed)
    points = np.asarray(points, np.float32)
    points = points - points.mean(axis=1, keepdims=True)  # small numbers keep their digits
    best, best_error = None, np.full(len(points), np.inf)
    for _ in range(_KMEANS_RESTARTS):
        labels, error = _lloyd(points, _first_centres(points, clusters, random))
        better = error < best_error
        best = labels if best is None else np.where(better[:, None], labels, best)
        best_error = np.where(better, error, best_error)
    return best


def _first_centres(points, clusters: int, random) -> np.ndarray:
    """Centres [N, K, D]: each next one drawn by the squared distance from those before."""
    N, P, D = points.shape
    weights, centres = np.ones([N, P]), np.empty([N, clusters, D], np.float32)
    for number in range(clusters):
        total = np.cumsum(weights, axis=1)
        drawn = (total < random.random([N, 1]) * total[:, -1:]).sum(axis=1)
        centres[:, number] = points[np.arange(N), np.minimum(drawn, P - 1)]
        squares = np.square(points - centres[:, number, None]).sum(axis=2)  # [N, P]
        weights = squares if number == 0 else np.minimum(weights, squares)
    return centres


def _lloyd(points, centres):
    """(labels [N, P], sum of squared distances [N]) after a fixed number of iterations."""
    K = centres.shape[1]
    for _ in range(_KMEANS_ITERATIONS):
        labels = _nearest(points, centres).argmin(axis=2)  # [N, P]
        member = (labels[:, None] == np.arange(K)[:, None]).astype(np.float32)  # [N, K, P]
        count = member.sum(axis=2, keepdims=True)  # [N, K, 1]
        centres = np.where(count > 0, member @ points / np.maximum(count, 1), centres)
    distances = _nearest(points, centres)
    error = distances.min(axis=2).sum(axis=1) + np.square(points).sum(axis=(1, 2))
    return distances.argmin(axis=2), error


def _nearest(points, centres):
    """Squared distances [N, P, K], less the points' own squares."""
    return np.square(centres).sum(axis=2)[:, None] - 2 * points @ centres.swapaxes(1, 2)
