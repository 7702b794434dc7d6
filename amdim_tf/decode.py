"""From the bytes of a JPEG, PNG, BMP, GIF or WebP file to pixels, decoding no more than needed.

What a file is, is read from its first bytes, not from its name. Whatever cannot be decoded raises
inside the graph; `or_else` turns that into a value.
"""

from __future__ import annotations

import tensorflow as tf

from amdim_tf import geometry_ops

# Larger images are refused before they are decoded: a small file can claim any size.
PIXEL_LIMIT = 100_000_000
EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")

# The exact inverse transform, which Pillow uses too; TensorFlow's default is a rougher one.
_DCT_METHOD = "INTEGER_ACCURATE"
_JPEG, _PNG, _BMP, _RIFF = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", b"RIFF"
_GIF = b"GIF8"


def _starts_with(contents, magic: bytes):
    return tf.strings.substr(contents, 0, len(magic)) == magic


def _number(contents, offset: int, count: int, big_endian: bool):
    """An unsigned whole number of `count` bytes at `offset`; 0 where the file is too short."""
    padded = tf.strings.join([contents, b"\0" * (offset + count)])
    digits = tf.cast(tf.io.decode_raw(tf.strings.substr(padded, offset, count), tf.uint8), tf.int64)
    places = tf.range(count, dtype=tf.int64)
    places = tf.reverse(places, [0]) if big_endian else places
    return tf.reduce_sum(digits * 256**places)


def _header_size(contents):
    """Height and width that the header claims, int64; what has no readable header gives 0, 0."""

    def png():
        return _number(contents, 20, 4, True), _number(contents, 16, 4, True)

    def bmp():
        # A negative height, in two's complement, means rows from top to bottom.
        height = _number(contents, 22, 4, False)
        return tf.minimum(height, 2**32 - height), _number(contents, 18, 4, False)

    def webp():
        # Simple lossy files have 14 bits at 26 and 28, lossless ones 14 bits each from 21 on, and
        # extended ones 24 bits, less one, at 24 and 27.
        kind = tf.strings.substr(tf.strings.join([contents, b"\0" * 16]), 12, 4)
        bits = _number(contents, 21, 4, False)
        lossless = tf.bitwise.right_shift(bits, 14) % 2**14 + 1, bits % 2**14 + 1
        lossy = _number(contents, 28, 2, False) % 2**14, _number(contents, 26, 2, False) % 2**14
        extended = _number(contents, 27, 3, False) + 1, _number(contents, 24, 3, False) + 1
        return tuple(
            tf.where(kind == b"VP8X", e, tf.where(kind == b"VP8L", one, other))
            for e, one, other in zip(extended, lossless, lossy, strict=True)
        )

    nothing = tf.constant(0, tf.int64), tf.constant(0, tf.int64)
    return tf.case(
        [
            (_starts_with(contents, _PNG), png),
            (_starts_with(contents, _BMP), bmp),
            (_starts_with(contents, _GIF), lambda: _gif_size(contents)),
            (_starts_with(contents, _RIFF), webp),
        ],
        default=lambda: nothing,
    )


