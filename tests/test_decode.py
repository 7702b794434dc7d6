"""Decoding: every format, sizes from headers, least work, and broken files."""

import struct

import numpy as np
import pytest
import tensorflow as tf
from pictures import encoded, picture
from PIL import Image

from amdim_tf import decode, image_headers

FORMATS = {
    "jpeg": ("JPEG", {"quality": 95}),
    "progressive jpeg": ("JPEG", {"progressive": True, "quality": 95}),
    "png": ("PNG", {}),
    "bmp": ("BMP", {}),
    "webp": ("WEBP", {"quality": 95}),
    "lossless webp": ("WEBP", {"lossless": True}),
    "extended webp": ("WEBP", {"exif": b"Exif\0\0" + b"x" * 8, "quality": 95}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    kind, options = FORMATS[name]
    image = picture(37, 53)
    contents = encoded(image, kind, **options)
    assert [int(side) for side in image_headers.image_size(contents)] == [37, 53]
    difference = np.abs(decode.decode(contents).numpy().astype(int) - np.asarray(image))
    assert difference.mean() < 4


def test_an_animated_webp_is_refused_before_it_is_decoded():
    """TensorFlow's decoder corrupts memory for these; in graphs of all kinds, too."""
    frames = [picture(40, 30), picture(40, 30).rotate(90)]
    contents = encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:])
    box = tf.constant([[[0.0, 0.0, 30.0, 40.0]]])

    def boxes(files):
        sizes = image_headers.image_sizes(files)
        return decode.decode_boxes(files, sizes, box, 16, within_box=False)

    for function in (decode.decode, tf.function(decode.decode)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="animation"):
            function(tf.constant(contents))
    for function in (boxes, tf.function(boxes)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="animation"):
            function(tf.constant([contents]))


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGBA", "P", "1", "I;16", "LA"])
def test_colour_models(mode):
    image = picture().convert("L").convert("I;16") if mode == "I;16" else picture().convert(mode)
    kind = "JPEG" if mode in ("L", "CMYK") else "PNG"
    pixels = decode.decode(encoded(image, kind))
    assert pixels.shape == (60, 80, 3) and pixels.dtype == tf.uint8


def test_top_down_bmp():
    contents = bytearray(encoded(picture(10, 12), "BMP"))
    contents[22:26] = struct.pack("<i", -10)
    assert [int(side) for side in image_headers.image_size(bytes(contents))] == [10, 12]


def _cut(contents, *boxes, within_box=True):
    """Boxes of one file, [v, 32, 32, 3]."""
    files = tf.reshape(contents, [1])
    boxes = tf.constant([boxes], tf.float32)
    return decode.decode_boxes(files, image_headers.image_sizes(files), boxes, 32, within_box)[0]


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_boxes_equal_pillows_crop_and_resize(kind):
    image = picture(200, 300)
    contents = encoded(image, kind)
    decoded = Image.fromarray(decode.decode(contents).numpy())
    boxes = ((10, 20, 50, 60), (40, 5, 33, 47))
    crops = _cut(contents, *boxes)
    for crop, (top, left, height, width) in zip(crops.numpy(), boxes, strict=True):
        expected = decoded.crop((left, top, left + width, top + height)).resize(
            (32, 32), Image.Resampling.BICUBIC
        )
        assert np.mean(np.abs(crop - np.asarray(expected, float)) <= 1) > 0.99


@pytest.mark.parametrize("side, ratio", [(54, 1), (55, 2), (109, 4), (218, 8)])
def test_large_boxes_are_decoded_small(side, ratio, monkeypatch):
    image = picture(300, 320)
    contents = encoded(image, quality=95)
    used = []
    real = decode._decode_jpeg_window
    monkeypatch.setattr(
        decode,
        "_decode_jpeg_window",
        lambda contents, window, r: (used.append(r), real(contents, window, r))[1],
    )
    box = (13, 21, side, side)
    crop = _cut(contents, box)[0].numpy()
    assert used == [ratio]
    expected = image.crop((21, 13, 21 + side, 13 + side)).resize((32, 32), Image.Resampling.BICUBIC)
    assert np.abs(crop - np.asarray(expected, float)).mean() < 3


@pytest.mark.parametrize("side", [20, 63, 90])
def test_evaluation_view_is_exact(side):
    """It sees beyond its box as Pillow does, and is not decoded small however large it is."""
    contents = encoded(picture(100, 120), quality=95)
    crop = _cut(contents, (4.5, 13.25, side, side), within_box=False)[0].numpy()
    decoded = Image.fromarray(decode.decode(contents).numpy())
    region = (13.25, 4.5, 13.25 + side, 4.5 + side)
    expected = decoded.resize((32, 32), Image.Resampling.BICUBIC, box=region)
    assert np.abs(crop - np.asarray(expected, float)).max() <= 1


