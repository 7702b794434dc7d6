"""The same work done by PyTorch, for comparisons in one run; none where it is not installed."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable

from benchmarks import measuring

_PAUSE = 0.3  # seconds

Runs = dict[str, Callable[[], object]]


def training_steps(config, data) -> Runs:
    """A training step on the same batch, in both memory layouts."""
    if reason_against(config):
        return {}
    return {name: _step(config, data, layout) for name, layout in _layouts().items()}


def encoder_passes(config, images) -> Runs:
    """f1 of the same images in inference mode, in both memory layouts."""
    if reason_against(config):
        return {}
    return {name: _pass(config, images, layout) for name, layout in _layouts().items()}


def compare(config, run: Callable[[], object], others: Runs, turns: int, images: int) -> None:
    """Times them in turns, and prints the rates and how often ours is as fast.

    In a turn each has a run that is not timed, after a pause: threads of the one before may wait
    for more work by spinning, which would be counted as this one's time.
    """
    if not others:
        print(f"  PyTorch               not compared: {reason_against(config)}")
        return
    runs = {"amdim_tf": run, **others}
    times = {name: [] for name in runs}
    for _ in range(turns):
        for name, one in runs.items():
            time.sleep(_PAUSE)
            one()
            times[name].append(measuring.seconds_of(one))
    for name, values in times.items():
        line = f"  {name:<21} {images / statistics.median(values):8.1f} images/s"
        if name in others:
            ratios = [a / b for a, b in zip(values, times["amdim_tf"], strict=True)]
            line += (
                f"; amdim_tf is {statistics.median(ratios):.2f} times as fast "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )
        print(line)


def reason_against(config) -> str:
    """Why PyTorch is not compared; empty where it is."""
    import tensorflow as tf

    from amdim_tf.config import ModelConfig

    if importlib.util.find_spec("torch") is None:
        return "it is not installed (pip install -r requirements-torch.txt)"
    settings = config.model
    plain = (settings.tasks, settings.use_bn, settings.mixture_components)
    if config.data.image_size != 32 or plain != (ModelConfig.tasks, False, 0):
        return "its model here is for 32 pixels, the paper's tasks, no --use_bn and no mixture"
    if config.distribution.precision != "float32" or config.distribution.microbatch:
        return "it computes in float32 and without microbatches here"
    if tf.config.list_physical_devices("GPU"):
        return "it computes on the CPU here, and this machine has a GPU"
    return ""


def _layouts():
    import torch

    return {
        "PyTorch, as shipped": torch.contiguous_format,
        "PyTorch, channels-last": torch.channels_last,
    }


def to_torch(images, layout):
    """[N, S, S, 3] of TensorFlow as [N, 3, S, S] of PyTorch."""
    import torch

    moved = torch.from_numpy(images.numpy()).permute(0, 3, 1, 2)
    return moved.contiguous(memory_format=layout)


def model_of(config, layout, classes: int = measuring.CLASSES):
    """The configured model in PyTorch, with its optimizer."""
    from benchmarks import torch_model

    model = torch_model.TrainedModel(config.model, config.optimizer, classes)
    return model.to(memory_format=layout)


def _step(config, data, layout):
    import torch

    model = model_of(config, layout)
    views = [to_torch(data[name], layout) for name in ("view1", "view2")]
    labels = torch.from_numpy(data["label"].numpy()).long()
    return lambda: model.train_step(*views, labels)


def _pass(config, images, layout):
    import torch

    encoder, given = model_of(config, layout).encoder.eval(), to_torch(images, layout)

    def run():
        with torch.inference_mode():
            return encoder(given)[2]

    return run
