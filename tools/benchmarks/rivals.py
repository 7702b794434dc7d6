"""The same work done by PyTorch, for comparisons in one run; none where it is not installed."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable

from benchmarks import measuring

Runs = dict[str, Callable[[], object]]


def training_steps(config, data) -> Runs:
    """A training step on the same batch, in both memory layouts."""
    if _reason_against(config):
        return {}
    return {name: _step(config, data, layout) for name, layout in _layouts().items()}


def encoder_passes(config, images) -> Runs:
    """f1 of the same images in inference mode, in both memory layouts."""
    if _reason_against(config):
        return {}
    return {name: _pass(config, images, layout) for name, layout in _layouts().items()}


def compare(config, run: Callable[[], object], others: Runs, turns: int, images: int) -> None:
    """Times them in turns, and prints the rates and how often ours is as fast."""
    if not others:
        print(f"  PyTorch               not compared: {_reason_against(config)}")
        return
    runs = {"amdim_tf": run, **others}
    times = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, one in runs.items():
            seconds = measuring.seconds_of(one)
            if turn:  # the first warms up
                times[name].append(seconds)
    for name, values in times.items():
        line = f"  {name:<21} {images / statistics.median(values):8.1f} images/s"
        if name in others:
            ratios = [a / b for a, b in zip(values, times["amdim_tf"], strict=True)]
            line += (
                f"; amdim_tf is {statistics.median(ratios):.2f} times as fast "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )
        print(line)


def _reason_against(config) -> str:
    """Why PyTorch is not compared; empty where it is."""
    from amdim_tf.config import ModelConfig

    if importlib.util.find_spec("torch") is None:
        return "it is not installed (pip install torch)"
    model = config.model
    plain = (model.tasks, model.use_bn, model.mixture_components)
    if config.data.image_size != 32 or plain != (ModelConfig.tasks, False, 0):
        return "its model here is for 32 pixels, the paper's tasks, no --use_bn and no mixture"
    if config.distribution.precision != "float32":
        return "it computes in float32 here"
    return ""


def _layouts():
    import torch

    return {
        "PyTorch, as shipped": torch.contiguous_format,
        "PyTorch, channels-last": torch.channels_last,
    }


def _images(values, layout):
    """[N, S, S, 3] of TensorFlow as [N, 3, S, S] of PyTorch."""
    import torch

    return torch.from_numpy(values.numpy().transpose(0, 3, 1, 2).copy()).to(memory_format=layout)


def _model(config, layout):
    from benchmarks import torch_model

    settings = config.model
    model = torch_model.TrainedModel(
        settings.ndf, settings.n_rkhs, settings.n_depth, measuring.CLASSES
    )
    return model.to(memory_format=layout)


def _step(config, data, layout):
    import torch

    model = _model(config, layout)
    views = [_images(data[name], layout) for name in ("view1", "view2")]
    labels = torch.from_numpy(data["label"].numpy()).long()
    return lambda: model.train_step(*views, labels)


def _pass(config, images, layout):
    import torch

    encoder, images = _model(config, layout).encoder.eval(), _images(images, layout)

    def run():
        with torch.inference_mode():
            return encoder(images)[2]

    return run