def _gif_size(contents):
    """Height and width of the largest frame of a GIF, which is what decoding gives.

    The size in the header does not bind the frames, so the blocks are walked. All frames are held
    in memory while decoding, a byte per pixel: 0, 0 where they would take more than an image of
    PIXEL_LIMIT pixels does.
    """
    # One zero more than any field that is read beyond the end: there the walk ends.
    data = tf.cast(tf.io.decode_raw(tf.strings.join([contents, b"\0" * 32]), tf.uint8), tf.int64)
    end = tf.size(data, tf.int64) - 32

    def table_bytes(flags):
        return tf.where(flags >= 128, 3 * 2 ** (flags % 8 + 1), tf.constant(0, tf.int64))

    # What stands at `place`: in a block's data the length of the next piece, otherwise a marker.
    def step(place, in_data, height, width, pixels):
        marker = data[place]
        is_frame = ~in_data & (marker == 0x2C)
        frame_width = data[place + 5] + 256 * data[place + 6]
        frame_height = data[place + 7] + 256 * data[place + 8]
        after_frame = place + 11 + table_bytes(data[place + 9])  # marker, 9 bytes, table, code size
        place = tf.where(in_data, place + 1 + marker, tf.where(is_frame, after_frame, place + 2))
        in_data = tf.where(in_data, marker != 0, True)
        seen = tf.cast(is_frame, tf.int64)
        return (
            tf.minimum(place, end),
            in_data,
            tf.maximum(height, seen * frame_height),
            tf.maximum(width, seen * frame_width),
            pixels + seen * frame_height * frame_width,
        )

    def more(place, in_data, *_):
        marker = data[place]
        return (place < end) & (in_data | (marker == 0x2C) | (marker == 0x21))

    nothing = tf.constant(0, tf.int64)
    first = tf.minimum(13 + table_bytes(data[10]), end)
    _, _, height, width, pixels = tf.while_loop(
        more, step, (first, tf.constant(False), nothing, nothing, nothing)
    )
    fits = tf.cast(pixels <= 3 * PIXEL_LIMIT, tf.int64)
    return height * fits, width * fits


def image_size(contents):
    """Height and width of an image file, int32 scalars, from its header.

    Raises:
        tf.errors.InvalidArgumentError: for what is no image, and for more than PIXEL_LIMIT pixels.
    """

    def jpeg_size():
        shape = tf.io.extract_jpeg_shape(contents, output_type=tf.int64)
        return shape[0], shape[1]

    height, width = tf.cond(
        _starts_with(contents, _JPEG), jpeg_size, lambda: _header_size(contents)
    )
    with tf.control_dependencies(
        [
            tf.debugging.assert_greater(height * width, tf.constant(0, tf.int64), "no image"),
            tf.debugging.assert_less(tf.maximum(height, width), tf.constant(2**31, tf.int64)),
            tf.debugging.assert_less_equal(
                height * width, tf.constant(PIXEL_LIMIT, tf.int64), "too many pixels"
            ),
        ]
    ):
        return tf.cast(height, tf.int32), tf.cast(width, tf.int32)


