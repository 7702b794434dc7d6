"""Writes a run's weights for PyTorch, under the names of AMDIM's authors.

Usage:
    python tools/export_torch_checkpoint.py --model_dir=runs/photos --output=amdim.pth

A .pth file is what the authors' code restores: {"model", "hyperparams", "cursor"}; it needs PyTorch
(pip install -r requirements-torch.txt). An .npz file holds the same tensors as state_dict/NAME, and
hyper/NAME; it needs nothing more. Both can be imported again with tools/import_torch_checkpoint.py.
"""

import contextlib
import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import BinaryIO

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np
from absl import flags

from amdim_tf import cli_flags, safe_files
from amdim_tf.errors import UserError
from amdim_tf.reference_shapes import LOCATION_MASKS, LOCATION_MASKS_SHAPE, TENSORS_KEPT

_OWN_DIRECTORIES = ("checkpoints", "export", "evaluation", "logs")  # of a run


def define_flags() -> None:
    """In a function, so that the module can be imported beside other programs' flags."""
    flags.DEFINE(cli_flags.PATH, "model_dir", None, "Directory of the run.")
    flags.DEFINE(cli_flags.PATH, "output", None, "File to write; ends in .pth or .npz.")


def check_output(output: str, model_dir: str) -> None:
    """Refuses a file that cannot be written, or is the run's own, before anything is loaded."""
    path = pathlib.Path(output)
    if path.suffix not in (".pth", ".npz"):
        raise UserError(f"--output: expected a file that ends in .pth or .npz. Received: {output}.")
    if not path.parent.is_dir():
        raise UserError(
            f"--output: expected a file in a directory that is there. Received: {output}."
        )
    check_not_the_runs_own(path, pathlib.Path(model_dir))
    if path.suffix == ".pth" and importlib.util.find_spec("torch") is None:
        raise UserError(
            "--output: expected PyTorch to write a .pth file; it is not installed. "
            "Run pip install -r requirements-torch.txt, or write an .npz file."
        )


def check_not_the_runs_own(path: pathlib.Path, model_dir: pathlib.Path) -> None:
    """Refuses the place of a file that the run needs, under whatever name."""
    # A link with the file's own name is replaced, not followed.
    real = pathlib.Path(os.path.realpath(path.parent)) / path.name
    kept = model_dir / TENSORS_KEPT
    own = [
        pathlib.Path(os.path.realpath(model_dir)) / kept.name,
        pathlib.Path(os.path.realpath(kept)),
    ]
    directories = [os.path.realpath(model_dir / name) for name in _OWN_DIRECTORIES]
    if real in own or any(real.is_relative_to(directory) for directory in directories):
        raise UserError(
            f"--output: expected a file that is not the run's own, outside {model_dir}'s "
            f"{', '.join(_OWN_DIRECTORIES)} and {TENSORS_KEPT}. Received: {path}. Choose another."
        )


def hyperparameters_of(model) -> dict:
    """The model's settings under the authors' names."""
    settings = model.settings
    return {
        "ndf": settings.ndf,
        "n_classes": model.classes,
        "n_rkhs": settings.n_rkhs,
        "tclip": settings.score_clip or None,  # theirs divides by a number, and None is no clipping
        "n_depth": settings.n_depth,
        "encoder_size": model.image_size,
        "use_bn": settings.use_bn,
    }


def write_npz(file, state: dict[str, np.ndarray], hyperparameters: dict) -> None:
    """The golden format, which has no None: without clipping, tclip is 0."""
    hyperparameters = {**hyperparameters, "tclip": hyperparameters["tclip"] or 0.0}
    np.savez(
        file,
        **{f"hyper/{name}": value for name, value in hyperparameters.items()},
        **{f"state_dict/{name}": value for name, value in state.items()},
    )


def write_pth(file, state: dict[str, np.ndarray], hyperparameters: dict, step: int) -> None:
    """The authors' dict. Their loader also wants a constant of their loss, and a cursor."""
    import torch

    masks = np.eye(25, dtype=np.uint8).reshape(LOCATION_MASKS_SHAPE)
    tensors = {
        name: torch.from_numpy(value) for name, value in {**state, LOCATION_MASKS: masks}.items()
    }
    cursor = {"info_epoch": 0, "info_step": step, "classifier_epoch": 0, "classifier_step": 0}
    torch.save({"model": tensors, "hyperparams": hyperparameters, "cursor": cursor}, file)


@contextlib.contextmanager
def written_aside(output: str) -> Iterator[BinaryIO]:
    """A file that becomes `output` at the end, or is removed if something was raised."""
    path = pathlib.Path(output)
    aside = path.with_name(path.name + ".partial")
    try:
        try:
            with safe_files.create(aside) as file:
                yield file
                safe_files.sync(file)
            aside.replace(path)
        finally:
            with contextlib.suppress(OSError):
                aside.unlink()
    except (OSError, RuntimeError) as error:  # PyTorch raises the latter where a disk is full
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        reason = getattr(error, "strerror", None) or first_line.rstrip(".")
        raise UserError(
            f"--output: expected a file with room and permission to write. Received: {output} "
            f"({reason}). Nothing was written."
        ) from None


def export_checkpoint(model_dir: str, output: str) -> None:
    """Writes aside, then puts the file in place."""
    from amdim_tf import checkpoints, reference_weights

    model, step = checkpoints.load_model(model_dir, step_wanted=True)
    state = reference_weights.reference_state(model, model_dir)
    with written_aside(output) as file:
        if output.endswith(".pth"):
            write_pth(file, state, hyperparameters_of(model), step)
        else:
            write_npz(file, state, hyperparameters_of(model))
    if model.mixture is not None:
        print("The mixture is left out: the authors' code has none.")
    numbers = sum(value.size for value in state.values())
    print(f"{output}: written, {len(state)} tensors, {numbers:,} numbers, of step {step}.")


def main() -> None:
    """Reads the flags and exports."""
    model_dir = cli_flags.require_model_dir("the directory of a training run")
    output = cli_flags.require("output", "the file to write")
    check_output(output, model_dir)
    cli_flags.import_tensorflow_quietly()
    export_checkpoint(model_dir, output)


if __name__ == "__main__":
    define_flags()
    cli_flags.run(main)
