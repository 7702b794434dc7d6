"""A tiny export for the tests of extraction, and what surrounds it."""

import pathlib

import numpy as np
from pictures import encoded, picture
from test_model import make_config, make_model

from amdim_tf import config_file, exporting
from amdim_tf.checkpoints import Checkpoints


def write_export(directory: pathlib.Path, **settings) -> pathlib.Path:
    """The SavedModel of a tiny model whose evaluation view cuts 32 pixels out of 36."""
    settings = {"n_depth": 1, "evaluation_resize": 36, **settings}
    config_file.save(
        make_config(**settings), config_file.path_in(directory), {"classes": ["a", "b", "c"]}
    )
    Checkpoints(directory, make_model(**settings)).save(3)
    return exporting.export(directory)


def small_files(count: int = 40) -> dict:
    """{path: JPEG of 40×48 pixels} of two classes, split into train and test."""
    return {
        f"{split}/{'cat' if number % 2 else 'dog'}/{number:03d}.jpg": encoded(
            picture(40, 48, seed=number)
        )
        for split, numbers in (("train", range(4)), ("test", range(count)))
        for number in numbers
    }


def read_npz(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """The columns of all shards, one after the other."""
    parts = []
    for path in sorted(directory.glob("features-*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            parts.append(dict(arrays))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def all_bytes(directory: pathlib.Path) -> dict[str, bytes]:
    """{name: bytes} of the files in a directory."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}
