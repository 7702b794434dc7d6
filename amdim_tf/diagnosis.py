"""What to tell about a step whose loss or gradient was not finite."""

from __future__ import annotations

import math

import tensorflow as tf

from amdim_tf import batch_norm, nce
from amdim_tf.config import parse_task
from amdim_tf.model import AMDIM


def describe_step(model: AMDIM, batch, logs: dict[str, tf.Tensor], step: int) -> str:
    """Which tasks went wrong, the gradient's norm, and the range of every task's scores.

    Args:
        model: with the weights that the step began with.
        batch: the step's batch, or as many of its first images as there is memory for; locations
            are drawn anew for a part.
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
    """Task -> scores before clipping, from the first view to the second; nothing else changes.

    [B, B, S]; where a mixture is the antecedent, [B·K, B, S].
    """
    with batch_norm.collected(synchronized=False):  # so that running statistics stay
        embedded, _ = model.training_step.embed(batch["view1"], batch["view2"])
    # As in the loss: half precision is widened before the product.
    first, second, *mixture = tf.nest.map_structure(
        lambda value: tf.cast(value, tf.float32), (*embedded.views, *embedded.mixtures[:1])
    )
    locations = model.draw_locations(batch["view1"].shape[0], step)
    scores = {}
    for task in model.settings.tasks:
        n, m = parse_task(task)
        drawn = locations[n][0] if n in locations else None
        antecedents = nce.antecedents_of(first[n], drawn)  # [B, D]
        if n == 1 and mixture:
            antecedents = tf.reshape(mixture[0], [-1, antecedents.shape[1]])  # [B·K, D]
        scores[task] = nce.scaled_scores(antecedents, nce.flat_locations(second[m]))
    return scores
