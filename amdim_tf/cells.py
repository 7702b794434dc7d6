"""The cells of f7 as places in the image.

The encoder has no padding, so cell (i, j) of the 7×7 map sees a square around the pixel
((i + 1)·S/8, (j + 1)·S/8) of an image of side S. The squares are an eighth of the side apart and,
at sizes 32 and 64, a quarter wide.
"""

from __future__ import annotations

import numpy as np

SIDE = 7


def _centres_apart(image_size: int) -> np.ndarray:
    """Where each pixel's middle lies between the cells: 0 at cell 0, 6 at cell 6, float [S]."""
    return (np.arange(image_size) + 0.5) * (SIDE + 1) / image_size - 1


def nearest_cell(image_size: int) -> np.ndarray:
    """The nearest cell of each row or column of pixels, int [S]."""
    return np.clip(np.floor(_centres_apart(image_size) + 0.5), 0, SIDE - 1).astype(int)


def means(images: np.ndarray) -> np.ndarray:
    """Mean over the pixels that are nearest to each cell: [N, S, S, C] -> [N, 7, 7, C]."""
    member = np.eye(SIDE, dtype=np.float32)[nearest_cell(images.shape[1])]  # [S, 7]
    member = member / member.sum(axis=0)
    return _on_both_sides(member.T, images)


def upsample(maps: np.ndarray, image_size: int) -> np.ndarray:
    """Maps at image resolution, linear between the cells' middles: [N, 7, 7, K] -> [N, S, S, K]."""
    place = np.clip(_centres_apart(image_size), 0, SIDE - 1)[:, None]  # [S, 1]
    weights = np.maximum(1 - np.abs(place - np.arange(SIDE)), 0).astype(np.float32)  # [S, 7]
    return _on_both_sides(weights, maps)


def upsample_labels(labels: np.ndarray, count: int, image_size: int) -> np.ndarray:
    """Hard labels at image resolution: int [N, 7, 7] below `count` -> int [N, S, S]."""
    shares = upsample(np.eye(count, dtype=np.float32)[labels], image_size)
    return shares.argmax(axis=-1)


def majority(segments: np.ndarray) -> np.ndarray:
    """The segment with the most of the pixels nearest to each cell: int [N, S, S] -> [N, 7, 7]."""
    shares = [
        means((segments == number)[..., None].astype(np.float32))
        for number in range(int(segments.max()) + 1)
    ]
    return np.concatenate(shares, axis=-1).argmax(axis=-1)


def _on_both_sides(matrix: np.ndarray, maps: np.ndarray) -> np.ndarray:
    """A matrix [a, b] applied to rows and columns: [N, b, b, C] -> [N, a, a, C]."""
    rows = np.einsum("ab,nbwc->nawc", matrix, maps, optimize=True)
    return np.einsum("ab,nhbc->nhac", matrix, rows, optimize=True)
