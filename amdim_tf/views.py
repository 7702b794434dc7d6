"""From images to normalized views: the two augmented ones, and the one used for evaluation.

Randomness and pixels are kept apart. `draw_view` makes one row of random parameters per image, a
function of (seed, step, view, row) alone; the others apply rows to whole batches of images. So a
view can be rebuilt at any time, and a worker that handles some rows of a batch draws all of them
and keeps its own.
"""

from __future__ import annotations

import math
import typing

import tensorflow as tf

from amdim_tf import geometry_ops, image_ops, policies
from amdim_tf.config import ViewConfig

_CROP_ATTEMPTS = 10


class ViewParameters(typing.NamedTuple):
    """Random parameters of one view, a row per image."""

    shift: tf.Tensor  # int32 [B, 2]: dx, dy in pixels
    crop: tf.Tensor  # [B, attempts, 4] uniform numbers: area, ratio, top, left
    factors: tf.Tensor  # [B, 3]: brightness, contrast, saturation; 1 is no change
    hue: tf.Tensor  # [B]: turns of the hue circle; 0 is no change
    order: tf.Tensor  # int32 [B, 4]: the order of those four changes
    grayscale: tf.Tensor  # bool [B]
    lighting: tf.Tensor  # [B, 3]
    policy: policies.DrawnSteps | tuple[()]  # steps of the policy, B rows; empty: no policy


def _key(seed, step, view, name: str):
    """The key of one random draw."""
    number = view * len(_DRAWS) + _DRAWS.index(name)
    return tf.random.experimental.stateless_fold_in([seed, number], step)


def _draw(distribution, seed, step, view, name: str, shape):
    """Random numbers [B, ...] that are a function of the arguments alone."""
    return distribution(shape, _key(seed, step, view, name))


_DRAWS = (
    "flip", "moved", "shift", "crop", "jittered", "changes", "order", "grayscale", "lighting",
    "policy",
)  # fmt: skip


def draw_flip(config: ViewConfig, seed, step, batch):
    """Whether each image is mirrored, bool [B]: one draw for both views (paper section 3.4)."""
    return _draw(tf.random.stateless_uniform, seed, step, 0, "flip", [batch]) < config.flip


def draw_view(
    config: ViewConfig, seed, step, view: int, batch, policy: policies.Policy | None = None
) -> ViewParameters:
    """Parameters of view 1 or 2 of every image in a step's global batch.

    Args:
        config: the recipe.
        seed: of the run.
        step: scalar.
        view: 1 or 2; the two are independent.
        batch: B, images in the global batch.
        policy: whose steps are drawn, too.
    """

    def uniform(name, *shape):
        return _draw(tf.random.stateless_uniform, seed, step, view, name, [batch, *shape])

    moved = uniform("moved", 1) < config.translate_probability  # [B, 1]
    shift = tf.floor(uniform("shift", 2) * (2 * config.translate + 1)) - config.translate  # [B, 2]
    jittered = uniform("jittered", 1) < config.jitter_probability  # [B, 1]
    # Each change is within ±strength, around a factor of 1 or a turn of 0.
    changes = (uniform("changes", 4) * 2 - 1) * tf.constant(config.jitter)  # [B, 4]
    changes = tf.where(jittered, changes, 0.0)
    normal = _draw(tf.random.stateless_normal, seed, step, view, "lighting", [batch, 3])
    return ViewParameters(
        shift=tf.cast(tf.where(moved, shift, 0.0), tf.int32),
        crop=uniform("crop", _CROP_ATTEMPTS, 4),
        factors=1 + changes[:, :3],
        hue=changes[:, 3],
        order=tf.argsort(uniform("order", 4), axis=1),
        grayscale=uniform("grayscale") < config.grayscale,
        lighting=normal * config.lighting,
        policy=policies.draw(policy, _key(seed, step, view, "policy"), batch) if policy else (),
    )


