"""Geometric operations on whole batches of images: each image has its own parameters.

Every function is pure: it maps images, float32 [B, H, W, 3] with values 0..255, and tensors of
parameters, one row per image, to a batch of images in the same range. Nothing here draws random
numbers. All work eagerly, in tf.data with unknown B, H and W, and under XLA.
"""

import math
import typing

import tensorflow as tf

from amdim_tf.image_ops import clip_levels, per_image, round_levels

_ONE = 65536  # Pillow's fixed-point coordinates: 16 bits after the point


def _pixel_numbers(images, rows, columns):
    """Number of each image's pixel at `rows`, `columns`, int32 [B, h, w], among all pixels."""
    shape = tf.shape(images)
    image_numbers = tf.range(shape[0])[:, tf.newaxis, tf.newaxis]
    return (image_numbers * shape[1] + rows) * shape[2] + columns


def _rearrange(images, rows, columns):
    """Build each image from the given `rows`, int32 [B, H], and `columns`, [B, W], of itself."""
    numbers = _pixel_numbers(images, rows[:, :, tf.newaxis], columns[:, tf.newaxis, :])
    return tf.gather(tf.reshape(images, [-1, 3]), numbers)  # [B, H, W, 3]


def flip_left_right(images, flip):
    """Mirror the images for which `flip` (bool [B]) is true."""
    shape = tf.shape(images)
    rows, columns = tf.range(shape[1])[tf.newaxis], tf.range(shape[2])
    columns = tf.where(flip[:, tf.newaxis], shape[2] - 1 - columns, columns)
    return _rearrange(images, rows, columns)  # three times as fast as tf.reverse and tf.where


def _reflect(positions, size):
    """Mirror whole positions outside 0..size-1 back inside, the edge itself not repeated."""
    period = tf.maximum(2 * size - 2, 1)
    positions = tf.math.floormod(positions, period)
    return tf.minimum(positions, period - positions)


def reflect_translate(images, dx, dy):
    """Move each image by `dx` pixels to the right and `dy` down, int32 [B].

    What the shift uncovers is filled by reflection, the edge pixel not repeated, as tf.pad's
    REFLECT mode does.
    """
    shape = tf.shape(images)
    rows = _reflect(tf.range(shape[1]) - dy[:, tf.newaxis], shape[1])  # [B, H]
    columns = _reflect(tf.range(shape[2]) - dx[:, tf.newaxis], shape[2])  # [B, W]
    return _rearrange(images, rows, columns)


class Bands(typing.NamedTuple):
    """Resampling to `count` pixels in bands: the source pixels of each band, and their weights."""

    pixels: tf.Tensor  # int32 [B, bands, span]
    weights: tf.Tensor  # float32 [B, bands, count / bands, span]


