"""The authors' checkpoints: names, shapes and settings, read without PyTorch and TensorFlow.

The authors save {"model": state dict, "hyperparams": …, "cursor": …}; the golden files of the tests
have the same as state_dict/NAME and hyper/NAME in an .npz file.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any, NamedTuple

from amdim_tf import torch_files
from amdim_tf.errors import UserError
from amdim_tf.reference_shapes import (
    COUNTER,
    ENCODER,
    LAYERS,
    LOCATION_MASKS,
    LOCATION_MASKS_SHAPE,
    Architecture,
    reference_shapes,
)
from amdim_tf.torch_files import StoredTensor, printable

# The authors' data sets, by the encoder's size and the number of classes.
_DATASETS = {
    (32, 10): "cifar10",
    (32, 100): "cifar100",
    (64, 10): "stl10",
    (128, 1000): "imagenet2012",
    (128, 205): "places205",
}
_SHOWN_NAMES = 3
_USED_HYPERPARAMETERS = ("encoder_size", "ndf", "n_rkhs", "n_depth", "use_bn", "tclip")
_LONGEST_SCALAR = 1024  # bytes of a hyper-parameter in an .npz file


class ReferenceCheckpoint(NamedTuple):
    """A file of the authors' or a golden file."""

    path: str
    kind: str
    tensors: dict[str, StoredTensor]
    hyperparameters: dict[str, Any]


def load(path: str | os.PathLike[str]) -> ReferenceCheckpoint:
    """Lists a file's tensors under the authors' names; their numbers are read later.

    Args:
        path: of a .pth file with the authors' dict or a state dict alone, also with names that
            DataParallel has prefixed with "module."; or of an .npz file in the golden format.
    """
    if torch_files.is_npz(path):
        kind, arrays = "golden .npz", torch_files.read_npz(path)
        state = _with_prefix(arrays, "state_dict/")
        hyperparameters = {
            name: value.read().item() if _is_short_scalar(value) else value
            for name, value in _with_prefix(arrays, "hyper/").items()
        }
    else:
        kind, value = "PyTorch .pth", torch_files.read_pth(path)
        value = value if isinstance(value, dict) else {}
        state = value.get("model", value)
        hyperparameters = value.get("hyperparams", value.get("params"))
        hyperparameters = hyperparameters if isinstance(hyperparameters, dict) else {}
    if not isinstance(state, dict) or not state or not all(map(_is_tensor_item, state.items())):
        raise UserError(
            f"{path}: expected a state dict of tensors, alone or under the key 'model' (in an .npz "
            "file: arrays state_dict/NAME). Received: something else."
        )
    tensors = {canonical_name(name): tensor for name, tensor in state.items()}
    if len(tensors) != len(state):
        raise UserError(f"{path}: expected each tensor once. Received: some under several names.")
    return ReferenceCheckpoint(os.fspath(path), kind, tensors, _plain_only(path, hyperparameters))


def _plain_only(path: str | os.PathLike[str], values: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters that are numbers, texts or None.

    What a file may hold beside them is not looked into: a few bytes can describe nested tuples
    that take for ever to be compared or shown.
    """
    plain = {name: value for name, value in values.items() if _is_plain(value)}
    for name in _USED_HYPERPARAMETERS:
        if name in values and name not in plain:
            raise UserError(
                f"{path}: expected a number as hyper-parameter {name}. Received: something else, "
                "or one of too many digits."
            )
    return plain


def _is_plain(value) -> bool:
    if type(value) is int:
        return abs(value) < 2**62
    return value is None or type(value) in (bool, float, str)


def _is_short_scalar(value: StoredTensor) -> bool:
    """Judged by the array's header: a small file can hold an enormous text."""
    return (
        value.shape == ()
        and value.dtype.kind in "biufU"
        and value.dtype.itemsize <= _LONGEST_SCALAR
    )


def _with_prefix(arrays, prefix):
    return {
        name.removeprefix(prefix): value
        for name, value in arrays.items()
        if name.startswith(prefix)
    }


def _is_tensor_item(item) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], StoredTensor)


def canonical_name(name: str) -> str:
    """A tensor's name in the authors' files, where DataParallel wraps the encoder alone."""
    parts = [part for part in name.split(".") if part != "module"]
    if parts[:1] in (["layer_list"], ["rkhs_block_5"], ["rkhs_block_7"]):
        parts.insert(0, "encoder")  # an encoder's own state dict
    if parts[:1] == ["encoder"]:
        parts.insert(1, "module")
    return ".".join(parts)


def infer_architecture(checkpoint: ReferenceCheckpoint) -> Architecture:
    """The model's size from a few tensors; `check_tensors` compares the others with it."""
    stem = _shape_of(checkpoint, f"{LAYERS}.0.conv.weight", 4)
    n_rkhs = _shape_of(checkpoint, f"{ENCODER}.rkhs_block_5.conv2.weight", 4)[0]
    tensors = checkpoint.tensors
    smaller = 32 if f"{LAYERS}.1.conv1.weight" in tensors else 64
    image_size = 128 if stem[2] == 5 else smaller
    layer = re.compile(re.escape(f"{LAYERS}.2.layer_list.") + r"\d+\.conv1\.weight")
    n_depth = sum(layer.fullmatch(name) is not None for name in tensors)
    classes = 0
    if any(name.startswith("evaluator.") for name in tensors):
        linear = "evaluator.block_glb_lin.block_forward.2.weight"
        classes = _shape_of(checkpoint, linear, 2)[0]
    return Architecture(image_size, stem[0], n_rkhs, n_depth, classes)


