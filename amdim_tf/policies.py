"""AutoAugment-style policies applied to whole batches: every image has its own operations.

As in views.py, randomness and pixels are kept apart. `draw` makes one row of steps per image, a
function of a key and the row's number alone; `apply` does the steps. What a policy is, what its
levels mean, where the published ones come from and how they are read is in policy_tables.py, whose
functions for files are here too.

Each step runs as a few large kernels, one per operation, on the images that drew it, so that its
cost is about one operation per image however many the policy has. The number of images in each
kernel differs from batch to batch: `apply` has dynamic shapes. It works eagerly, in a tf.function
and in tf.data with unknown B, H and W, but does not compile under XLA.
"""

from __future__ import annotations

import typing

import numpy as np
import tensorflow as tf

from amdim_tf import geometry_ops, image_ops
from amdim_tf.policy_tables import (
    OPERATIONS,
    SIGNED,
    Policy,
    Step,
    load,
    of_run,
    parameter,
    path_in,
    save,
)

__all__ = [
    "GREY", "DrawnSteps", "Policy", "Step", "apply", "draw", "load", "of_run", "parameter",
    "path_in", "save",
]  # fmt: skip

# What shear, translate, rotate and cutout uncover, as in the code of AutoAugment's authors. Fast
# AutoAugment's has black there, but nearly this grey, (125, 123, 114), for cutout.
GREY = (128, 128, 128)


class DrawnSteps(typing.NamedTuple):
    """Steps drawn for each image, a row per image; S is the most steps that an image can get."""

    operation: tf.Tensor  # int32 [B, S]: place in OPERATIONS; 0, identity, for a step left out
    parameter: tf.Tensor  # [B, S]: as `parameter` gives it, with its sign
    center: tf.Tensor  # [B, S, 2] uniform numbers: x and y of cutout's centre


def draw(policy: Policy, key, batch) -> DrawnSteps:
    """Random steps for every image of a batch.

    Row i is a function of the policy, the key and i: a larger batch begins with the rows of a
    smaller one, and a worker that handles some rows draws all of them and keeps its own.

    Args:
        policy: with N sub-policies, the longest of T steps.
        key: int [2], as tf.random.experimental.stateless_fold_in gives it.
        batch: B, a number or a scalar tensor.

    Returns:
        DrawnSteps of S = picks·T steps.
    """
    count, length = len(policy.sub_policies), max(map(len, policy.sub_policies))
    operations = np.zeros([count, length], np.int32)
    probabilities, parameters = np.zeros([2, count, length], np.float32)
    for number, sub_policy in enumerate(policy.sub_policies):
        for place, step in enumerate(sub_policy):
            operations[number, place] = OPERATIONS.index(step.operation)
            probabilities[number, place] = step.probability
            parameters[number, place] = parameter(step.operation, step.level)

    # One generator by name: on CPUs and GPUs it numbers its values along the rows.
    shape = [batch, policy.picks, 1 + 4 * length]
    uniform = tf.random.stateless_uniform(shape, key, alg="philox")
    choice = tf.cast(uniform[..., 0] * count, tf.int32)  # [B, picks], below N
    operation = tf.gather(operations, choice)  # [B, picks, T]
    values = tf.reshape(uniform[..., 1:], [batch, policy.picks, length, 4])
    done = values[..., 0] < tf.gather(probabilities, choice)
    signed = tf.gather([name in SIGNED for name in OPERATIONS], operation)
    negative = signed & (values[..., 1] < 0.5)
    size = tf.gather(parameters, choice)
    slots = [batch, policy.picks * length]
    return DrawnSteps(
        operation=tf.reshape(tf.where(done, operation, 0), slots),
        parameter=tf.reshape(tf.where(negative, -size, size), slots),
        center=tf.reshape(values[..., 2:], [*slots, 2]),
    )


