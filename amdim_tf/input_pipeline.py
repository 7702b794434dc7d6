"""Batches for training and for evaluation, as tf.data."""

from __future__ import annotations

import tensorflow as tf

from amdim_tf import views
from amdim_tf.config import Config
from amdim_tf.errors import UserError
from amdim_tf.sources import Source


def steps_per_epoch(source: Source, batch_size: int) -> int:
    """Whole batches in one pass; a fresh permutation each epoch decides which images are over."""
    if batch_size > len(source):
        raise UserError(
            f"--batch_size: expected at most {len(source)}, the number of training images. "
            f"Received: {batch_size}."
        )
    return len(source) // batch_size


def batch_indices(step, seed, examples: int, batch_size: int):
    """The examples of a step's batch, int64 [B]: a function of (seed, step).

    Each epoch is a permutation of its own, computed place by place, so that any step can be reached
    without those before it.
    """
    per_epoch = examples // batch_size
    epoch, place = step // per_epoch, step % per_epoch
    positions = place * batch_size + tf.range(batch_size, dtype=tf.int64)  # [B]
    return tf.random.experimental.index_shuffle(
        positions, tf.stack([tf.cast(seed, tf.int64), epoch]), tf.cast(examples - 1, tf.int64)
    )


def training_batches(
    source: Source, config: Config, first_step: int, last_step: int, shard: int = 0, shards: int = 1
) -> tf.data.Dataset:
    """Batches of two views for the steps first_step .. last_step − 1.

    Args:
        source: training images.
        config: the run's settings.
        first_step, last_step: which steps.
        shard, shards: this pipeline makes part `shard` of `shards` equal parts of each batch.

    Returns:
        Dataset of {"view1", "view2": float32 [b, S, S, 3], "label": int32 [b]}.
    """
    size, batch_size = config.data.image_size, config.training.batch_size
    seed = config.training.seed
    share = batch_size // shards
    rows = slice(shard * share, (shard + 1) * share)
    # Tensors made here are captured by reference: constants inside would be copied into the graph.
    images, labels = tf.constant(source.images), tf.constant(source.labels)

    def make_batch(step):
        indices = batch_indices(step, seed, len(source), batch_size)[rows]
        chosen = tf.gather(images, indices)  # [b, H, W, 3]
        view1, view2 = views.two_views(config.views, chosen, size, seed, step, rows, batch_size)
        shape = [share, size, size, 3]
        return {
            "view1": tf.ensure_shape(view1, shape),
            "view2": tf.ensure_shape(view2, shape),
            "label": tf.ensure_shape(tf.gather(labels, indices), [share]),
        }

    steps = tf.data.Dataset.range(first_step, last_step)
    return steps.map(make_batch, num_parallel_calls=tf.data.AUTOTUNE).prefetch(2)


def evaluation_batches(source: Source, config: Config, batch_size: int) -> tf.data.Dataset:
    """Every image once, in order, as evaluation views [b, S, S, 3]; the last batch may be short."""
    images = tf.data.Dataset.from_tensor_slices(tf.constant(source.images)).batch(batch_size)
    return images.map(
        lambda batch: views.evaluation_view(config.views, batch, config.data.image_size),
        num_parallel_calls=tf.data.AUTOTUNE,
    ).prefetch(2)