def _shape_of(checkpoint: ReferenceCheckpoint, name: str, rank: int) -> tuple[int, ...]:
    tensor = checkpoint.tensors.get(name)
    if tensor is None or len(tensor.shape) != rank:
        found = "nothing" if tensor is None else f"shape {tensor.shape}"
        others = ", ".join(printable(key) for key in list(checkpoint.tensors)[:_SHOWN_NAMES])
        raise UserError(
            f"{checkpoint.path}: expected an AMDIM encoder with a tensor {name} of {rank} "
            f"dimensions. Received: {found}, beside {others} …"
        )
    return tensor.shape


def check_tensors(checkpoint: ReferenceCheckpoint, architecture: Architecture) -> None:
    """Refuses a file unless it has every tensor of the architecture and no other.

    Counters may be missing: PyTorch before 0.4.1 had none, and nothing depends on them.
    """
    expected, tensors = reference_shapes(architecture), checkpoint.tensors
    allowed = {**expected, LOCATION_MASKS: LOCATION_MASKS_SHAPE}
    faults = {
        "missing": [n for n in expected if n not in tensors and not n.endswith(COUNTER)],
        "extra": [printable(n) for n in tensors if n not in allowed],
        "of another shape": [
            f"{n} {tensors[n].shape} instead of {shape}"
            for n, shape in allowed.items()
            if n in tensors and tensors[n].shape != shape
        ],
        "of another type": [
            f"{n} {tensors[n].dtype}"
            for n in expected
            if n in tensors and tensors[n].dtype.kind != ("i" if n.endswith(COUNTER) else "f")
        ],
    }
    found = "; ".join(f"{what} {_listed(names)}" for what, names in faults.items() if names)
    if found:
        described = ", ".join(f"{k}={v}" for k, v in architecture._asdict().items())
        raise UserError(
            f"{checkpoint.path}: expected the {len(expected)} tensors of an AMDIM model with "
            f"{described}, as some of its tensors say. Received: {found}."
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"{len(names)}: {', '.join(names[:_SHOWN_NAMES])}{more}"


def infer_settings(
    checkpoint: ReferenceCheckpoint, architecture: Architecture, given: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The run's settings from the file and the flags.

    Args:
        checkpoint: the file.
        architecture: what its shapes tell.
        given: settings from the command line, which may not contradict the file.

    Returns:
        (settings, sources): setting name -> value, and setting name -> where it comes from, for
        those that come from the file.
    """
    hyper, path = checkpoint.hyperparameters, checkpoint.path
    inferred: dict[str, Any] = architecture._asdict()
    del inferred["classes"]
    for name, value in inferred.items():
        theirs = "encoder_size" if name == "image_size" else name
        if hyper.get(theirs, value) != value:
            raise UserError(
                f"{path}: expected hyper-parameters that fit its tensors, {theirs}={value}. "
                f"Received: {theirs}={printable(str(hyper[theirs]))}."
            )
    sources = dict.fromkeys(inferred, "from the shapes")
    inferred["use_bn"], sources["use_bn"] = _infer_use_bn(checkpoint, given)
    for name, value in inferred.items():
        if given.get(name, value) != value:
            raise UserError(
                f"--{name}: expected {value}, as {path} has it. Received: {given[name]}. Leave the "
                "flag out."
            )
    if "tclip" in hyper and "score_clip" not in given:
        inferred["score_clip"] = _score_clip(path, hyper["tclip"])
        sources["score_clip"] = "from the hyper-parameters"
    if "dataset" not in given:
        inferred["dataset"] = _infer_dataset(path, architecture)
        sources["dataset"] = "from image size and classes"
    return {**inferred, **given}, sources


def _infer_dataset(path: str, architecture: Architecture) -> str:
    """The one of the authors' data sets that has this size and these classes."""
    size, classes = architecture.image_size, architecture.classes
    if (size, classes) not in _DATASETS:
        raise UserError(
            f"--dataset: expected, since {path} does not tell: its {size} pixels and {classes} "
            "classes are those of none of the authors' data sets. Received: nothing."
        )
    return _DATASETS[size, classes]


def _score_clip(path: str, value) -> float:
    """The authors' tclip; None is no clipping, which is 0 here."""
    value = 0.0 if value is None else value
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise UserError(f"{path}: expected a number tclip of at least 0. Received: {value!r:.80}.")
    return float(value)


def _infer_use_bn(checkpoint: ReferenceCheckpoint, given: dict[str, Any]) -> tuple[bool, str]:
    """Whether the norms in the residual layers act, and how that is known.

    They are in the file either way. The counters tell: the authors' model counts a batch for every
    norm that acts as soon as it is made, and the embeddings' last norms always act.
    """
    if "use_bn" in checkpoint.hyperparameters:
        value = checkpoint.hyperparameters["use_bn"]
        if type(value) not in (bool, int) or value not in (0, 1):
            raise UserError(
                f"{checkpoint.path}: expected 0, 1, True or False as hyper-parameter use_bn. "
                f"Received: {printable(repr(value))}."
            )
        return bool(value), "from the hyper-parameters"
    always = checkpoint.tensors.get(f"{ENCODER}.rkhs_block_5.bn_out.bn.{COUNTER}")
    sometimes = checkpoint.tensors.get(f"{LAYERS}.2.layer_list.0.bn1.bn.{COUNTER}")
    if always is not None and sometimes is not None and always.read() > 0:
        return bool(sometimes.read() > 0), "from the batches that norms have counted"
    if "use_bn" in given:
        return given["use_bn"], "from the flag"
    raise UserError(
        f"--use_bn: expected true or false, since {checkpoint.path} does not tell. "
        "Received: nothing."
    )
