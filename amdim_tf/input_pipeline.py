"""Batches for training and for evaluation, as tf.data."""

from __future__ import annotations

import functools

import tensorflow as tf

from amdim_tf import decode, image_headers, policies, views
from amdim_tf.config import Config
from amdim_tf.errors import UserError
from amdim_tf.examples import UNLABELLED, ArraySource, EncodedSource, Source

# A bad image is replaced by the next good one; this many bad ones in a row end the run.
_REPLACEMENT_ATTEMPTS = 100
# Images that are loaded together, by one thread.
_GROUP = 16


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
    images, labels = _constants(source)

    def make_batch(step):
        indices = batch_indices(step, seed, len(source), batch_size)[rows]
        draws = views.draw_batch(config.views, seed, step, rows, batch_size, policy)
        chosen = tf.gather(images, indices)  # [b, H, W, 3]
        chosen = tf.ensure_shape(chosen, [rows.stop - rows.start, *images.shape[1:]])
        view1, view2 = views.two_views(config.views, chosen, size, draws)
        return view1, view2, tf.gather(labels, indices)

    return steps.map(make_batch, num_parallel_calls=tf.data.AUTOTUNE)


def _constants(source: ArraySource):
    """Images and labels as tensors in main memory: a GPU, if there is one, needs its own."""
    with tf.device("CPU:0"):
        return tf.constant(source.images), tf.constant(source.labels)


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

    def boxes_of(sizes, uniform):
        if augmented:
            return views.view_boxes(recipe, uniform, sizes, size)
        return views.evaluation_box(recipe, sizes[:, 0], sizes[:, 1], size)[:, None]

    within_box = augmented and views.has_crop(recipe)

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

    def load_group(*group):
        load = _traced_once(functools.partial(_load, source, boxes_of, size, within_box), group)
        return _load_or_replace(source, load, group, shape)

    shape = [2 if augmented else 1, size, size, 3]
    crops = (
        steps.map(rows_of)
        .unbatch()
        .batch(_GROUP)
        .map(load_group, num_parallel_calls=tf.data.AUTOTUNE)
        .rebatch(rows.stop - rows.start, drop_remainder=True)
    )
    return tf.data.Dataset.zip(steps, crops).map(
        lambda step, crop_and_label: finish(step, *crop_and_label),
        num_parallel_calls=tf.data.AUTOTUNE,
    )


def _load(source: EncodedSource, boxes_of, size: int, within_box: bool, rows):
    """Boxes of images and their labels; raises where one cannot be decoded.

    Args:
        source: of the images.
        boxes_of: function of (image sizes [n, 2], all rows but the indices) that returns boxes
            [n, v, 4].
        size, within_box: as in decode.decode_boxes.
        rows: tuple of tensors [n, ...], the first of which is the images' indices.

    Returns:
        (uint8 [n, v, size, size, 3], int32 [n]).
    """
    indices, *more = rows
    contents, labels = source.read(indices)
    sizes = image_headers.image_sizes(contents)
    return decode.decode_boxes(contents, sizes, boxes_of(sizes, *more), size, within_box), labels


def _traced_once(load, rows):
    """The same function, whose graph is made once for any number of rows."""
    signature = tuple(tf.TensorSpec([None, *row.shape[1:]], row.dtype) for row in rows)
    return tf.function(load, input_signature=[signature])


def _attempt(load, rows, shape):
    """(uint8 [n, *shape], labels int32 [n], whether all rows could be loaded)."""
    count = tf.shape(rows[0])[0]
    default = (tf.zeros([count, *shape], tf.uint8), tf.fill([count], UNLABELLED))
    (crops, labels), made = decode.or_else(load, rows, default)
    return tf.ensure_shape(crops, [None, *shape]), tf.ensure_shape(labels, [None]), made