def crop_boxes(config: ViewConfig, uniform, height, width):
    """Random resized crops: the first of several draws that fits into the image.

    The rule is torchvision's RandomResizedCrop, which the reference uses: an area within
    crop_scale, a ratio log-uniform within crop_ratio, and, where no draw fits, the largest centred
    crop of an allowed ratio.

    Args:
        config: the recipe.
        uniform: [B, attempts, 4].
        height, width: of the images, scalars or [B].

    Returns:
        [B, 4]: top, left, height, width in whole pixels.
    """
    height, width = (
        tf.broadcast_to(tf.cast(side, tf.float32), tf.shape(uniform)[:1])[:, None]  # [B, 1]
        for side in (height, width)
    )
    (low, high), ratios = config.crop_scale, config.crop_ratio
    area = height * width * (low + (high - low) * uniform[..., 0])  # [B, attempts]
    log_low, log_high = math.log(ratios[0]), math.log(ratios[1])
    ratio = tf.exp(log_low + (log_high - log_low) * uniform[..., 1])  # [B, attempts]
    box_width, box_height = tf.round(tf.sqrt(area * ratio)), tf.round(tf.sqrt(area / ratio))
    fits = (box_width >= 1) & (box_width <= width) & (box_height >= 1) & (box_height <= height)
    top = tf.floor(uniform[..., 2] * (height - box_height + 1))
    left = tf.floor(uniform[..., 3] * (width - box_width + 1))
    boxes = tf.stack([top, left, box_height, box_width], axis=-1)  # [B, attempts, 4]
    first = tf.argmax(tf.cast(fits, tf.int32), axis=1)  # [B]
    chosen = tf.gather(boxes, first, axis=1, batch_dims=1)  # [B, 4]
    centred_height = tf.minimum(height, tf.round(width / ratios[0]))  # [B, 1]
    centred_width = tf.minimum(width, tf.round(height * ratios[1]))
    centred = tf.concat(
        [
            tf.floor((height - centred_height) / 2),
            tf.floor((width - centred_width) / 2),
            centred_height,
            centred_width,
        ],
        axis=1,
    )
    return tf.where(tf.reduce_any(fits, axis=1, keepdims=True), chosen, centred)


def view_boxes(config: ViewConfig, uniform, sizes, image_size: int):
    """The part of each image that a view shows: a random crop, or the evaluation view's centre.

    Args:
        config: the recipe.
        uniform: ViewParameters.crop of both views, [n, 2, attempts, 4].
        sizes: of the images, [n, 2].
        image_size: side of the view.

    Returns:
        [n, 2, 4]: top, left, height, width.
    """
    if not has_crop(config):
        box = evaluation_box(config, sizes[:, 0], sizes[:, 1], image_size)  # [n, 4]
        return tf.repeat(box[:, None], 2, axis=1)
    height, width = tf.unstack(tf.repeat(sizes, 2, axis=0), axis=1)  # [2n]
    boxes = crop_boxes(config, tf.reshape(uniform, [-1, *uniform.shape[2:]]), height, width)
    return tf.reshape(boxes, [-1, 2, 4])


def has_crop(config: ViewConfig) -> bool:
    """Whether views are random resized crops."""
    return config.crop_scale[1] > 0


def finish_view(config: ViewConfig, images, flip, parameters: ViewParameters):
    """Augments and normalizes images that have the view's size already.

    The policy comes first, as in Fast AutoAugment's own pipeline, except that there it is applied
    to the whole image before the crop, which costs several times as much on photographs.

    Args:
        config: the recipe.
        images: float32 [b, S, S, 3], 0..255.
        flip: bool [b].
        parameters: b rows.

    Returns:
        float32 [b, S, S, 3], normalized.
    """
    if parameters.policy:
        images = policies.apply(tf.cast(images, tf.float32), parameters.policy)
    return _flip_shift_colour_normalize(config, images, flip, parameters._replace(policy=()))


# Compiled, and image by image, this is three times as fast on a CPU core as compiled whole-batch
# operations: an image stays in the cache from one step to the next.
@tf.function(jit_compile=True)
def _flip_shift_colour_normalize(config: ViewConfig, images, flip, parameters: ViewParameters):
    def one_view(row):
        images, flip, parameters = tf.nest.map_structure(lambda value: value[tf.newaxis], row)
        images = geometry_ops.flip_left_right(tf.cast(images, tf.float32), flip)
        if config.translate and not has_crop(config):
            shift = parameters.shift
            images = geometry_ops.reflect_translate(images, shift[:, 0], shift[:, 1])
        if any(config.jitter) and config.jitter_probability > 0:
            images = image_ops.color_jitter(
                images, parameters.factors, parameters.hue, parameters.order
            )
        if config.lighting:
            images = image_ops.pca_lighting(images, parameters.lighting)
        if config.grayscale:
            images = image_ops.grayscale(images, parameters.grayscale)
        return normalize(config, images)[0]

    return tf.map_fn(one_view, (images, flip, parameters), fn_output_signature=tf.float32)


