"""What to tell about a step whose loss or gradient was not finite."""

from __future__ import annotations

import math

import tensorflow as tf

from amdim_tf import nce
from amdim_tf.config import parse_task
from amdim_tf.model import AMDIM


def describe_step(model: AMDIM, batch, logs: dict[str, tf.Tensor], step: int) -> str:
    """Which tasks went wrong, the gradient's norm, and the range of every task's scores.

    Args:
        model: with the weights that the step began with.
        batch: the step's batch.
        logs: what `train_step` returned.
        step: the optimizer's count when the step began; it determines the drawn locations.
    """
    bad = [
        name.removeprefix("loss_")
        for name, value in logs.items()
        if name.startswith("loss_") and not math.isfinite(float(value))
    ]
    parts = [f"loss {float(logs['loss']):.4g}", f"gradient norm {float(logs['gradient_norm']):.4g}"]
    if bad:
        parts.insert(0, f"loss of {', '.join(bad)} not finite")
    for task, scores in _scores(model, batch, step).items():
        finite = tf.boolean_mask(scores, tf.math.is_finite(scores))
        text = f"scores of {task}:"
        if len(finite):
            mean_square = float(tf.reduce_mean(tf.square(finite)))
            text += (
                f" {float(tf.reduce_min(finite)):.4g} to {float(tf.reduce_max(finite)):.4g}, "
                f"root mean square {mean_square**0.5:.4g},"
            )
        parts.append(f"{text} {tf.size(scores) - len(finite)} of {tf.size(scores)} not finite")
    return "; ".join(parts)


def _scores(model: AMDIM, batch: dict[str, tf.Tensor], step: int) -> dict[str, tf.Tensor]:
    """Task -> scores before clipping, from the first view to the second.

    [B, B, S]; where a mixture is the antecedent, [B·K, B, S].
    """
    images = tf.concat([batch["view1"], batch["view2"]], axis=0)  # [2B, S, S, 3]
    features = model.encoder(images, training=True, groups=2)
    embeddings = model.embed(features, model.scales, training=True, groups=2)
    halves = {scale: tf.split(value, 2) for scale, value in embeddings.items()}
    locations = model.draw_locations(batch["view1"].shape[0], step)
    scores = {}
    for task in model.settings.tasks:
        n, m = parse_task(task)
        drawn = locations[n][0] if n in locations else None
        antecedents = nce.antecedents_of(halves[n][0], drawn)  # [B, D]
        if n == 1 and model.mixture is not None:
            antecedents = tf.reshape(model.mixture(antecedents), [-1, antecedents.shape[1]])
        scores[task] = nce.scaled_scores(antecedents, nce.flat_locations(halves[m][1]))
    return scores
