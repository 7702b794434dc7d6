"""Turns a PyTorch checkpoint of AMDIM's authors into a run that trains on, evaluates and exports.

Usage:
    python tools/import_torch_checkpoint.py --checkpoint=FILE.pth --model_dir=runs/imported

FILE is what the authors' code saves, in either format of torch.save; a state dict alone, with or
without the "module." of DataParallel; or an .npz file with the same tensors (state_dict/NAME).
PyTorch is not needed, and nothing that the file holds is run. The model's size, the number of
classes and the data set are inferred and printed; flags give what the file does not tell, and every
other setting of the run, for example with --flagfile=configs/imagenet_large.cfg.

The authors' files have no optimizer state: training on begins with warm-up, at step 0.
"""

import os
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np
from absl import flags

from amdim_tf import cli_flags, config_file, reference_checkpoints, torch_files
from amdim_tf import config as config_lib
from amdim_tf.config import Config
from amdim_tf.errors import UserError
from amdim_tf.reference_checkpoints import ReferenceCheckpoint as Checkpoint
from amdim_tf.reference_shapes import COUNTER, LOCATION_MASKS, TENSORS_KEPT, Architecture

_LARGEST_DIFFERENCE = 1e-4
# Groups of tensors in the report, by the beginning of their names.
_GROUPS = {
    "encoder": "encoder.module.layer_list.",
    "embeddings": "encoder.module.rkhs_block_",
    "classifiers": "evaluator.",
}


def define_flags() -> None:
    """In a function, so that the module can be imported beside other programs' flags."""
    cli_flags.define_config_flags()
    flags.adopt_module_key_flags(cli_flags)
    flags.DEFINE(
        cli_flags.PATH, "checkpoint", None, "File to import: .pth, or .npz in the golden format."
    )
    flags.DEFINE(cli_flags.PATH, "model_dir", None, "Directory for the run; new, or empty.")
    flags.DEFINE(
        cli_flags.PATH, "verify", None, "Golden .npz file whose embeddings the model must give."
    )
    flags.DEFINE_integer(
        "classes",
        None,
        "Classes of the data set to train on, where they are not the file's: the online "
        "classifiers start afresh; 0 leaves them out.",
        lower_bound=0,
        upper_bound=config_lib.MOST_CLASSES,
    )
    flags.DEFINE_integer(
        "step",
        0,
        "Step to go on from. Above 0 the learning rate is that step's, but Adam's moments start at "
        "zero, and its first thousand steps are up to ten times too long.",
        lower_bound=0,
        upper_bound=2**31,  # beyond what any run reaches
    )


def check_new(model_dir: str) -> None:
    """Refuses a directory that has something in it."""
    path = pathlib.Path(model_dir)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(
            f"--model_dir: expected a new or an empty directory. Received: {model_dir}, which "
            "holds something already. Choose another."
        )


def print_file(checkpoint: Checkpoint, architecture: Architecture, config: Config, sources) -> None:
    """What the file holds and what was inferred from it."""
    numbers = sum(int(np.prod(tensor.shape)) for tensor in checkpoint.tensors.values())
    print(
        f"{checkpoint.path}: {checkpoint.kind}, {len(checkpoint.tensors)} tensors, "
        f"{numbers:,} numbers, classes: {architecture.classes or 'no classifiers'}"
    )
    settings = config_lib.settings_of(config)
    for name, source in sources.items():
        print(f"  --{name}={settings[name]} {source}")
    kinds = {
        tensor.dtype.name for tensor in checkpoint.tensors.values() if tensor.dtype.kind == "f"
    }
    for kind in sorted(kinds - {"float32"}):
        print(f"  {kind} numbers become float32")