def _load_one_or_note(source: EncodedSource, load, row, shape):
    """(uint8 `shape`, label, whether it could be loaded) of one row; a bad one is noted."""

    def note(number):
        source.skipped.add(source.name_of(int(number)))
        return False

    crops, labels, made = _attempt(load, tuple(value[None] for value in row), shape)
    made = tf.cond(made, lambda: True, lambda: tf.numpy_function(note, [row[0]], tf.bool))
    return crops[0], labels[0], tf.ensure_shape(made, [])


def _load_or_note(source: EncodedSource, load, rows, shape):
    """What `load` makes of rows; a bad image is noted by the source.

    To catch an error takes a data set of its own, whose making costs as much as a tenth of the
    work on an image. So it is done for all rows at once, and row by row only where one is bad.

    Args:
        source: of the images.
        load: as _load.
        rows: tuple of tensors [n, ...], the first of which is the images' indices.
        shape: of what is made of an image.

    Returns:
        (uint8 [n, *shape], labels int32 [n], whether each image could be decoded [n]).
    """
    crops, labels, all_made = _attempt(load, rows, shape)
    return tf.cond(
        all_made,
        lambda: (crops, labels, tf.ones_like(labels, tf.bool)),
        lambda: tf.map_fn(
            lambda row: _load_one_or_note(source, load, row, shape),
            rows,
            fn_output_signature=_types(shape),
        ),
    )


def _types(shape):
    return tf.TensorSpec(shape, tf.uint8), tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.bool)


def _load_or_replace(source: EncodedSource, load, rows, shape):
    """What `load` makes of each row; for a bad image, of the next one that can be decoded.

    Arguments as in _load_or_note.

    Returns:
        (uint8 [n, *shape], int32 [n]).
    """

    def try_next(row, tries, loaded):
        del loaded
        row = ((row[0] + 1) % len(source), *row[1:])
        return row, tries + 1, _load_one_or_note(source, load, row, shape)

    def replace(arguments):
        row, loaded = arguments
        _, _, loaded = tf.while_loop(
            lambda row, tries, loaded: ~loaded[2] & (tries < _REPLACEMENT_ATTEMPTS),
            try_next,
            (row, 0, loaded),
        )
        enough = tf.debugging.Assert(loaded[2], ["too many bad images in a row"])
        with tf.control_dependencies([enough]):
            return tuple(map(tf.identity, loaded))

    loaded = _load_or_note(source, load, rows, shape)
    return tf.cond(
        tf.reduce_all(loaded[2]),
        lambda: loaded,
        lambda: tf.map_fn(replace, (rows, loaded), fn_output_signature=_types(shape)),
    )[:2]


def evaluation_batches(source: Source, config: Config, batch_size: int) -> tf.data.Dataset:
    """Every image once, in order, as (evaluation views [b, S, S, 3], labels [b]).

    The last batch may be short. An image that cannot be decoded is left out, and noted.
    """
    size, recipe = config.data.image_size, config.views
    if isinstance(source, ArraySource):
        return (
            tf.data.Dataset.from_tensor_slices(_constants(source))
            .batch(batch_size)
            .map(
                lambda images, labels: (views.evaluation_view(recipe, images, size), labels),
                num_parallel_calls=tf.data.AUTOTUNE,
            )
            .prefetch(2)
        )

    shape = [1, size, size, 3]

    def boxes_of(sizes):
        return views.evaluation_box(recipe, sizes[:, 0], sizes[:, 1], size)[:, None]

    def load_group(*group):
        load = _traced_once(functools.partial(_load, source, boxes_of, size, False), group)
        crops, labels, made = _load_or_note(source, load, group, shape)
        return views.normalize(recipe, crops[:, 0]), labels, made

    return (
        tf.data.Dataset.range(len(source))
        .batch(_GROUP)
        .map(load_group, num_parallel_calls=tf.data.AUTOTUNE)
        .unbatch()
        .filter(lambda image, label, made: made)
        .map(lambda image, label, made: (image, label))
        .batch(batch_size)
        .prefetch(2)
    )
