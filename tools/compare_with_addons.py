"""Compares the image operations with those of tensorflow-addons, for those who come from it.

Usage:
    make compare-addons

makes the environment .venv-addons (Python 3.9 to 3.11, requirements-addons.txt) and runs this file
there, on the golden file's images and on generated ones of odd size. tensorflow-addons gets and
gives uint8; our operations are in float32 and keep fractions. The columns of the table:
    equal     share of values that agree once the fractions are cut off
    within 1  share that differs by at most one grey level, fractions kept
    largest   the largest difference in grey levels, fractions kept
Exits with 1 if a difference is larger than the documented one (BUILD_NOTES.md), or if the golden
file is not what this tensorflow-addons gives; with 2 if there is no tensorflow-addons.
"""

import os
import pathlib
import sys
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says on every start that its development has ended
        import tensorflow_addons as tfa
except ImportError as error:
    print(f"error: no tensorflow-addons here ({error}). Run: make compare-addons", file=sys.stderr)
    sys.exit(2)

import numpy as np
import tensorflow as tf

from amdim_tf import geometry_ops, image_ops

GOLDEN = pathlib.Path(__file__).parent.parent / "tests" / "data" / "tfa_0.23_image_ops.npz"
HEAD = "{:<10} {:<10} {:<34} {:>8} {:>9} {:>8}  {}"
ROW = "{:<10} {:<10} {:<34} {:>8.2%} {:>9.2%} {:>8.2f}  {}"
_ORIGIN = ("origin", "it shears about the centre of the first pixel (Pillow: its corner)")
WHY = {
    "rotate": ("fixed-point", "its coordinates are float32 (Pillow: 16 bits after the point)"),
    "shear_x": _ORIGIN,
    "shear_y": _ORIGIN,
    "sharpness": ("rounding", "it truncates the smoothed image (Pillow: rounds), not the result"),
}


def addons(images, name, options):
    """The operation by tensorflow-addons: uint8 [B, H, W, 3] to the same."""
    if name == "translate":
        return tfa.image.translate(images, [options["dx"], options["dy"]]).numpy()
    operation = getattr(tfa.image, name)
    if name in ("shear_x", "shear_y"):  # takes one image at a time
        return np.stack([operation(image, **options, replace=[0, 0, 0]) for image in images])
    return operation(tf.constant(images), *options.values()).numpy()


def ours(images, name, options):
    """The same operation by amdim_tf, in float32."""
    images = images.astype(np.float32)
    values = {
        key: value if isinstance(value, str) else np.full(len(images), value, np.float32)
        for key, value in options.items()
    }
    if name == "translate":
        moved = geometry_ops.translate_x(images, values["dx"])
        return geometry_ops.translate_y(moved, values["dy"]).numpy()
    if name == "rotate":
        values["degrees"] = np.degrees(values.pop("angle"))
    module = image_ops if name in ("equalize", "sharpness") else geometry_ops
    return getattr(module, name)(images, **values).numpy()


def as_documented(result, expected, name, options):
    """Whether our `result` differs from the `expected` one no more than BUILD_NOTES.md says."""
    difference = np.abs(result - expected)
    if name in ("shear_x", "shear_y"):  # half the level: never more than a pixel to either side
        axis = 2 if name == "shear_x" else 1
        moved = np.stack([np.roll(expected, step, axis) for step in (-1, 0, 1)])
        difference = np.abs(result - moved).min(axis=0)[:, 1:-1, 1:-1].max(axis=(0, axis, 3))
        position = options["level"] * np.arange(1, len(difference) + 1)
        return not difference[~np.isclose(position % 1, 0.5)].any()  # there, either one is right
    if name == "rotate" and options["interpolation"] == "nearest":  # either of two neighbours
        return (difference <= 1).mean() > 0.99
    limit = 1.1 if name == "rotate" else 0.0  # the fraction that uint8 loses, and a little
    if name == "sharpness" and options["factor"] != 1:
        limit = 0.501 + abs(1 - options["factor"])  # two roundings, the first amplified
    return difference.max() <= limit


def equals_golden(theirs, stored, name):
    """Equality; `sharpness` truncates sums whose last bit depends on the CPU: 1% may be one off."""
    changed = np.abs(theirs.astype(int) - stored)
    return changed.max() <= (name == "sharpness") and changed.mean() < 0.01


def generated_images():
    """Smooth images of odd size, uint8 [5, 53, 41, 3]; one low in contrast, one uniform."""
    coarse = np.random.default_rng(0).uniform(0, 255, [5, 6, 5, 3])
    coarse[3] = 100 + 0.1 * coarse[3]
    coarse[4] = coarse[4, 0, 0]
    images = tf.image.resize(coarse, [53, 41], "bicubic")
    return tf.cast(tf.clip_by_value(tf.round(images), 0, 255), tf.uint8).numpy()


def _option(text):
    key, value = text.split("=")
    return key, value if key == "interpolation" else float(value)


def main() -> int:
    """Prints the table and returns the exit code."""
    tf.get_logger().setLevel("ERROR")
    golden = dict(np.load(GOLDEN))
    image_sets = {"golden": golden.pop("images"), "generated": generated_images()}
    print(f"tensorflow-addons {tfa.__version__}, TensorFlow {tf.__version__}")
    print(HEAD.format("images", "operation", "arguments", "equal", "within 1", "largest", "why"))
    failures, reasons = [], {}
    for source, images in image_sets.items():
        for case, stored in golden.items():
            name, *texts = case.split("/")
            options = dict(map(_option, texts))
            theirs = addons(images, name, options)
            if source == "golden" and not equals_golden(theirs, stored, name):
                failures.append(f"{GOLDEN.name}: {case} is not what tensorflow-addons gives")
            expected, result = theirs.astype(np.float32), ours(images, name, options)
            difference = np.abs(result - expected)
            equal = (np.floor(result) == expected).mean()
            word = ""
            if equal < 1 and name in WHY:
                word, reason = WHY[name]
                reasons[word] = reason
            if not as_documented(result, expected, name, options):
                word = "undocumented"
                failures.append(f"{case}, {source} images: differs by more than documented")
            numbers = equal, (difference <= 1).mean(), difference.max()
            print(ROW.format(source, name, " ".join(texts), *numbers, word).rstrip())
    print("What tensorflow-addons does where they differ; ours follow Pillow:")
    print(*(f"  {word}: {reason}" for word, reason in reasons.items()), sep="\n")
    if not failures:
        print(f"All as documented; {GOLDEN.name} is what this tensorflow-addons gives.")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
