"""How large an image is, from the first bytes of its file, before anything is decoded.

What a file is, is read from these bytes too, not from its name.
"""

from __future__ import annotations

import tensorflow as tf

# Larger images are refused before they are decoded: a small file can claim any size.
PIXEL_LIMIT = 100_000_000
JPEG, RIFF = b"\xff\xd8\xff", b"RIFF"
PNG, _BMP, _GIF = b"\x89PNG\r\n\x1a\n", b"BM", b"GIF8"


def starts_with(contents, magic: bytes):
    """Whether files begin with these bytes."""
    return tf.strings.substr(contents, 0, len(magic)) == magic


def _number(contents, offset: int, count: int, big_endian: bool):
    """An unsigned whole number of `count` bytes at `offset`; 0 where the file is too short."""
    padded = tf.strings.join([contents, b"\0" * (offset + count)])
    digits = tf.cast(tf.io.decode_raw(tf.strings.substr(padded, offset, count), tf.uint8), tf.int64)
    places = tf.range(count, dtype=tf.int64)
    places = tf.reverse(places, [0]) if big_endian else places
    return tf.reduce_sum(digits * 256**places)


def is_animated_webp(contents):
    """Whether a file that starts with RIFF says that it is an animation."""
    kind = tf.strings.substr(tf.strings.join([contents, b"\0" * 16]), 12, 4)
    return (kind == b"VP8X") & (_number(contents, 20, 1, False) // 2 % 2 == 1)


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
            (starts_with(contents, PNG), png),
            (starts_with(contents, _BMP), bmp),
            (starts_with(contents, _GIF), lambda: _gif_size(contents)),
            (starts_with(contents, RIFF), webp),
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
    """Height and width of an image file, int32 scalars.

    Raises:
        tf.errors.InvalidArgumentError: for what is no image, and for more than PIXEL_LIMIT pixels.
    """

    def jpeg_size():
        shape = tf.io.extract_jpeg_shape(contents, output_type=tf.int64)
        return shape[0], shape[1]

    height, width = tf.cond(starts_with(contents, JPEG), jpeg_size, lambda: _header_size(contents))
    return tuple(tf.unstack(_checked(tf.stack([height, width]))))


def _checked(sizes):
    """Sizes, int64 [..., 2], as int32, if there is something in all of them and not too much."""
    # Cut off, so that the product of two sides is a number that int64 has.
    pixels = tf.reduce_prod(tf.minimum(sizes, PIXEL_LIMIT + 1), axis=-1)
    good = tf.reduce_all((pixels > 0) & (pixels <= PIXEL_LIMIT))
    complaint = f"expected an image of up to {PIXEL_LIMIT} pixels"
    with tf.control_dependencies([tf.debugging.Assert(good, [complaint, sizes])]):
        return tf.cast(sizes, tf.int32)


def image_sizes(files):
    """Heights and widths, int32 [n, 2], of image files [n]; raises where `image_size` does.

    JPEGs are measured with a fifth of its operations: even branches that are not taken cost time.
    """

    def jpeg_sizes():
        shapes = tf.map_fn(tf.io.extract_jpeg_shape, files, fn_output_signature=tf.int32)
        return _checked(tf.cast(tf.ensure_shape(shapes, [None, 3])[:, :2], tf.int64))

    def any_sizes():
        return tf.map_fn(
            lambda contents: tf.stack(image_size(contents)), files, fn_output_signature=tf.int32
        )

    are_jpegs = tf.reduce_all(starts_with(files, JPEG))
    return tf.ensure_shape(tf.cond(are_jpegs, jpeg_sizes, any_sizes), [None, 2])