def apply(images, drawn: DrawnSteps, fill=GREY):
    """Do the drawn steps, first to last.

    Policies are defined on 8-bit images, so values are rounded to whole grey levels first, and each
    step leaves whole grey levels, as Pillow does.

    Args:
        images: float32 [B, H, W, 3], 0..255.
        drawn: B rows.
        fill: [3], the colour of what geometric operations uncover and of cutout's square.

    Returns:
        float32 [B, H, W, 3], whole numbers 0..255.
    """
    images = image_ops.round_levels(images)
    for slot in range(drawn.operation.shape[1]):
        steps = DrawnSteps(*(values[:, slot] for values in drawn))
        images = _apply_slot(images, steps, fill)
    return images


def _apply_slot(images, steps: DrawnSteps, fill):
    """One step of each image: gathers the images of each kernel, and puts the results back.

    Args:
        images: [B, H, W, 3].
        steps: operation and parameter [B], center [B, 2].
        fill: [3].
    """
    kernel = tf.gather(_KERNEL_OF_OPERATION, steps.operation)  # [B]
    rows = tf.dynamic_partition(tf.range(tf.shape(images)[0]), kernel, len(_KERNELS))
    results = []
    for (_, function), chosen in zip(_KERNELS, rows, strict=True):
        own = DrawnSteps(*(tf.gather(values, chosen) for values in steps))
        results.append(function(tf.gather(images, chosen), own, fill))
    return tf.ensure_shape(tf.dynamic_stitch(rows, results), images.shape)


def _geometric(images, steps: DrawnSteps, fill):
    """Shear, translate and rotate: one affine map, of which an operation moves its own part."""
    shape = tf.cast(tf.shape(images), tf.float32)

    def of(name):  # [b]: the parameter, or 0 for the images with another operation
        return tf.where(tf.equal(steps.operation, OPERATIONS.index(name)), steps.parameter, 0.0)

    none = tf.zeros_like(steps.parameter)
    across, down = -of("translate_x") * shape[2], -of("translate_y") * shape[1]
    moved = tf.stack([none, of("shear_x"), across, of("shear_y"), none, down], axis=1)  # [b, 6]
    turned = geometry_ops.rotation(images, of("rotate"))  # [b, 6]
    return geometry_ops.affine(images, turned + moved, fill)


def _blended(function):
    """A kernel of ImageEnhance's operations, whose results Pillow cuts off to whole levels."""

    def kernel(images, steps: DrawnSteps, fill):
        # A thousandth of a level makes up for rounding where the blend is a whole level.
        return tf.floor(function(images, steps.parameter) + 1e-3)

    return kernel


def _posterize(images, steps: DrawnSteps, fill):
    return image_ops.posterize(images, tf.cast(steps.parameter, tf.int32))


def _cutout(images, steps: DrawnSteps, fill):
    """A square about a centre that is uniform over the image, cut off at the border.

    Fast AutoAugment moves a square that would cross the left or upper border inside instead.
    """
    shape = tf.cast(tf.shape(images), tf.float32)
    center_x = steps.center[:, 0] * shape[2] - 0.5  # pixel 0 reaches from -0.5 to 0.5
    center_y = steps.center[:, 1] * shape[1] - 0.5
    half_side = steps.parameter * tf.minimum(shape[1], shape[2]) / 2
    return geometry_ops.cutout(images, center_x, center_y, half_side, fill)


# The operations that a kernel does, and the kernel: (images [b, H, W, 3], steps [b], fill) ->
# [b, H, W, 3]. To invert is to solarize with a threshold of 0, the parameter of invert.
_KERNELS = (
    (("identity",), lambda images, steps, fill: images),
    (SIGNED, _geometric),
    (("autocontrast",), lambda images, steps, fill: image_ops.autocontrast(images)),
    (("equalize",), lambda images, steps, fill: image_ops.equalize(images)),
    (
        ("invert", "solarize"),
        lambda images, steps, fill: image_ops.solarize(images, steps.parameter),
    ),
    (("posterize",), _posterize),
    (("contrast",), _blended(image_ops.contrast)),
    (("color",), _blended(image_ops.color)),
    (("brightness",), _blended(image_ops.brightness)),
    (("sharpness",), _blended(image_ops.sharpness)),
    (("cutout",), _cutout),
)
_KERNEL_OF_OPERATION = [
    next(number for number, (names, _) in enumerate(_KERNELS) if name in names)
    for name in OPERATIONS
]
