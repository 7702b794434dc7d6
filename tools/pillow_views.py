"""The two-view recipes done with Pillow and NumPy, image by image, as the reference does them.

A yardstick for `tools/benchmark.py input`: the same work as views.py, in the way of torchvision.
"""

import io
import itertools
import math
import random

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from amdim_tf import image_ops, policies, policy_tables
from amdim_tf.config import Config


def _crop(image, config: Config, rng: random.Random):
    """A random resized crop, as torchvision draws it."""
    size, recipe = config.data.image_size, config.views
    width, height = image.size
    for _ in range(10):
        area = width * height * rng.uniform(*recipe.crop_scale)
        ratio = math.exp(rng.uniform(*map(math.log, recipe.crop_ratio)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.randint(0, width - w), rng.randint(0, height - h)
            box = (left, top, left + w, top + h)
            return image.crop(box).resize((size, size), Image.Resampling.BICUBIC)
    return ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)


def _shift(image, config: Config, rng: random.Random):
    """A translation with reflection, by padding and cutting."""
    limit, size = config.views.translate, config.data.image_size
    if rng.random() >= config.views.translate_probability:
        return image
    padded = np.pad(np.asarray(image), ((limit, limit), (limit, limit), (0, 0)), "reflect")
    x, y = rng.randint(0, 2 * limit), rng.randint(0, 2 * limit)
    return Image.fromarray(padded[y : y + size, x : x + size])


def _turn_hue(image, turns: float):
    hue, saturation, value = image.convert("HSV").split()
    turned = (np.asarray(hue).astype(np.int16) + round(turns * 255)).astype(np.uint8)
    return Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")


def _jitter(image, config: Config, rng: random.Random):
    strength = config.views.jitter
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    changes = [
        lambda image, enhancer=enhancer, s=s: enhancer(image).enhance(rng.uniform(1 - s, 1 + s))
        for enhancer, s in zip(enhancers, strength, strict=False)
    ]
    changes.append(lambda image: _turn_hue(image, rng.uniform(-strength[3], strength[3])))
    rng.shuffle(changes)
    for change in changes:
        image = change(image)
    return image


def _light(image, alphas):
    """PCA lighting, by numbers [3] that are drawn with the recipe's standard deviation."""
    steps = 255 * np.float32(alphas) * np.float32(image_ops.PCA_EIGENVALUES)
    lit = np.asarray(image) + np.float32(image_ops.PCA_EIGENVECTORS) @ steps  # [S, S, 3]
    return Image.fromarray(np.clip(lit, 0, 255).astype(np.uint8))


def _affine(image, coefficients):
    return image.transform(
        image.size, Image.Transform.AFFINE, coefficients, fillcolor=policies.GREY
    )


def _cutout(image, share: float, rng: random.Random):
    """Paints a square, `share` of the shorter side, about a random centre."""
    width, height = image.size
    x, y = rng.uniform(0, width), rng.uniform(0, height)
    half = share * min(width, height) / 2
    box = [round(side) for side in (x - half, y - half, x + half, y + half)]
    image = image.copy()
    image.paste(policies.GREY, box)
    return image


_OPERATIONS = {
    "identity": lambda image, p: image,
    "shear_x": lambda image, p: _affine(image, (1, p, 0, 0, 1, 0)),
    "shear_y": lambda image, p: _affine(image, (1, 0, 0, p, 1, 0)),
    "translate_x": lambda image, p: _affine(image, (1, 0, p * image.size[0], 0, 1, 0)),
    "translate_y": lambda image, p: _affine(image, (1, 0, 0, 0, 1, p * image.size[1])),
    "rotate": lambda image, p: image.rotate(p, fillcolor=policies.GREY),
    "autocontrast": lambda image, p: ImageOps.autocontrast(image),
    "invert": lambda image, p: ImageOps.invert(image),
    "equalize": lambda image, p: ImageOps.equalize(image),
    "solarize": lambda image, p: ImageOps.solarize(image, int(p)),
    "posterize": lambda image, p: ImageOps.posterize(image, round(p)),
    "contrast": lambda image, p: ImageEnhance.Contrast(image).enhance(p),
    "color": lambda image, p: ImageEnhance.Color(image).enhance(p),
    "brightness": lambda image, p: ImageEnhance.Brightness(image).enhance(p),
    "sharpness": lambda image, p: ImageEnhance.Sharpness(image).enhance(p),
}


def _apply_policy(image, policy, rng: random.Random):
    sub_policies = rng.choices(policy.sub_policies, k=policy.picks)
    for step in itertools.chain.from_iterable(sub_policies):
        if rng.random() >= step.probability:
            continue
        parameter = policy_tables.parameter(step.operation, step.level)
        if step.operation in policy_tables.SIGNED and rng.random() < 0.5:
            parameter = -parameter
        if step.operation == "cutout":
            image = _cutout(image, parameter, rng)
        else:
            image = _OPERATIONS[step.operation](image, parameter)
    return image


def two_views(contents, config: Config, policy, rng: random.Random) -> list[np.ndarray]:
    """Two normalized views, float32 [S, S, 3] each, of an encoded image or of a uint8 array."""
    recipe = config.views
    if isinstance(contents, bytes):
        image = Image.open(io.BytesIO(contents)).convert("RGB")
    else:
        image = Image.fromarray(contents)
    if rng.random() < recipe.flip:
        image = ImageOps.mirror(image)
    views = []
    for _ in range(2):
        cut = _crop if recipe.crop_scale[1] > 0 else _shift
        view = cut(image, config, rng)
        if policy:
            view = _apply_policy(view, policy, rng)
        if rng.random() < recipe.jitter_probability:
            view = _jitter(view, config, rng)
        if recipe.lighting:
            view = _light(view, [rng.gauss(0, recipe.lighting) for _ in range(3)])
        pixels = np.asarray(view)
        if rng.random() < recipe.grayscale:
            pixels = np.asarray(ImageOps.grayscale(view).convert("RGB"))
        views.append((pixels.astype(np.float32) - recipe.mean) / recipe.std)
    return views