class BatchDraws(typing.NamedTuple):
    """Everything random about some rows of a step's batch."""

    flip: tf.Tensor  # bool [b]; one draw for both views (paper section 3.4)
    views: tuple[ViewParameters, ViewParameters]


def draw_batch(
    config: ViewConfig, seed, step, rows: slice, batch: int, policy: policies.Policy | None = None
) -> BatchDraws:
    """Draws for the whole batch of a step, of which some rows are kept.

    Args:
        config: the recipe.
        seed, step: of the run.
        rows: which rows of the global batch to keep.
        batch: B, images in the global batch.
        policy: applied to each view, or None.
    """
    both = tuple(draw_view(config, seed, step, view, batch, policy) for view in (1, 2))
    return BatchDraws(
        draw_flip(config, seed, step, batch)[rows],
        tf.nest.map_structure(lambda values: values[rows], both),
    )


def two_views(config: ViewConfig, images, image_size: int, draws: BatchDraws):
    """Both normalized views of images of one size (paper section 3.4).

    Args:
        config: the recipe.
        images: uint8 [b, H, W, 3].
        image_size: side of the views.
        draws: b rows.

    Returns:
        Two tensors float32 [b, image_size, image_size, 3].
    """
    if config.augmentation == "none":
        view = evaluation_view(config, images, image_size)
        return view, view
    # The maximum changes nothing but keeps TensorFlow from moving later transpositions before the
    # cast: oneDNN cannot transpose bytes, and says so on standard error.
    images = tf.maximum(tf.cast(images, tf.float32), 0.0)
    return tuple(
        finish_view(
            config, _cut(config, images, parameters.crop, image_size), draws.flip, parameters
        )
        for parameters in draws.views
    )


def _cut(config: ViewConfig, images, uniform, image_size: int):
    """The part of each image that a view shows, at the view's size."""
    if not has_crop(config):
        return evaluation_crop(config, images, image_size)
    boxes = crop_boxes(config, uniform, tf.shape(images)[1], tf.shape(images)[2])
    return geometry_ops.crop_and_resize(images, boxes, image_size, within_box=True)


def evaluation_box(config: ViewConfig, height, width, image_size: int):
    """What of images the evaluation view shows: their centres, [..., 4].

    As if the shorter side were resized to evaluation_resize, then the centre cut out.
    """
    height, width = tf.cast(height, tf.float32), tf.cast(width, tf.float32)
    side = tf.minimum(height, width) * (image_size / config.evaluation_resize)
    return tf.stack([(height - side) / 2, (width - side) / 2, side, side], axis=-1)


def evaluation_crop(config: ViewConfig, images, image_size: int):
    """The evaluation view before normalization. float32 [B, H, W, 3] -> [B, S, S, 3]."""
    height, width = images.shape[1], images.shape[2]
    if height == width == image_size == config.evaluation_resize:
        return images
    shape = tf.shape(images)
    box = evaluation_box(config, shape[1], shape[2], image_size)
    return geometry_ops.crop_and_resize(images, tf.tile(box[None], [shape[0], 1]), image_size)


def evaluation_view(config: ViewConfig, images, image_size: int):
    """The normalized view used outside training. uint8 [B, H, W, 3] -> [B, S, S, 3]."""
    return normalize(config, evaluation_crop(config, tf.cast(images, tf.float32), image_size))


def normalize(config: ViewConfig, images):
    """(x − mean) / std for each colour."""
    return (tf.cast(images, tf.float32) - tf.constant(config.mean)) / tf.constant(config.std)


def denormalize(config: ViewConfig, views):
    """uint8 images of normalized views, for people to look at."""
    pixels = views * tf.constant(config.std) + tf.constant(config.mean)
    return tf.cast(image_ops.round_levels(pixels), tf.uint8)