def _decode_whole(contents):
    """uint8 [H, W, 3] of any supported file."""

    def decode_any(channels):
        return tf.io.decode_image(contents, channels=channels, expand_animations=False)

    image = tf.case(
        [
            (
                _starts_with(contents, _JPEG),
                lambda: tf.io.decode_jpeg(contents, channels=3, dct_method=_DCT_METHOD),
            ),
            # TensorFlow refuses to leave out the transparency of a WebP while decoding.
            (_starts_with(contents, _RIFF), lambda: decode_any(channels=0)[..., :3]),
        ],
        default=lambda: decode_any(channels=3),
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


def decode_boxes(contents, choose_boxes, size: int, within_box: bool):
    """Boxes of an image, resampled to size × size, with the least decoding.

    Of a JPEG only the rectangle around the boxes is decoded, and where all boxes are at least
    twice (4, 8 times) as large as the result, at a half (quarter, eighth) of the resolution, which
    the format gives for less than the price of the whole. A box that is still that large is
    averaged over 2×2 (4×4, 8×8) pixels before the finer resampling.

    Args:
        contents: scalar string, the file.
        choose_boxes: function of (height, width) that returns float32 [n, 4]: top, left, height,
            width in pixels; n is static.
        size: side of the result.
        within_box: as in geometry_ops.crop_and_resize.

    Returns:
        float32 [n, size, size, 3], 0..255.
    """
    height, width = image_size(contents)
    boxes = choose_boxes(height, width)  # [n, 4]

    def jpeg(ratio):
        scaled = boxes / ratio
        limit = tf.math.ceil(tf.cast(tf.stack([height, width]), tf.float32) / ratio)
        start, extent = _whole_pixels(
            tf.reduce_min(scaled[:, :2], axis=0),
            tf.reduce_max(scaled[:, :2] + scaled[:, 2:], axis=0),
            limit,
        )
        window = tf.concat([start, extent], axis=0)
        offset = tf.concat([tf.cast(start, tf.float32), [0.0, 0.0]], axis=0)
        return _decode_jpeg_window(contents, window, ratio), scaled - offset

    image, inner = tf.cond(
        _starts_with(contents, _JPEG),
        lambda: _by_reduction(tf.reduce_min(boxes[:, 2:]) / size, jpeg),
        lambda: (_decode_whole(contents), boxes),
    )
    return tf.concat(
        [_resample(image, inner[i], size, within_box) for i in range(boxes.shape[0])], axis=0
    )


def _by_reduction(largest, make):
    """make(r) with the largest r of 1, 2, 4 and 8 that is not above `largest`."""
    return tf.switch_case(
        tf.reduce_sum([tf.cast(largest >= ratio, tf.int32) for ratio in (2, 4, 8)]),
        [lambda ratio=ratio: make(ratio) for ratio in (1, 2, 4, 8)],
    )


def _whole_pixels(start, end, limit):
    """The whole pixels that cover start..end (rows, columns), as int32 start and extent."""
    start = tf.maximum(tf.minimum(tf.floor(start), limit - 1), 0.0)
    extent = tf.maximum(tf.minimum(tf.math.ceil(end), limit) - start, 1.0)
    return tf.cast(start, tf.int32), tf.cast(extent, tf.int32)


def _resample(image, box, size: int, within_box: bool):
    """One box [4] of a uint8 image [H, W, 3], as float32 [1, size, size, 3].

    What the filter cannot see is cut off first; the rest is averaged down as far as it may be.
    """
    reach = 0.0 if within_box else 2 * tf.reduce_max(box[2:]) / size + 1
    limit = tf.cast(tf.shape(image)[:2], tf.float32)
    start, extent = _whole_pixels(box[:2] - reach, box[:2] + box[2:] + reach, limit)
    part = image[start[0] : start[0] + extent[0], start[1] : start[1] + extent[1]]
    part = tf.cast(part, tf.float32)[None]  # [1, h, w, 3]
    box = tf.concat([box[:2] - tf.cast(start, tf.float32), box[2:]], axis=0)

    def averaged(ratio):
        if ratio == 1:
            return part, box
        return tf.nn.avg_pool2d(part, ratio, ratio, "SAME"), box / ratio

    small, inner = _by_reduction(tf.reduce_min(box[2:]) / size, averaged)
    return geometry_ops.crop_and_resize(small, inner[None], size, within_box)


def decode(contents):
    """The whole image, uint8 [H, W, 3], if it is within PIXEL_LIMIT."""
    with tf.control_dependencies(image_size(contents)):
        return _decode_whole(contents)


def image_sizes(files):
    """Heights and widths, int32 [n, 2], of image files [n]; raises where `image_size` does.

    JPEGs are measured with fewer operations than it has, which counts where images are small.
    """

    def jpeg_sizes():
        shapes = tf.map_fn(tf.io.extract_jpeg_shape, files, fn_output_signature=tf.int32)
        sizes = tf.cast(tf.ensure_shape(shapes, [None, 3])[:, :2], tf.int64)
        limit = tf.constant(PIXEL_LIMIT, tf.int64)
        message = "too many pixels"
        check = tf.debugging.assert_less_equal(sizes[:, 0] * sizes[:, 1], limit, message)
        with tf.control_dependencies([check]):
            return tf.cast(sizes, tf.int32)

    def any_sizes():
        return tf.map_fn(
            lambda contents: tf.stack(image_size(contents)), files, fn_output_signature=tf.int32
        )

    are_jpegs = tf.reduce_all(_starts_with(files, _JPEG))
    return tf.ensure_shape(tf.cond(are_jpegs, jpeg_sizes, any_sizes), [None, 2])


def decode_alike(files):
    """Images [n, H, W, 3] of files [n] that `image_sizes` found to have one size."""
    return tf.map_fn(
        _decode_whole, files, fn_output_signature=tf.TensorSpec([None, None, 3], tf.uint8)
    )


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
    made = tf.data.Dataset.from_tensors(argument).map(lambda value: (make(value), True))
    instead = tf.data.Dataset.from_tensors((default, False))
    return made.ignore_errors().concatenate(instead).take(1).get_single_element()
