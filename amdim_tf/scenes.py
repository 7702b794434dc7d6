"""Procedural labelled pictures with ground-truth masks: one object over a cluttered background.

The class of a scene is the *shape* of its object and nothing else. Colour, fill, place, scale,
rotation, background, clutter and lighting are drawn independently of the class, and all shapes
have the same area, so neither raw pixels nor colours tell the classes apart: features have to be
learned. The mask of the object comes for free, which lets segmentation be measured.

A scene is a function of (split, index) alone. Its random numbers come from a counter-based
hash, so they depend neither on NumPy's generators nor on which other scenes are rendered along
with it, and its geometry is in unit coordinates, so every image size shows the same scene.
Per-pixel arithmetic keeps to correctly rounded operations (no per-pixel sine or exponential),
so pixels do not depend on the batch or on the processor's vector width.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

SPLIT_SIZES = {"train": 20000, "test": 4000}

_SMALLEST_IMAGE_SIZE = 16  # below this the shapes are no longer recognisable
_CHUNK_PIXELS = 2**18  # pixels rendered at a time: a megabyte a plane stays near the processor
_OBJECT_SIDE = (0.37, 0.46)  # square root of the object's area, as a share of the image's side
_REACH = 0.89  # no shape of area 1 reaches farther than this from its centre
_CLUTTER_PIECES = 3  # of each of the two kinds, strokes and blocks


class Scenes(NamedTuple):
    """Rendered scenes: what the learner sees, what it is graded on, and where the object is."""

    images: np.ndarray  # uint8 [N, S, S, 3]
    labels: np.ndarray  # int32 [N]
    masks: np.ndarray  # bool [N, S, S]


# --- Random numbers

_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment: 2^64 divided by the golden ratio


def _scramble(numbers: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer: a bijection of uint64 whose outputs look independent."""
    numbers = (numbers ^ (numbers >> 30)) * 0xBF58476D1CE4E5B9
    numbers = (numbers ^ (numbers >> 27)) * 0x94D049BB133111EB
    return numbers ^ (numbers >> 31)


class _Draws:
    """Uniform random numbers for N scenes: number k of a scene is a hash of its key and k.

    Each call takes the same number of draws for every scene, so what a scene gets depends on
    its own key and on the order of the calls, never on its neighbours.
    """

    def __init__(self, split: str, indices: np.ndarray):
        stream = _scramble(np.array([_GOLDEN], np.uint64))
        stream = _scramble(stream + list(SPLIT_SIZES).index(split))  # [1]
        self._keys = _scramble(stream + indices.astype(np.uint64) * _GOLDEN)  # [N]
        self._taken = 0

    def uniform(self, low: float, high: float, shape: tuple[int, ...] = (1, 1)) -> np.ndarray:
        """float32 [N, *shape] in [low, high); the default shape broadcasts over pixels."""
        count = int(np.prod(shape))
        counters = np.arange(self._taken + 1, self._taken + count + 1, dtype=np.uint64)
        self._taken += count
        bits = _scramble(self._keys[:, None] + counters * _GOLDEN) >> 40
        unit = bits.astype(np.float32) * 2.0**-24  # 24 bits fill float32's significand exactly
        return (low + (high - low) * unit).reshape(-1, *shape)

    def choice(self, count: int) -> np.ndarray:
        """int32 [N], uniform over range(count)."""
        return self.uniform(0, count, ()).astype(np.int32)


# --- Geometry: signed distances, negative inside


