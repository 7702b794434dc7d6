"""Weights under the names and in the layouts of the authors' PyTorch checkpoints."""

from __future__ import annotations

import pathlib

import keras
import numpy as np

from amdim_tf import torch_files
from amdim_tf.blocks import BatchNorm, ResidualBlock, ResidualLayer
from amdim_tf.embeddings import Embedding
from amdim_tf.errors import UserError
from amdim_tf.model import AMDIM
from amdim_tf.reference_shapes import COUNTER, TENSORS_KEPT, Architecture, reference_shapes

_MEND = "Import again, or remove the file for the values that PyTorch begins with."


def reference_variables(model: AMDIM) -> dict[str, keras.Variable]:
    """Every weight of the model by its name in the reference's state dict.

    The reference numbers the encoder's stages with a batch norm after the 7×7 block that is there
    even where use_bn leaves it unused; our `stages` have it only where it acts.
    """
    names: dict[str, keras.Variable] = {}
    stages = list(model.encoder.stages)
    if not model.settings.use_bn:
        stages.insert(_index_of_stage(stages, "block_5"), None)
    for index, stage in enumerate(stages):
        prefix = f"encoder.module.layer_list.{index}"
        if isinstance(stage, keras.layers.Conv2D):
            names |= _kernel_and_bias(f"{prefix}.conv", stage)
        elif isinstance(stage, ResidualBlock):
            for depth, layer in enumerate(stage.layers):
                names |= _residual_layer(f"{prefix}.layer_list.{depth}", layer)
        elif isinstance(stage, ResidualLayer):
            names |= _residual_layer(prefix, stage)
        elif isinstance(stage, BatchNorm):
            names |= _batch_norm(f"{prefix}.bn", stage)
    names |= _embedding("encoder.module.rkhs_block_5", model.embedding5)
    names |= _embedding("encoder.module.rkhs_block_7", model.embedding7)
    if model.classes:
        mlp = "evaluator.block_glb_mlp.block_forward"
        names |= _kernel_and_bias(f"{mlp}.2", model.mlp.dense1)
        names |= _batch_norm(f"{mlp}.3", model.mlp.norm)
        names |= _kernel_and_bias(f"{mlp}.6", model.mlp.dense2)
        names |= _kernel_and_bias("evaluator.block_glb_lin.block_forward.2", model.linear.dense)
    return names


def from_reference_layout(array: np.ndarray) -> np.ndarray:
    """A PyTorch tensor in our layout: convolutions OIHW -> HWIO, dense OI -> IO."""
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0)
    return array.T


def to_reference_layout(array: np.ndarray) -> np.ndarray:
    """The inverse of `from_reference_layout`: HWIO -> OIHW, IO -> OI."""
    if array.ndim == 4:
        return np.ascontiguousarray(array.transpose(3, 2, 0, 1))
    return np.ascontiguousarray(array.T)


def tensors_kept_in(model_dir) -> pathlib.Path:
    """Where an imported run keeps the tensors that have no counterpart in our model."""
    return pathlib.Path(model_dir) / TENSORS_KEPT


def reference_state(model: AMDIM, model_dir) -> dict[str, np.ndarray]:
    """The reference's state dict of a run: our weights, and what our model has no use for.

    That is norms which use_bn leaves idle, and counters of batches, which nothing in PyTorch reads
    as long as a norm's momentum is a number. They are as the run's import has kept them or, in a
    run that began here and for counters that the imported file did not have, as PyTorch
    initializes them.
    """
    variables, shapes = reference_variables(model), reference_shapes(architecture_of(model))
    kept = _kept_tensors(tensors_kept_in(model_dir), set(shapes) - set(variables), set(shapes))
    state = {}
    for name, shape in shapes.items():
        if name in variables:
            state[name] = to_reference_layout(variables[name].numpy())
        elif name in kept:
            state[name] = kept[name].read()
        elif name.endswith(COUNTER):
            state[name] = np.zeros(shape, np.int64)
        else:
            ones = name.endswith((".weight", ".running_var"))
            state[name] = np.full(shape, float(ones), np.float32)
        if state[name].shape != shape:
            raise UserError(
                f"{tensors_kept_in(model_dir)}: expected {name} of shape {shape}. "
                f"Received: {state[name].shape}. {_MEND}"
            )
    return state


def _kept_tensors(path: pathlib.Path, wanted: set[str], known: set[str]) -> dict:
    """What a run's import has kept; nothing in a run that began here.

    Args:
        path: of the file.
        wanted: names of what our model has no use for; counters among them may be missing.
        known: names of all tensors that there are.
    """
    if not path.exists():
        return {}
    kept = torch_files.read_npz(path)
    missing = [name for name in sorted(wanted - set(kept)) if not name.endswith(COUNTER)]
    unknown = sorted(set(kept) - known)
    if missing or unknown:
        received = f"no {missing[0]}" if missing else torch_files.printable(unknown[0])
        raise UserError(
            f"{path}: expected the tensors that tools/import_torch_checkpoint.py has kept for "
            f"this run. Received: {received}. {_MEND}"
        )
    for name, tensor in kept.items():
        dtype = np.dtype(np.int64 if name.endswith(COUNTER) else np.float32)
        if tensor.dtype != dtype:
            raise UserError(
                f"{path}: expected {name} of {dtype}. Received: {tensor.dtype}. {_MEND}"
            )
    return kept


def architecture_of(model: AMDIM) -> Architecture:
    """The model's size, in the terms of the reference."""
    settings = model.settings
    return Architecture(
        model.image_size, settings.ndf, settings.n_rkhs, settings.n_depth, model.classes
    )


def _index_of_stage(stages, name):
    return next(index for index, stage in enumerate(stages) if stage.name == name)


def _kernel_and_bias(prefix, layer):
    names = {f"{prefix}.weight": layer.kernel}
    if layer.use_bias:
        names[f"{prefix}.bias"] = layer.bias
    return names


def _batch_norm(prefix, norm):
    return {
        f"{prefix}.weight": norm.gamma,
        f"{prefix}.bias": norm.beta,
        f"{prefix}.running_mean": norm.moving_mean,
        f"{prefix}.running_var": norm.moving_variance,
    }


def _residual_layer(prefix, layer):
    names = _kernel_and_bias(f"{prefix}.conv1", layer.conv1)
    names |= _kernel_and_bias(f"{prefix}.conv2", layer.conv2)
    if layer.norm is not None:
        names |= _batch_norm(f"{prefix}.bn1.bn", layer.norm)
    return names


def _embedding(prefix, embedding: Embedding):
    names = _kernel_and_bias(f"{prefix}.conv1", embedding.conv1)
    names |= _kernel_and_bias(f"{prefix}.conv2", embedding.conv2)
    names |= _kernel_and_bias(f"{prefix}.shortcut", embedding.shortcut)
    names |= _batch_norm(f"{prefix}.bn_out.bn", embedding.norm_out)
    if embedding.norm_hidden is not None:
        names |= _batch_norm(f"{prefix}.bn_hid.bn", embedding.norm_hidden)
    return names
