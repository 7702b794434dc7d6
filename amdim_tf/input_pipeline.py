"""Batches for training and for evaluation, as tf.data."""

from __future__ import annotations

import tensorflow as tf

from amdim_tf import decode, policies, views
from amdim_tf.config import Config
from amdim_tf.errors import UserError
from amdim_tf.examples import UNLABELLED, ArraySource, EncodedSource, Source

# A bad image is replaced by the next good one; this many bad ones in a row end the run.
_REPLACEMENT_ATTEMPTS = 100


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
    source: Source,
    config: Config,
    first_step: int,
    last_step: int,
    shard: int = 0,
    shards: int = 1,
    policy: policies.Policy | None = None,
) -> tf.data.Dataset:
    """Batches of two views for the steps first_step .. last_step − 1.

    Args:
        source: training images.
        config: the run's settings.
        first_step, last_step: which steps.
        shard, shards: this pipeline makes part `shard` of `shards` equal parts of each batch.
        policy: applied to the views; by default the configured one.

    Returns:
        Dataset of {"view1", "view2": float32 [b, S, S, 3], "label": int32 [b]}.
    """
    size, batch_size = config.data.image_size, config.training.batch_size
    share = batch_size // shards
    if policy is None and config.views.policy:
        policy = policies.load(config.views.policy)
    rows = slice(shard * share, (shard + 1) * share)
    steps = tf.data.Dataset.range(first_step, last_step)
    make = _batches_in_memory if isinstance(source, ArraySource) else _batches_on_disk
    shape = [share, size, size, 3]
    return (
        make(source, config, steps, rows, policy)
        .map(
            lambda view1, view2, label: {
                "view1": tf.ensure_shape(view1, shape),
                "view2": tf.ensure_shape(view2, shape),
                "label": tf.ensure_shape(label, [share]),
            }
        )
        .prefetch(2)
    )


def _batches_in_memory(source: ArraySource, config: Config, steps, rows: slice, policy):
    """(view1, view2, label) of each step, made by whole-batch operations."""
    size, batch_size = config.data.image_size, config.training.batch_size
    seed = config.training.seed
    # Tensors made here are captured by reference: constants inside would be copied into the graph.
    images, labels = tf.constant(source.images), tf.constant(source.labels)

    def make_batch(step):
        indices = batch_indices(step, seed, len(source), batch_size)[rows]
        draws = views.draw_batch(config.views, seed, step, rows, batch_size, policy)
        chosen = tf.gather(images, indices)  # [b, H, W, 3]
        chosen = tf.ensure_shape(chosen, [rows.stop - rows.start, *images.shape[1:]])
        view1, view2 = views.two_views(config.views, chosen, size, draws)
        return view1, view2, tf.gather(labels, indices)

    return steps.map(make_batch, num_parallel_calls=tf.data.AUTOTUNE)


def _batches_on_disk(source: EncodedSource, config: Config, steps, rows: slice, policy):
    """(view1, view2, label) of each step: crops image by image, the rest on whole batches."""
    size, batch_size = config.data.image_size, config.training.batch_size
    seed, recipe = config.training.seed, config.views
    augmented = recipe.augmentation != "none"

    def rows_of(step):
        draws = views.draw_batch(recipe, seed, step, rows, batch_size, policy)
        uniform = tf.stack([drawn.crop for drawn in draws.views], axis=1)  # [b, 2, attempts, 4]
        indices = batch_indices(step, seed, len(source), batch_size)[rows]
        return indices, uniform

    def load(index, uniform):
        def choose_boxes(height, width):
            if augmented:
                return views.view_boxes(recipe, uniform, height, width, size)
            return views.evaluation_box(recipe, height, width, size)[None]

        within_box = augmented and views.has_crop(recipe)
        boxes = 2 if augmented else 1
        return _load_or_replace(source, index, choose_boxes, size, boxes, within_box)

    def finish(step, crops, label):
        if not augmented:
            view = views.normalize(recipe, crops[:, 0])
            return view, view, label
        draws = views.draw_batch(recipe, seed, step, rows, batch_size, policy)
        view1, view2 = (
            views.finish_view(recipe, crops[:, number], draws.flip, parameters)
            for number, parameters in enumerate(draws.views)
        )
        return view1, view2, label

    crops = (
        steps.map(rows_of)
        .unbatch()
        .map(load, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(rows.stop - rows.start, drop_remainder=True)
    )
    return tf.data.Dataset.zip(steps, crops).map(
        lambda step, crop_and_label: finish(step, *crop_and_label),
        num_parallel_calls=tf.data.AUTOTUNE,
    )


def _load_or_replace(source, index, choose_boxes, size: int, boxes: int, within_box: bool):
    """Boxes of an image and its label; of the next image that can be decoded, if it cannot.

    Returns:
        (float32 [boxes, size, size, 3], int32 label).
    """

    def attempt(number):
        return _load_boxes(source, number, choose_boxes, size, boxes, within_box)

    def try_next(number, tries, crops, label, made):
        del crops, label, made
        number = (number + 1) % len(source)
        (crops, label), made = attempt(number)
        return number, tries + 1, crops, label, made

    (crops, label), made = attempt(index)
    _, _, crops, label, made = tf.while_loop(
        lambda number, tries, crops, label, made: ~made & (tries < _REPLACEMENT_ATTEMPTS),
        try_next,
        (index, 0, crops, label, made),
    )
    with tf.control_dependencies([tf.debugging.Assert(made, ["too many bad images in a row"])]):
        return tf.identity(crops), label


def _load_boxes(source: EncodedSource, index, choose_boxes, size, boxes, within_box):
    """((boxes, label), whether the image could be decoded); a bad one is noted by the source."""

    def load(number):
        contents, label = source.read(number)
        return decode.decode_boxes(contents, choose_boxes, size, within_box), label

    def note(number):
        source.skipped.add(source.name_of(int(number)))
        return False

    (crops, label), made = decode.or_else(
        load, index, (tf.zeros([boxes, size, size, 3]), tf.constant(UNLABELLED))
    )
    made = tf.cond(made, lambda: True, lambda: tf.numpy_function(note, [index], tf.bool))
    return (tf.ensure_shape(crops, [boxes, size, size, 3]), label), tf.ensure_shape(made, [])


def evaluation_batches(source: Source, config: Config, batch_size: int) -> tf.data.Dataset:
    """Every image once, in order, as (evaluation views [b, S, S, 3], labels [b]).

    The last batch may be short. An image that cannot be decoded is left out, and noted.
    """
    size, recipe = config.data.image_size, config.views
    if isinstance(source, ArraySource):
        slices = (tf.constant(source.images), tf.constant(source.labels))
        return (
            tf.data.Dataset.from_tensor_slices(slices)
            .batch(batch_size)
            .map(
                lambda images, labels: (views.evaluation_view(recipe, images, size), labels),
                num_parallel_calls=tf.data.AUTOTUNE,
            )
            .prefetch(2)
        )

    def choose_boxes(height, width):
        return views.evaluation_box(recipe, height, width, size)[None]

    def load(index):
        (crops, label), made = _load_boxes(source, index, choose_boxes, size, 1, False)
        return views.normalize(recipe, crops[0]), label, made

    return (
        tf.data.Dataset.range(len(source))
        .map(load, num_parallel_calls=tf.data.AUTOTUNE)
        .filter(lambda image, label, made: made)
        .map(lambda image, label, made: (image, label))
        .batch(batch_size)
        .prefetch(2)
    )