def test_files_of_all_kinds_together():
    """Each is cut as it would be alone, whatever the sizes and formats of its neighbours."""
    sizes = ((300, 320, "JPEG"), (20, 25, "PNG"), (90, 700, "JPEG"), (5000, 9, "BMP"))
    files = tf.constant([encoded(picture(h, w), kind) for h, w, kind in sizes])
    boxes = tf.constant([[(0, 0, h, w), (h // 3, w // 4, h // 2, w // 2)] for h, w, _ in sizes])
    boxes = tf.cast(boxes, tf.float32)

    @tf.function
    def cut(files, boxes):
        return decode.decode_boxes(files, image_headers.image_sizes(files), boxes, 32, True)

    for number, together in enumerate(cut(files, boxes)):
        alone = cut(files[number : number + 1], boxes[number : number + 1])[0]
        np.testing.assert_allclose(np.float32(together), np.float32(alone), atol=1)


@pytest.mark.parametrize("height, width", [(1, 1), (1, 5000), (5000, 1), (2, 3)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_odd_sizes(height, width, kind):
    contents = encoded(picture(height, width), kind)
    crops = _cut(contents, (0, 0, height, width))
    assert crops.shape == (1, 32, 32, 3) and np.any(crops)


GOOD = encoded(picture())
BROKEN = {
    "empty": b"",
    "text": b"this is no image\n" * 100,
    "truncated jpeg": GOOD[: len(GOOD) // 2],
    "jpeg header only": GOOD[:20],
    "truncated png": encoded(picture(), "PNG")[:200],
    "png header only": b"\x89PNG\r\n\x1a\n",
    "bmp header only": b"BM",
    "riff that is no webp": b"RIFF\x10\0\0\0WAVEfmt ",
    "zip": b"PK\x03\x04" + b"\0" * 100,
}


@tf.function
def _cut_or_nothing(contents):
    def whole(contents):
        return _cut(contents, (0, 0, 60, 80), within_box=False)

    return decode.or_else(whole, contents, tf.zeros([1, 32, 32, 3], tf.uint8))


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_told_apart(name):
    for contents, good in ((BROKEN[name], False), (GOOD, True)):
        crops, made = _cut_or_nothing(tf.constant(contents))
        assert bool(made) is good
        assert bool(np.any(crops)) is good


def _png_claiming(width, height):
    contents = bytearray(encoded(picture(8, 8), "PNG"))
    contents[16:24] = struct.pack(">II", width, height)
    return bytes(contents)


@pytest.mark.parametrize(
    "contents",
    [_png_claiming(60000, 60000), _png_claiming(2**31 - 1, 2**31 - 1), _png_claiming(2**31, 1)],
)
def test_bombs_are_refused_before_they_are_decoded(contents):
    with pytest.raises(tf.errors.InvalidArgumentError):
        image_headers.image_size(contents)


def test_jpeg_bomb():
    contents = encoded(Image.new("L", (20000, 6000)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected an image of up to"):
        decode.decode(contents)


def _gif_claiming(frame, screen, count=1):
    """A GIF whose header claims one size and whose frames are said to have another."""
    contents = bytearray(encoded(picture(20, 30).quantize(8), "GIF"))
    contents[6:10] = struct.pack("<HH", *screen)
    start = contents.index(b"\x2c" + struct.pack("<HHHH", 0, 0, 30, 20))
    contents[start + 5 : start + 9] = struct.pack("<HH", *frame)
    block = contents[start:-1]
    return bytes(contents[:start] + block * count + b"\x3b")


@pytest.mark.parametrize("screen", [(30, 20), (1, 1), (200, 100)])
def test_a_gif_is_as_large_as_its_frames(screen):
    contents = _gif_claiming((30, 20), screen)
    assert [int(side) for side in image_headers.image_size(contents)] == [20, 30]
    assert decode.decode(contents).shape == (20, 30, 3)


def test_the_largest_frame_of_an_animation_counts():
    options = {"save_all": True, "append_images": [picture(40, 50, seed=1)], "loop": 0}
    contents = encoded(picture(40, 50), "GIF", comment=b"walked over" * 50, **options)
    assert [int(side) for side in image_headers.image_size(contents)] == [40, 50]


@pytest.mark.parametrize("frame, count", [((30000, 30000), 1), ((9000, 9000), 4)])
def test_gif_bombs_behind_a_small_header(frame, count):
    with pytest.raises(tf.errors.InvalidArgumentError):
        image_headers.image_size(_gif_claiming(frame, (30, 20), count))


@pytest.mark.parametrize("length", [4, 10, 13, 20, 40, 60, 200])
def test_a_gif_that_ends_early(length):
    contents = _gif_claiming((30, 20), (30, 20))[:length]
    _, made = decode.or_else(decode.decode, tf.constant(contents), tf.zeros([1, 1, 3], tf.uint8))
    assert not made
