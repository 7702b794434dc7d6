"""Image files for tests: photographs-like pictures in every format, and broken ones."""

import io

import numpy as np
from PIL import Image


def picture(height=60, width=80, seed=0):
    """A smooth RGB picture, so that JPEG keeps it well."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, [6, 8, 3]).astype(np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image, kind="JPEG", **options):
    """The bytes of a picture in some format."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write_tree(root, files):
    """Writes {relative path: bytes or picture} below a directory."""
    for name, contents in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents if isinstance(contents, bytes) else encoded(contents))
    return root