def checked_numbers(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A tensor in float32, refused where a number is none, or is too large for that."""
    with np.errstate(over="ignore"):
        value = checkpoint.tensors[name].read().astype(np.float32)
    if not np.isfinite(value).all():
        raise UserError(
            f"{checkpoint.path}: expected finite float32 numbers. Received: NaN, infinity or a "
            f"number that is too large, in {name}. Has training diverged?"
        )
    return value


def assign(model, checkpoint: Checkpoint, fresh_classifiers: bool) -> dict[str, np.ndarray]:
    """Copies the tensors into the model and prints which; returns those without counterpart."""
    from amdim_tf import reference_weights

    ours = reference_weights.reference_variables(model)
    if fresh_classifiers:
        ours = {name: v for name, v in ours.items() if not name.startswith(_GROUPS["classifiers"])}
    for name, variable in ours.items():
        value = checked_numbers(checkpoint, name)
        variable.assign(reference_weights.from_reference_layout(value))
    counts = {
        group: sum(name.startswith(prefix) for name in ours) for group, prefix in _GROUPS.items()
    }
    shown = ", ".join(f"{group} {count}" for group, count in counts.items())
    print(f"  matched, with equal shapes: {len(ours)} of {len(model.variables)} weights ({shown})")
    if len(ours) < len(model.variables):
        print(f"  without a counterpart there, started afresh: {len(model.variables) - len(ours)}")
    kept, left_out = {}, 0
    for name in sorted(set(checkpoint.tensors) - set(ours) - {LOCATION_MASKS}):
        if fresh_classifiers and name.startswith(_GROUPS["classifiers"]):
            left_out += 1
            continue
        if name.endswith(COUNTER):
            kept[name] = checkpoint.tensors[name].read().astype(np.int64)
        else:
            kept[name] = checked_numbers(checkpoint, name)
    counters = sum(name.endswith(COUNTER) for name in kept)
    print(
        f"  without a counterpart here, kept for export: {len(kept)} (counters of batches "
        f"{counters}, of norms that use_bn leaves idle {len(kept) - counters})"
    )
    if left_out:
        print(f"  left out, for --classes: {left_out} of the file's classifiers")
    return kept


def verify(model, path: str, with_classifiers: bool) -> None:
    """Compares the model's outputs with those in a golden file, and prints the differences."""
    golden = torch_files.read_npz(path)
    differences: dict[str, float] = {}
    for view in ("x1", "x2"):
        images = _golden_array(golden, path, view)
        size = model.image_size
        if images.shape[1:] != (size, size, 3):
            raise UserError(
                f"--verify: expected images [N, {size}, {size}, 3] as {view} of {path}. "
                f"Received: {images.shape}."
            )
        encoded = model.encode(images.astype(np.float32), training=False)
        outputs = {f"r{scale}": encoded[f"phi{scale}"].numpy() for scale in config_lib.SCALES}
        if with_classifiers and f"eval/{view}/logits_linear" in golden:
            for name, logits in model.classify(encoded["f1"]).items():
                outputs[f"logits_{name}"] = logits.numpy()
        for name, actual in outputs.items():
            expected = _golden_array(golden, path, f"eval/{view}/{name}")
            if expected.size != actual.size:
                raise UserError(
                    f"--verify: expected {actual.size} numbers as eval/{view}/{name} of {path}. "
                    f"Received: {expected.size}."
                )
            difference = np.abs(actual.ravel() - expected.ravel()).max()
            differences[name] = float(np.maximum(differences.get(name, 0.0), difference))  # or NaN
    shown = ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
    if not all(value < _LARGEST_DIFFERENCE for value in differences.values()):
        raise UserError(
            f"--verify: expected the outputs in {path} to within {_LARGEST_DIFFERENCE}. Received "
            f"differences of {shown}. Nothing is written."
        )
    print(f"  verified against {path}, largest differences: {shown}")


def _golden_array(golden, path: str, name: str) -> np.ndarray:
    if name not in golden or golden[name].dtype.kind != "f" or 0 in golden[name].shape:
        raise UserError(f"--verify: expected numbers {name} in {path}, a golden .npz file.")
    return golden[name].read()


def _clear_leftover(aside: pathlib.Path) -> None:
    """Removes what an import to the same place left when it was killed, and nothing else."""
    if not aside.exists():
        return
    own = {"config.json", "config.json.partial", TENSORS_KEPT, "checkpoints"}
    if not aside.is_dir() or not own.issuperset(path.name for path in aside.iterdir()):
        raise UserError(
            f"--model_dir: expected to write to {aside} first. Received: something else that is "
            "there already. Move it, or choose another --model_dir."
        )
    shutil.rmtree(aside)


def write_run(model, config: Config, kept: dict[str, np.ndarray], step: int, model_dir) -> None:
    """Writes the run aside, then puts it in place."""
    from amdim_tf import reference_weights
    from amdim_tf.checkpoints import Checkpoints

    target = pathlib.Path(os.path.realpath(model_dir))
    aside = target.with_name(target.name + ".partial")
    _clear_leftover(aside)
    aside.mkdir(parents=True)
    try:
        names = [f"class {number}" for number in range(model.classes)]
        config_file.save(config, config_file.path_in(aside), {"classes": names})
        np.savez(reference_weights.tensors_kept_in(aside), **kept)
        model.optimizer.iterations.assign(step)
        Checkpoints(aside, model).save(step)
        aside.replace(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def import_checkpoint(
    path: str, model_dir: str, given: dict, classes: int | None = None, step: int = 0, golden=None
) -> None:
    """Reads, checks, reports, verifies and writes.

    Args:
        path: of the file to import.
        model_dir: of the run to write.
        given: settings from the command line.
        classes: of the data set to train on; None: the file's, with its classifiers.
        step: to go on from.
        golden: path of a file to verify with, or None.
    """
    check_new(model_dir)
    checkpoint = reference_checkpoints.load(path)
    architecture = reference_checkpoints.infer_architecture(checkpoint)
    reference_checkpoints.check_tensors(checkpoint, architecture)
    settings, sources = reference_checkpoints.infer_settings(checkpoint, architecture, given)
    config = config_lib.make(settings)
    print_file(checkpoint, architecture, config, sources)
    cli_flags.import_tensorflow_quietly()
    from amdim_tf.training_loop import compiled_model

    fresh = classes is not None
    # The steps of an epoch place the milestones, which are not part of a checkpoint.
    model = compiled_model(config, classes if fresh else architecture.classes, per_epoch=1)
    kept = assign(model, checkpoint, fresh)
    if golden:
        verify(model, golden, with_classifiers=not fresh and model.classes > 0)
    write_run(model, config, kept, step, model_dir)
    images = "" if config.data.data_dir else " --data_dir=IMAGES"
    print(
        f"{model_dir}: written, at step {step}. Next: python -m amdim_tf.evaluate "
        f"--model_dir={model_dir}{images}"
    )


def main() -> None:
    """Reads the flags and imports."""
    values = cli_flags.FLAGS
    path = cli_flags.require("checkpoint", "the .pth or .npz file to import")
    model_dir = cli_flags.require_model_dir("a directory for the run's files")
    given = cli_flags.given_settings()
    import_checkpoint(path, model_dir, given, values.classes, values.step, values.verify)


if __name__ == "__main__":
    define_flags()
    cli_flags.run(main)
