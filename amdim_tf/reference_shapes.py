"""Names and shapes of the tensors in the authors' checkpoints; no TensorFlow is needed."""

from __future__ import annotations

from typing import NamedTuple

from amdim_tf.config import top_channels

COUNTER = "num_batches_tracked"
# A constant of the authors' loss, which their state dict holds and the golden files do not.
LOCATION_MASKS = "g2l_loss.masks_r5"
LOCATION_MASKS_SHAPE = (25, 1, 5, 5)
MLP_HIDDEN = 1024
ENCODER = "encoder.module"
LAYERS = f"{ENCODER}.layer_list"
TENSORS_KEPT = "reference_tensors.npz"  # in an imported run: what our model has no use for


class Architecture(NamedTuple):
    """What the shapes of the tensors tell."""

    image_size: int
    ndf: int
    n_rkhs: int
    n_depth: int
    classes: int


def reference_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the authors' model, in their order.

    Batch norms are there even where use_bn leaves them idle.
    """
    size, ndf, n_rkhs, n_depth, classes = architecture
    top = top_channels(size, ndf)
    widths = (4, 2) if size == 32 else (4, 4, 2)
    stem = {
        32: [("conv", 3, ndf, 3), ("residual", ndf, ndf, 1)],
        64: [("conv", 3, ndf, 3)],
        128: [("conv", 3, ndf, 5), ("conv", ndf, ndf, 3)],
    }[size]
    stages = [
        *stem,
        *(("block", ndf << i, ndf << (i + 1), width) for i, width in enumerate(widths)),
        ("norm", top, top, 0),
        ("block", top, top, 3),
        ("block", top, top, 3),
        ("residual", top, n_rkhs, 3),
        ("norm", n_rkhs, n_rkhs, 0),
    ]
    shapes: dict[str, tuple[int, ...]] = {}
    for index, (kind, inputs, outputs, width) in enumerate(stages):
        prefix = f"{LAYERS}.{index}"
        if kind == "conv":
            shapes |= _convolution(f"{prefix}.conv", inputs, outputs, width, bias=True)
        elif kind == "residual":
            shapes |= _residual_layer(prefix, inputs, outputs, width)
        elif kind == "block":
            shapes |= _residual_layer(f"{prefix}.layer_list.0", inputs, outputs, width)
            for depth in range(1, n_depth):
                shapes |= _residual_layer(f"{prefix}.layer_list.{depth}", outputs, outputs, 1)
        else:
            shapes |= _norm(f"{prefix}.bn", outputs)
    for scale in (5, 7):
        shapes |= _embedding(f"{ENCODER}.rkhs_block_{scale}", top, n_rkhs)
    return shapes | (_classifiers(n_rkhs, classes) if classes else {})


def _convolution(prefix, inputs, outputs, width, bias=False):
    kernel = {f"{prefix}.weight": (outputs, inputs, width, width)}
    return kernel | ({f"{prefix}.bias": (outputs,)} if bias else {})


def _norm(prefix, channels):
    names = ("weight", "bias", "running_mean", "running_var")
    return {**{f"{prefix}.{name}": (channels,) for name in names}, f"{prefix}.{COUNTER}": ()}


def _residual_layer(prefix, inputs, outputs, width):
    return {
        **_convolution(f"{prefix}.conv1", inputs, outputs, width),
        **_convolution(f"{prefix}.conv2", outputs, outputs, 1),
        **_norm(f"{prefix}.bn1.bn", outputs),
    }


def _embedding(prefix, inputs, outputs):
    return {
        **_convolution(f"{prefix}.conv1", inputs, outputs, 1),
        **_convolution(f"{prefix}.conv2", outputs, outputs, 1),
        **_norm(f"{prefix}.bn_hid.bn", outputs),
        **_norm(f"{prefix}.bn_out.bn", outputs),
        **_convolution(f"{prefix}.shortcut", inputs, outputs, 1, bias=True),
    }


def _classifiers(inputs, classes):
    mlp = "evaluator.block_glb_mlp.block_forward"
    linear = "evaluator.block_glb_lin.block_forward"
    return {
        f"{mlp}.2.weight": (MLP_HIDDEN, inputs),
        **_norm(f"{mlp}.3", MLP_HIDDEN),
        f"{mlp}.6.weight": (classes, MLP_HIDDEN),
        f"{mlp}.6.bias": (classes,),
        f"{linear}.2.weight": (classes, inputs),
        f"{linear}.2.bias": (classes,),
    }
