"""From the bytes of a JPEG, PNG, BMP, GIF or WebP file to pixels, decoding no more than needed.

Whatever cannot be decoded raises inside the graph; `or_else` turns that into a value.
"""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from amdim_tf import geometry_ops
from amdim_tf.image_headers import JPEG, RIFF, image_size, is_animated_webp, starts_with

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")

# The exact inverse transform, which Pillow uses too; TensorFlow's default is a rougher one.
_DCT_METHOD = "INTEGER_ACCURATE"
# By how much a JPEG can be shrunk while decoding, and how much of the view's side its boxes must
# then have left: what that does to the pixels is in BUILD_NOTES.md.
_RATIOS = np.float32([1, 2, 4, 8])
_ENOUGH = 0.85
# Bands of rows and columns in which views are resampled: 8 were the fastest for 128 pixels.
_BANDS = 8
_COMPILED_SPANS = (64, 128, 256)


def _decode_whole_jpeg(contents):
    return tf.io.decode_jpeg(contents, channels=3, dct_method=_DCT_METHOD)


def _decode_whole(contents):
    """uint8 [H, W, 3] of any supported file."""

    def decode_webp():
        # TensorFlow's decoder writes beyond its memory for animations, and the process dies.
        still = tf.debugging.Assert(
            ~is_animated_webp(contents), ["expected a WebP of one frame; this is an animation"]
        )
        with tf.control_dependencies([still]):
            # It refuses to leave out the transparency of a WebP while decoding.
            return tf.io.decode_image(tf.identity(contents), channels=0, expand_animations=False)[
                ..., :3
            ]

    image = tf.case(
        [
            (starts_with(contents, JPEG), lambda: _decode_whole_jpeg(contents)),
            (starts_with(contents, RIFF), decode_webp),
        ],
        default=lambda: tf.io.decode_image(contents, channels=3, expand_animations=False),
    )
    return tf.ensure_shape(image, [None, None, 3])


def _decode_jpeg_window(contents, window, ratio: int):
    """A window (top, left, height, width) of a JPEG that is shrunk by `ratio` while decoding."""
    return tf.raw_ops.DecodeAndCropJpeg(
        contents=contents,
        crop_window=window,
        channels=3,
        ratio=ratio,
        dct_method=_DCT_METHOD,
    )


def decode_boxes(contents, sizes, boxes, size: int, within_box: bool):
    """Boxes of several images, resampled to size × size, with the least decoding.

    Of a JPEG only the rectangle around its boxes is decoded, and for augmented views, where all
    boxes are about twice (4, 8 times) as large as the result, at a half (quarter, eighth) of the
    resolution, which the format gives for less than the price of the whole. The evaluation view is
    made from the full resolution, so that it is the same wherever it is made.

    What can be computed for all images at once is: one by one, the many small operations that it
    takes cost as much as the pixels.

    Args:
        contents: string [n], the files.
        sizes: their image_sizes.
        boxes: float32 [n, v, 4]: top, left, height, width in pixels.
        size: side of the result.
        within_box: as in geometry_ops.crop_and_resize; true for augmented views.

    Returns:
        uint8 [n, v, size, size, 3].
    """
    is_jpeg = starts_with(contents, JPEG)  # [n]
    halvings = tf.zeros_like(is_jpeg, tf.int32)
    if within_box:
        smallest = tf.reduce_min(boxes[:, :, 2:], axis=[1, 2])  # [n]
        enough = smallest[:, tf.newaxis] >= size * _ENOUGH * _RATIOS[1:]  # [n, 3]
        halvings = tf.where(is_jpeg, tf.reduce_sum(tf.cast(enough, tf.int32), axis=1), 0)
    ratios = tf.gather(_RATIOS, halvings)[:, tf.newaxis]  # [n, 1]
    boxes /= ratios[:, :, tf.newaxis]
    limits = tf.math.ceil(tf.cast(sizes, tf.float32) / ratios)  # [n, 2]
    starts, extents = _windows(boxes, limits, size, within_box)  # [n, 2] each
    windows = tf.cast(tf.concat([starts, extents], axis=1), tf.int32)  # [n, 4]
    boxes -= tf.pad(starts, [[0, 0], [0, 2]])[:, tf.newaxis]
    decoders = tf.where(is_jpeg, halvings, len(_RATIOS))
    resampled = _resampled_in_bands if within_box else _resampled_exactly
    return tf.cast(resampled(contents, decoders, windows, boxes, size), tf.uint8)


def _resampled_exactly(contents, decoders, windows, boxes, size: int):
    """Boxes of decoded windows, float32 [n, v, size, size, 3], with Pillow's own rounding."""

    def one(row):
        file, decoder, window, boxes = row
        image = tf.cast(_decode_window(file, decoder, window), tf.float32)
        return geometry_ops.crop_and_resize(image[tf.newaxis], boxes, size)

    return tf.map_fn(one, (contents, decoders, windows, boxes), fn_output_signature=tf.float32)