def _frame(draws: _Draws, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates [N, S, S] turned by a random angle, from x [N, 1, S] and y [N, S, 1]."""
    angle = draws.uniform(0, 2 * np.pi).astype(np.float64)
    # Rounding from float64 hides the last-bit differences between sine implementations.
    cosine, sine = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return cosine * x + sine * y, cosine * y - sine * x


def _length(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Distance from the origin."""
    return np.sqrt(x * x + y * y)


def _block(x: np.ndarray, y: np.ndarray, half_length: float, half_width: float) -> np.ndarray:
    """A rectangle, long in x."""
    return np.maximum(np.abs(x) - half_length, np.abs(y) - half_width)


def _stroke(x: np.ndarray, y: np.ndarray, half_length: float, half_width: float) -> np.ndarray:
    """A bar with round ends; of no length, a disc."""
    return _length(np.maximum(np.abs(x) - half_length, 0), y) - half_width


def _triangle(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Equilateral, of inradius 1."""
    return np.maximum(np.abs(x) * (3**0.5 / 2) + y * 0.5, -y) - 1


def _star(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Five points of radius 1 and five notches of radius 0.5."""
    # Mirror the plane into the wedge between one point, at (0, 1), and the notch next to it.
    cosine, sine = np.cos(np.pi / 5).item(), np.sin(np.pi / 5).item()
    x = np.abs(x)
    for side in (1, -1):
        beyond = 2 * np.maximum(side * cosine * x - sine * y, 0)
        x, y = x - side * cosine * beyond, y + sine * beyond
    x = np.abs(x)
    # The wedge's edge runs from (0, 1) to the notch at half of (sine, cosine).
    along_x, along_y = 0.5 * sine, 0.5 * cosine - 1
    return (along_x * (y - 1) - along_y * x) / (along_x**2 + along_y**2) ** 0.5


def _plus(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Two crossed bars of length 2 and width 0.66."""
    return np.minimum(_block(x, y, 1, 0.33), _block(x, y, 0.33, 1))


def _ring(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """From radius 0.56 to radius 1."""
    return np.abs(_length(x, y) - 0.78) - 0.22


def _crescent(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The unit disc less a smaller disc off its centre."""
    return np.maximum(_length(x, y) - 1, 0.8 - _length(x - 0.5, y))


def _heart(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A square of side 2 with a half disc on each of two neighbouring sides."""
    x, y = x + 0.26, y + 0.26  # the middle of the circle around it
    lobes = np.minimum(_length(x - 1, y), _length(x, y - 1)) - 1
    return np.minimum(_block(x, y, 1, 1), lobes)


def _ell(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The letter L with equal legs of length 2 and width 0.8."""
    return np.minimum(_block(x + 0.6, y, 0.4, 1), _block(x, y + 0.6, 1, 0.4))


_SHAPES = {  # name: signed distance in a unit of the shape's own, and area in that unit squared
    "disc": (lambda x, y: _length(x, y) - 1, np.pi),
    "square": (lambda x, y: _block(x, y, 1, 1), 4),
    "triangle": (_triangle, 3 * 3**0.5),
    "star": (_star, 1.4695),
    "plus": (_plus, 2.2044),
    "ring": (_ring, np.pi * (1 - 0.56**2)),
    "crescent": (_crescent, 1.5295),
    "heart": (_heart, 4 + np.pi),
    "bar": (lambda x, y: _block(x, y, 2.6, 1), 10.4),
    "ell": (_ell, 2.56),
}
CLASS_NAMES = tuple(_SHAPES)
_DISTANCES = [distance for distance, _ in _SHAPES.values()]
_SHAPE_SIDES = np.sqrt(np.float32([area for _, area in _SHAPES.values()]))


def _coverage(distance: np.ndarray, width: float | np.ndarray) -> np.ndarray:
    """Share of a pixel inside, from signed distance, for an edge blurred over `width`."""
    return np.clip(0.5 - distance / width, 0, 1)


def _each(choice: np.ndarray, functions: Sequence[Callable], *arrays: np.ndarray) -> np.ndarray:
    """Row n of functions[choice[n]](*arrays): each scene pays for its own kind alone."""
    result = np.empty_like(arrays[0])  # [N, S, S]
    for number, function in enumerate(functions):
        rows = np.flatnonzero(choice == number)
        if rows.size:
            result[rows] = function(*(array[rows] for array in arrays))
    return result


# --- Textures: [N, S, S], the share of the second of two colours, clipped to [0, 1] when used


def _noise(draws: _Draws, image_size: int) -> np.ndarray:
    """Value noise of three octaves: [N, S, S] about 0.5, mostly within [0, 1]."""
    result = 0
    for cells, weight in ((3, 0.9), (6, 0.5), (12, 0.3)):
        lattice = draws.uniform(-1, 1, (cells + 1, cells + 1))
        place = (np.arange(image_size, dtype=np.float32) + 0.5) / image_size * cells
        cell = place.astype(np.int32)
        blend = place - cell
        blend = blend * blend * (3 - 2 * blend)  # smoothstep: no creases along the lattice
        columns = lattice[:, :, cell] * (1 - blend) + lattice[:, :, cell + 1] * blend
        blend = blend[:, None]
        rows = columns[:, cell] * (1 - blend) + columns[:, cell + 1] * blend
        result = result + weight * draws.uniform(0.5, 1) * rows
    return 0.5 + result


def _stripes(along: np.ndarray, cycles: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Stripes across `along`, so many cycles to the unit, with edges blurred over `width`."""
    phase = along * cycles
    distance = np.abs(phase - np.floor(phase) - 0.5) - 0.25
    return _coverage(distance / cycles, width)


def _checks(u: np.ndarray, v: np.ndarray, cycles: np.ndarray, width: np.ndarray) -> np.ndarray:
    """A chequerboard: where one of two crossed sets of stripes is, but not both."""
    first, second = _stripes(u, cycles, width), _stripes(v, cycles, width)
    return first + second - 2 * first * second


_TEXTURES = [
    lambda u, v, noise, cycles, width: noise,
    lambda u, v, noise, cycles, width: _stripes(u, cycles, width),
    lambda u, v, noise, cycles, width: _checks(u, v, cycles, width),
    # Blobs: a noise field cut at its middle; 0.3 is about the inverse of its slope there.
    lambda u, v, noise, cycles, width: _coverage((noise - 0.5) * 0.3, width),
    lambda u, v, noise, cycles, width: 0.5 + 0.9 * u,  # a gradient
]

_FILLS = [
    lambda u, cycles, width: np.zeros_like(u),  # plain
    _stripes,
    lambda u, cycles, width: 0.5 + 1.4 * u,  # a gradient, steeper as the object is smaller
]


def _background(draws: _Draws, x: np.ndarray, y: np.ndarray, image_size: int) -> np.ndarray:
    """One of the textures, warped by noise and overlaid with a little of it: [N, S, S]."""
    noise = _noise(draws, image_size)
    u, v = _frame(draws, x - draws.uniform(0.4, 0.6), y - draws.uniform(0.4, 0.6))
    warp = draws.uniform(0, 0.15) * noise
    width = np.maximum(draws.uniform(-0.05, 0.1), 1 / image_size)  # from crisp to blurred
    cycles = draws.uniform(2.5, 6)
    kind = draws.choice(len(_TEXTURES))
    texture = _each(kind, _TEXTURES, u + warp, v + warp, noise, cycles, width)
    overlay = draws.uniform(0, 0.5)
    return np.clip(texture + overlay * (noise - texture), 0, 1)


def _clutter(draws: _Draws, x: np.ndarray, y: np.ndarray, kind: Callable) -> np.ndarray:
    """Signed distance [N, S, S] to a few small pieces of one kind, some partly out of sight."""
    nearest = np.float32(np.inf)
    for _ in range(_CLUTTER_PIECES):
        u, v = _frame(draws, x - draws.uniform(-0.05, 1.05), y - draws.uniform(-0.05, 1.05))
        piece = kind(u, v, draws.uniform(0.02, 0.14), draws.uniform(0.015, 0.045))
        nearest = np.minimum(nearest, piece)
    return nearest


# --- Colour and composition


def _contrasting(candidates: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """Of candidates [N, K, 3], those farthest from the nearest of the other colours: [N, 3]."""
    weights = np.float32([0.3, 0.5, 0.2])  # the eye sees green best and blue least
    gaps = [((candidates - other[:, None]) ** 2 * weights).sum(-1) for other in others]
    best = np.argmax(np.minimum.reduce(gaps), axis=1)
    return candidates[np.arange(len(best)), best]


def _palette(draws: _Draws) -> list[np.ndarray]:
    """Colours [N, 3] in painting order: background (2), clutter (2), object (2)."""
    first = draws.uniform(0, 1, (3,))
    second = first + draws.uniform(0.3, 0.8, (1,)) * (draws.uniform(0, 1, (3,)) - first)
    background = (first, second, (first + second) / 2)
    plain = _contrasting(draws.uniform(0, 1, (8, 3)), *background)
    # The fill's second colour is a variation of the first that stays off the background too.
    variations = plain[:, None] + 0.45 * (draws.uniform(0, 1, (8, 3)) - plain[:, None])
    fill = _contrasting(variations, *background)
    # Clutter keeps off the object's colours, or it would change the object's outline.
    clutter = [_contrasting(draws.uniform(0, 1, (4, 3)), plain, fill) for _ in range(2)]
    return [first, second, *clutter, plain, fill]


def _paint(canvas: np.ndarray, coverage: np.ndarray, colour: np.ndarray) -> None:
    """Lay colour [N, 3] over canvas [N, 3, S, S] where coverage [N, S, S] says, in place."""
    canvas += coverage[:, None] * (colour[:, :, None, None] - canvas)


def _object(
    draws: _Draws, x: np.ndarray, y: np.ndarray, labels: np.ndarray, pixel: float
) -> tuple[np.ndarray, np.ndarray]:
    """Coverage [N, S, S] of the object, and of the second colour of its fill."""
    side = draws.uniform(*_OBJECT_SIDE)
    # The same room for every class, or the place would give the class away.
    room = 1 - 2 * _REACH * side
    x = x - (_REACH * side + room * draws.uniform(0, 1))
    y = y - (_REACH * side + room * draws.uniform(0, 1))
    unit = side / _SHAPE_SIDES[labels, None, None]  # gives every shape the same area
    u, v = _frame(draws, x / unit, y / unit)
    body = _coverage(_each(labels, _DISTANCES, u, v) * unit, pixel)
    u, _ = _frame(draws, x, y)  # the fill's direction is not the shape's
    kind, cycles = draws.choice(len(_FILLS)), draws.uniform(4, 7)
    fill = _each(kind, _FILLS, u, cycles, np.full_like(cycles, pixel))
    return body, body * np.clip(fill, 0, 1)


def _render_chunk(split: str, indices: np.ndarray, image_size: int) -> Scenes:
    """Render a few scenes at once: background, clutter over it, the object over both, light."""
    draws = _Draws(split, indices)
    labels = draws.choice(len(CLASS_NAMES))
    pixel = 1 / image_size
    middles = (np.arange(image_size, dtype=np.float32) + 0.5) * pixel
    x, y = middles[None, None, :], middles[None, :, None]

    body, fill = _object(draws, x, y, labels, pixel)
    background = _background(draws, x, y, image_size)
    strokes = _coverage(_clutter(draws, x, y, _stroke), pixel)
    blocks = _coverage(_clutter(draws, x, y, _block), pixel)
    ground, *colours = _palette(draws)
    canvas = np.empty((len(indices), 3, image_size, image_size), np.float32)
    canvas[:] = ground[:, :, None, None]
    for coverage, colour in zip((background, strokes, blocks, body, fill), colours, strict=True):
        _paint(canvas, coverage, colour)

    slope, _ = _frame(draws, x - 0.5, y - 0.5)
    light = draws.uniform(0.75, 1.1) + draws.uniform(0, 0.5) * slope
    canvas *= 255 * light[:, None]
    images = np.clip(canvas + 0.5, 0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
    return Scenes(images, labels, body > 0.5)


def _check(split: str, indices: np.ndarray, image_size: int) -> None:
    """Raise ValueError for arguments that name no scene."""
    if split not in SPLIT_SIZES:
        raise ValueError(f"split must be one of {sorted(SPLIT_SIZES)}, got {split!r}: pass one.")
    if image_size < _SMALLEST_IMAGE_SIZE:
        raise ValueError(
            f"image_size must be at least {_SMALLEST_IMAGE_SIZE} for shapes to be recognisable, "
            f"got {image_size}: pass a larger one."
        )
    if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        raise ValueError(
            f"indices must be a flat sequence of integers, got {indices.dtype} of shape "
            f"{indices.shape}: pass a list, a range or a one-dimensional integer array."
        )
    size = SPLIT_SIZES[split]
    outside = indices[(indices < 0) | (indices >= size)]
    if outside.size:
        raise ValueError(
            f"indices must be from 0 to {size - 1} for split {split!r}, got {outside[0]}: "
            f"take them from range(SPLIT_SIZES[{split!r}])."
        )


def render(split: str, indices: Sequence[int], image_size: int) -> Scenes:
    """Render the scenes of a split with the given indices.

    Args:
        split: "train" or "test"; the two share no scene.
        indices: which scenes, each in range(SPLIT_SIZES[split]), in any order.
        image_size: side of the images in pixels, at least 16.

    Returns:
        Images, labels and masks. A mask holds where the object covers more than half a pixel.
    """
    indices = np.asarray(indices)
    _check(split, indices, image_size)
    scenes = Scenes(
        np.empty((len(indices), image_size, image_size, 3), np.uint8),
        np.empty(len(indices), np.int32),
        np.empty((len(indices), image_size, image_size), bool),
    )
    step = max(1, _CHUNK_PIXELS // image_size**2)

    def fill_chunk(start: int) -> None:
        part = slice(start, start + step)
        chunk = _render_chunk(split, indices[part], image_size)
        for whole, piece in zip(scenes, chunk, strict=True):
            whole[part] = piece

    # NumPy releases the interpreter lock inside its loops, so threads share the work.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill_chunk, range(0, len(indices), step)))  # list() re-raises errors
    return scenes
