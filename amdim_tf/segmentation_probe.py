"""Emergent segmentation, measured: mixture posteriors against ground truth (paper section 3.7)."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tensorflow as tf

from amdim_tf import cells, masked_images, segmentation, views
from amdim_tf.config import Config
from amdim_tf.errors import UserError
from amdim_tf.model import AMDIM
from amdim_tf.progress import Progress

# How cells are put into regions, the model's way first; with what to call it.
METHODS = {
    "mixture": "mixture posterior",
    "kmeans_f7": "k-means on f7",
    "kmeans_colours": "k-means on colours",
    "random": "random",
}
RESOLUTIONS = ("7x7", "upsampled")
MEASURES = {"adjusted_rand_index": "adjusted Rand index", "iou": "best-matching IoU"}


def evaluate(model: AMDIM, config: Config, mask_dir: str, seed: int) -> dict[str, Any]:
    """Agreement of the most likely component of each cell with the segments, beside baselines.

    Components and f7 are of the same evaluation view. The baselines put the 49 cells of each image
    into as many regions as there are components: by k-means on the cells' mean colours or on their
    f7, or at random.

    Args:
        model: with a mixture.
        config: data and views.
        mask_dir: where the masks of a folder of images are.
        seed: of k-means and of the random regions.

    Returns:
        {"images", "left_out", "components", "mask_dir", RESOLUTION: {METHOD: {MEASURE: mean over
        the images}}}. Images with a single segment, in cells or in pixels, are left out, as both
        measures are meaningless there.
    """
    require_mixture(model, "--probes=segmentation")
    K = model.settings.mixture_components
    found: dict[tuple[str, str], list[np.ndarray]] = {}
    random = np.random.default_rng(seed)
    total = masked_images.count(config, mask_dir)
    with Progress(total, "segmentation", "image") as progress:
        for images, segments in masked_images.batches(config, mask_dir):
            regions = _regions(model, config, images, random)
            for (method, resolution), values in _measure(regions, segments, K).items():
                found.setdefault((method, resolution), []).append(values)
            progress.advance(len(images))
    values = {way: np.concatenate(parts, axis=1) for way, parts in found.items()}  # [measures, N]
    counted = np.isfinite(np.concatenate(list(values.values()))).all(axis=0)  # [N]
    if not counted.any():
        raise UserError(
            "--probes=segmentation: expected test images that show at least 2 segments. "
            f"Received: {total} that show one each."
        )
    results: dict[str, Any] = {"images": int(counted.sum()), "components": K}
    results["left_out"] = total - results["images"]
    results["mask_dir"] = os.path.abspath(mask_dir) if mask_dir else ""
    for resolution in RESOLUTIONS:
        results[resolution] = {}
        for method in METHODS:
            means = values[method, resolution][:, counted].mean(axis=1)
            results[resolution][method] = dict(zip(MEASURES, map(float, means), strict=True))
    return results


def require_mixture(model: AMDIM, flag: str) -> None:
    """Refuses a model without mixture."""
    if model.mixture is None:
        raise UserError(
            f"{flag}: expected a run with --mixture_components of at least 1. Received: one "
            "without a mixture."
        )


def _regions(model: AMDIM, config: Config, images: np.ndarray, random) -> dict[str, np.ndarray]:
    """{method: int [n, 7, 7]} for evaluation views before normalization."""
    K, seed = model.settings.mixture_components, int(random.integers(2**31))
    posterior, f7 = _encoded(model, views.normalize(config.views, tf.constant(images)))
    shape = posterior.shape[:3]

    def clustered(maps):
        flat = np.asarray(maps).reshape(len(images), cells.SIDE**2, -1)  # [n, 49, C]
        return segmentation.kmeans(flat, K, seed).reshape(shape)

    return {
        "mixture": posterior.numpy().argmax(axis=-1),
        "kmeans_f7": clustered(f7),
        "kmeans_colours": clustered(cells.means(images)),
        "random": random.integers(0, K, shape),
    }


def _encoded(model: AMDIM, normalized):
    """(posterior [n, 7, 7, K], f7 [n, 7, 7, C])."""
    outputs = model.encode(normalized)
    return model.posterior(outputs["f1"], outputs["phi7"]), outputs["f7"]


def _measure(regions: dict[str, np.ndarray], segments: np.ndarray, components: int):
    """{(method, resolution): [measures, n]}, NaN for images with a single segment."""
    size, found = segments.shape[1], {}
    truths = {"7x7": cells.majority(segments), "upsampled": segments}
    for method, labels in regions.items():
        given = {"7x7": labels, "upsampled": cells.upsample_labels(labels, components, size)}
        for resolution, truth in truths.items():
            counts = segmentation.contingency(
                given[resolution].reshape(len(labels), -1), truth.reshape(len(labels), -1)
            )
            single = (counts.sum(axis=1) > 0).sum(axis=1) < 2  # [n]
            measures = np.stack(
                [segmentation.adjusted_rand_index(counts), segmentation.best_matching_iou(counts)]
            )
            found[method, resolution] = np.where(single, np.nan, measures)
    return found