def _resampled_in_bands(contents, decoders, windows, boxes, size: int):
    """Boxes of decoded windows, as if these had been cut out first, float32 [n, v, size, size, 3].

    The weights are made for all images at once, from as many pixels as the largest box asks for;
    each image then uses as many as its own do.
    """
    bands = math.gcd(size, _BANDS)
    starts, lengths, limits = boxes[..., :2], boxes[..., 2:], windows[:, 2:]
    down, across = (
        _bands(starts[..., axis], lengths[..., axis], limits[:, axis], size, bands)
        for axis in (0, 1)
    )
    spans = geometry_ops.band_span(tf.reduce_max(lengths, axis=1), size, bands)  # [n, 2]

    def one(row):
        file, decoder, window, span, bands = row
        image = _decode_window(file, decoder, window)
        down, across = (
            geometry_ops.Bands(each.pixels[..., : span[axis]], each.weights[..., : span[axis]])
            for axis, each in enumerate(bands)
        )
        return geometry_ops.resample(image, down, across)

    rows = (contents, decoders, windows, spans, (down, across))
    return tf.map_fn(one, rows, fn_output_signature=tf.float32)


def _windows(boxes, limits, size: int, within_box: bool):
    """Start and extent [n, 2] of what boxes [n, v, 4] need of images of sizes `limits` [n, 2].

    Two pixels more than the filter sees: JPEG's colours are interpolated from their neighbours.
    """
    reach = 2.0 if within_box else 2.0 * tf.maximum(boxes[:, :, 2:] / size, 1.0) + 2.0  # [n, v, 2]
    starts = tf.reduce_min(tf.floor(boxes[:, :, :2] - reach), axis=1)
    ends = tf.reduce_max(tf.math.ceil(boxes[:, :, :2] + boxes[:, :, 2:] + reach), axis=1)
    starts = tf.maximum(tf.minimum(starts, limits - 1.0), 0.0)
    return starts, tf.maximum(tf.minimum(ends, limits) - starts, 1.0)


def _decode_window(contents, decoder, window):
    """A window of a file, by the JPEG decoder of _RATIOS[decoder], or that for other formats."""

    def jpeg(ratio):
        return lambda: _decode_jpeg_window(contents, window, int(ratio))

    def other():
        top, left, height, width = tf.unstack(window)
        return _decode_whole(contents)[top : top + height, left : left + width]

    return tf.switch_case(decoder, [*map(jpeg, _RATIOS), other])


_compiled_bands = tf.function(geometry_ops.bicubic_bands, jit_compile=True)


def _bands(start, length, limit, size: int, bands: int):
    """bicubic_bands of stretches [n, v] in sources of `limit` [n] pixels, as [n, v, ...].

    Compiled they cost almost nothing, but only for a span that is known beforehand.
    """
    count, views = tf.shape(start)[0], start.shape[1]
    limit = tf.repeat(tf.cast(limit, tf.float32), views)
    start, length = tf.reshape(start, [-1]), tf.reshape(length, [-1])  # [n·v]
    span = tf.reduce_max(geometry_ops.band_span(length, size, bands))

    def make(function, span):
        return lambda: function(start, length, limit, True, size, bands, span)

    made = tf.switch_case(
        tf.reduce_sum(tf.cast(span > _COMPILED_SPANS, tf.int32)),
        [
            *(make(_compiled_bands, compiled) for compiled in _COMPILED_SPANS),
            make(geometry_ops.bicubic_bands, span),
        ],
    )
    pixels = tf.reshape(made.pixels, [count, views, bands, -1])
    weights = tf.reshape(made.weights, [count, views, bands, size // bands, tf.shape(pixels)[3]])
    return geometry_ops.Bands(pixels, weights)


def decode(contents):
    """The whole image, uint8 [H, W, 3], if it is within image_headers.PIXEL_LIMIT."""
    with tf.control_dependencies(image_size(contents)):
        return _decode_whole(contents)


def decode_alike(files):
    """Images [n, H, W, 3] of files [n] that `image_sizes` found to have one size.

    As there, JPEGs do without the branches for other formats, which cost time even if not taken.
    """

    def each_by(decoder):
        pixels = tf.TensorSpec([None, None, 3], tf.uint8)
        return lambda: tf.map_fn(decoder, files, fn_output_signature=pixels)

    are_jpegs = tf.reduce_all(starts_with(files, JPEG))
    return tf.cond(are_jpegs, each_by(_decode_whole_jpeg), each_by(_decode_whole))


def or_else(make, argument, default):
    """make(argument), or `default` where that raises, with a flag that tells which.

    A data set of one element that ignores errors is TensorFlow's only way to catch one in a graph.

    Args:
        make: function of `argument` that returns a tensor or a tuple of tensors.
        argument: a tensor or a structure of tensors.
        default: what `make` returns otherwise, of the same types.

    Returns:
        (value, whether it was made).
    """
    made = tf.data.Dataset.from_tensors((argument,)).map(lambda value: (make(value), True))
    instead = tf.data.Dataset.from_tensors((default, False))
    return made.ignore_errors().concatenate(instead).take(1).get_single_element()