def band_span(length, count: int, bands: int):
    """How many source pixels a band of `count` / `bands` pixels can see, [B], in steps of 16.

    Matrix products are compiled for each new shape, so that few are used.
    """
    scale = length / count
    seen = (count // bands - 1) * scale + 4.0 * tf.maximum(scale, 1.0) + 2.0
    return tf.cast(16.0 * tf.math.ceil(seen / 16.0), tf.int32)


def bicubic_bands(start, length, size, within, count: int, bands: int, span) -> Bands:
    """Pillow's resampling of a stretch of source pixels to `count` pixels.

    The kernel is Keys' cubic with a = -0.5, widened by the scale when shrinking, cut off at the
    source's border and normalized to sum 1.

    Args:
        start: float32 [B], where in the source the stretch begins, in pixels.
        length: float32 [B], how long it is.
        size: float32, scalar or [B], how many pixels the source has.
        within: whether pixels outside the stretch have no weight.
        count: how many pixels to make of it.
        bands: a divisor of `count`.
        span: how many source pixels a band gets, at least its band_span.
    """
    scale = length[:, tf.newaxis] / count  # [B, 1]
    centers = start[:, tf.newaxis] + (tf.range(count, dtype=tf.float32) + 0.5) * scale
    centers = tf.reshape(centers, [-1, bands, count // bands])
    widening = tf.maximum(scale, 1.0)[:, :, tf.newaxis]  # [B, 1, 1]
    first = tf.floor(centers[:, :, :1] - 2.0 * widening)  # [B, bands, 1]
    first = tf.maximum(first, 0.0)
    pixels = first + tf.range(tf.cast(span, tf.float32))  # [B, bands, span]
    low, high = (start, start + length) if within else (tf.zeros_like(start), size)
    low, high = low[:, tf.newaxis, tf.newaxis], tf.reshape(high, [-1, 1, 1])
    middles = pixels + 0.5
    # From so far away a pixel has no weight.
    middles = tf.where((middles > low) & (middles < high), middles, -1e9) / widening
    distance = tf.abs(middles[:, :, tf.newaxis] - (centers / widening)[..., tf.newaxis])
    # With e = 2 - d and g = 1 - d, neither below 0, both pieces of the cubic are one expression.
    e = tf.nn.relu(2.0 - distance)  # [B, bands, count / bands, span]
    g = tf.nn.relu(1.0 - distance)
    weights = 0.5 * e * e * (e - 1.0) + g * g * (1.0 - 2.0 * g)
    weights /= tf.reduce_sum(weights, axis=3, keepdims=True)
    last = tf.reshape(size, [-1, 1, 1]) - 1.0
    return Bands(tf.cast(tf.minimum(pixels, last), tf.int32), weights)


def resample(image, down: Bands, across: Bands):
    """Resample stretches of one image in bands, each from the pixels that have weight in it.

    A fraction of the arithmetic of `crop_and_resize` where images are large, but not quite Pillow's
    result: it goes down first and does not round in between, so that some pixels differ by a level.

    Args:
        image: uint8 or float32 [H, W, 3], 0..255.
        down, across: how rows and columns are resampled, in the same number of bands.

    Returns:
        float32 [B, count, count, 3], whole numbers 0..255.
    """
    bands, each = down.weights.shape[1:3]
    size = bands * each
    # Columns are filled up with black ones: products are compiled for each shape, so few are used.
    shape = tf.shape(image)
    width = -(-shape[1] // 64) * 64
    wide = tf.concat([image, tf.zeros([shape[0], width - shape[1], 3], image.dtype)], axis=1)
    source = tf.reshape(
        tf.gather(wide, down.pixels), [-1, bands, tf.shape(down.pixels)[2], width * 3]
    )
    source = tf.cast(source, tf.float32)  # [B, bands, span, W·3]
    # Transposed on the way, so that the second product can sum over columns.
    low = tf.matmul(source, down.weights, transpose_a=True, transpose_b=True)
    low = tf.reshape(clip_levels(low), [-1, bands, width, 3 * each])
    low = tf.gather(low, across.pixels, axis=2, batch_dims=1)  # [B, bands, bands, span, 3·each]
    result = tf.matmul(across.weights[:, tf.newaxis], low)  # [B, bands, bands, each, 3·each]
    result = tf.transpose(tf.reshape(result, [-1, bands, size, 3, each]), [0, 1, 4, 2, 3])
    return round_levels(clip_levels(tf.reshape(result, [-1, size, size, 3])))


def _bicubic_weights(start, length, count, size, within):
    """Pillow's resampling weights from `size` source pixels to `count`: [B, count, size].

    Args:
        start: float32 [B], where in the source the resampled stretch begins, in pixels.
        length: float32 [B], how long it is.
        count: how many pixels to make of it.
        size: how many pixels the source has.
        within: whether pixels outside the stretch have no weight.

    The kernel is Keys' cubic with a = -0.5, widened by the scale when shrinking, cut off at the
    source's border and normalized to sum 1.
    """
    scale = length[:, tf.newaxis] / tf.cast(count, tf.float32)  # [B, 1]
    steps = tf.range(count, dtype=tf.float32) + 0.5
    centers = start[:, tf.newaxis] + steps * scale  # [B, count]
    pixels = tf.range(tf.cast(size, tf.float32)) + 0.5  # [size]
    distance = tf.abs(pixels - centers[:, :, tf.newaxis]) / tf.maximum(scale, 1.0)[:, :, tf.newaxis]
    near = (1.5 * distance - 2.5) * distance * distance + 1.0
    far = ((-0.5 * distance + 2.5) * distance - 4.0) * distance + 2.0
    weights = tf.where(distance < 1.0, near, tf.where(distance < 2.0, far, 0.0))
    if within:
        first, length = start[:, tf.newaxis], length[:, tf.newaxis]  # [B, 1]
        inside = (pixels > first) & (pixels < first + length)  # [B, size]
        weights = tf.where(inside[:, tf.newaxis, :], weights, 0.0)
    return weights / tf.reduce_sum(weights, axis=2, keepdims=True)


def crop_and_resize(images, boxes, size, within_box=False):
    """Cut a box out of each image and resample it, bicubic and antialiased, to size × size.

    The counterpart of Pillow's Image.resize((size, size), BICUBIC, box=...): near the box's edge
    the filter sees the pixels beyond it, as long as they are in the image. Pillow's separable
    filter becomes two batched matmuls, horizontal then vertical, each rounded to grey levels.

    Args:
        images: float32 [B, H, W, 3], 0..255; or [1, H, W, 3], to cut all boxes from one image.
        boxes: float32 [B, 4]: top, left, height and width in pixels, inside the image.
        size: side of the result, a Python integer.
        within_box: the filter sees only pixels whose center is in the box, as if the box had been
            cut out first: Image.crop(...).resize(...).

    Returns:
        float32 [B, size, size, 3], whole numbers 0..255.
    """
    height, width = tf.shape(images)[1], tf.shape(images)[2]
    top, left, box_height, box_width = tf.unstack(boxes, axis=1)
    across = _bicubic_weights(left, box_width, size, width, within_box)  # [B, size, W]
    down = _bicubic_weights(top, box_height, size, height, within_box)  # [B, size, H]
    columns = tf.reshape(tf.transpose(images, [0, 2, 1, 3]), [-1, width, height * 3])
    narrow = round_levels(clip_levels(tf.matmul(across, columns)))  # [B, size, H·3]
    narrow = tf.transpose(tf.reshape(narrow, [-1, size, height, 3]), [0, 2, 1, 3])
    result = tf.matmul(down, tf.reshape(narrow, [-1, height, size * 3]))  # [B, size, size·3]
    return tf.reshape(round_levels(clip_levels(result)), [-1, size, size, 3])


def _pixels_or_fill(images, rows, columns, fill):
    """Pixels at `rows`, `columns`, int32 [B, H, W]; `fill` [3] where these are outside."""
    shape = tf.shape(images)
    inside = (rows >= 0) & (rows < shape[1]) & (columns >= 0) & (columns < shape[2])
    # The fill colour is pixel 0 of what is gathered from, so the images' own count from 1.
    numbers = tf.where(inside, _pixel_numbers(images, rows, columns) + 1, 0)
    fill = tf.reshape(tf.cast(fill, tf.float32), [1, 3])
    return tf.gather(tf.concat([fill, tf.reshape(images, [-1, 3])], axis=0), numbers)


def affine(images, coefficients, fill=(0, 0, 0), interpolation="nearest"):
    """Fill the point (x, y) of each output from (a·x + b·y + c, d·x + e·y + f) of its image.

    The counterpart of Pillow's Image.transform(size, AFFINE, (a, b, c, d, e, f)): coordinates
    start at the corner of the first pixel, so pixel centres are at 0.5, 1.5, … and a nearest
    sample is the pixel that contains the point. They are computed in Pillow's fixed-point
    arithmetic, which ends at 32767 pixels. tensorflow-addons puts the origin at the centre of the
    first pixel instead; its transform (a, b, c) is Pillow's (a, b, c + (1 - a - b) / 2).

    Args:
        images: float32 [B, H, W, 3], 0..255.
        coefficients: float32 [B, 6], a to f for each image.
        fill: [3], the colour of what lies outside the image.
        interpolation: "nearest", or "bilinear": then the image fades into the fill colour within a
            pixel of its border, as in tensorflow-addons, while Pillow repeats the border there.
    """
    shape = tf.shape(images)
    x = tf.range(shape[2])
    y = tf.range(shape[1])[:, tf.newaxis]

    def positions(a, b, c):  # [B] each -> int32 [B, H, W]
        fixed = tf.stack([a, b, c + (a + b) / 2.0]) * _ONE  # from the centre of the first pixel
        a, b, c = tf.unstack(tf.cast(tf.floor(fixed + 0.5), tf.int32)[..., tf.newaxis, tf.newaxis])
        return a * x + b * y + c

    a, b, c, d, e, f = tf.unstack(tf.cast(coefficients, tf.float32), axis=1)
    columns, rows = positions(a, b, c), positions(d, e, f)
    if interpolation == "nearest":
        return _pixels_or_fill(images, rows // _ONE, columns // _ONE, fill)
    if interpolation != "bilinear":
        raise ValueError(
            f"Expected interpolation 'nearest' or 'bilinear'. Received: {interpolation!r}"
        )
    return _bilinear(images, rows - _ONE // 2, columns - _ONE // 2, fill)


def _bilinear(images, rows, columns, fill):
    """Interpolate at fixed-point `rows`, `columns`, whole numbers being pixel centres."""
    top, left = rows // _ONE, columns // _ONE
    down = tf.cast(rows % _ONE, tf.float32)[..., tf.newaxis] / _ONE  # [B, H, W, 1], 0..1
    right = tf.cast(columns % _ONE, tf.float32)[..., tf.newaxis] / _ONE

    def row(number):
        left_pixels = _pixels_or_fill(images, number, left, fill)
        right_pixels = _pixels_or_fill(images, number, left + 1, fill)
        return left_pixels + right * (right_pixels - left_pixels)

    above, below = row(top), row(top + 1)
    return above + down * (below - above)


def shear_x(images, level, fill=(0, 0, 0)):
    """Shear horizontally: (x, y) shows what was at (x + level·y, y); `level` [B].

    With Pillow's coordinates (see `affine`). tensorflow-addons shears about the centre of the first
    pixel, which differs by level / 2 pixels.
    """
    level = tf.cast(level, tf.float32)
    one, zero = tf.ones_like(level), tf.zeros_like(level)
    return affine(images, tf.stack([one, level, zero, zero, one, zero], axis=1), fill)


def shear_y(images, level, fill=(0, 0, 0)):
    """Shear vertically: (x, y) shows what was at (x, y + level·x); `level` [B]. See `shear_x`."""
    level = tf.cast(level, tf.float32)
    one, zero = tf.ones_like(level), tf.zeros_like(level)
    return affine(images, tf.stack([one, zero, zero, level, one, zero], axis=1), fill)


def translate_x(images, pixels, fill=(0, 0, 0)):
    """Move each image to the right by `pixels` [B].

    The direction of tensorflow-addons' translate; AutoAugment code on Pillow passes its magnitude
    as coefficient c of an affine transform, which moves the image to the left.
    """
    pixels = tf.cast(pixels, tf.float32)
    one, zero = tf.ones_like(pixels), tf.zeros_like(pixels)
    return affine(images, tf.stack([one, zero, -pixels, zero, one, zero], axis=1), fill)


def translate_y(images, pixels, fill=(0, 0, 0)):
    """Move each image down by `pixels` [B]. See `translate_x`."""
    pixels = tf.cast(pixels, tf.float32)
    one, zero = tf.ones_like(pixels), tf.zeros_like(pixels)
    return affine(images, tf.stack([one, zero, zero, zero, one, -pixels], axis=1), fill)


def rotation(images, degrees):
    """The coefficients [B, 6] with which `affine` turns images about their centre; see `rotate`."""
    shape = tf.cast(tf.shape(images), tf.float32)
    middle_x, middle_y = shape[2] / 2.0, shape[1] / 2.0
    angle = tf.cast(degrees, tf.float32) * (math.pi / 180.0)
    cosine, sine = tf.cos(angle), tf.sin(angle)
    c = middle_x - cosine * middle_x + sine * middle_y
    f = middle_y - sine * middle_x - cosine * middle_y
    return tf.stack([cosine, -sine, c, sine, cosine, f], axis=1)


def rotate(images, degrees, fill=(0, 0, 0), interpolation="nearest"):
    """Turn each image counter-clockwise about its centre by `degrees` [B] (Image.rotate).

    tensorflow-addons' rotate is the same in radians. See `affine` for the other arguments.
    """
    return affine(images, rotation(images, degrees), fill, interpolation)


def cutout(images, center_x, center_y, half_side, fill=(0, 0, 0)):
    """Paint a square into each image: side 2·half_side about (center_x, center_y), all [B].

    Pixel column x is painted if center_x - half_side <= x < center_x + half_side, rows alike; what
    lies outside the image is cut off (DeVries and Taylor 2017, arXiv 1708.04552).
    """
    shape = tf.shape(images)
    half = per_image(half_side, images)
    x = tf.range(tf.cast(shape[2], tf.float32))[:, tf.newaxis] - per_image(center_x, images)
    y = tf.range(tf.cast(shape[1], tf.float32))[:, tf.newaxis, tf.newaxis]
    y -= per_image(center_y, images)
    columns = (-half <= x) & (x < half)  # [B, 1, W, 1]
    rows = (-half <= y) & (y < half)  # [B, H, 1, 1]
    return tf.where(rows & columns, tf.cast(fill, tf.float32), images)
