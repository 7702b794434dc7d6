"""Every setting of a run: names, defaults, limits and help.

This module is the only home of defaults. Each field below is also a command-line flag of the same
name (see cli_flags.py) and a key of MODEL_DIR/config.json, so names are unique across sections.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from amdim_tf.errors import UserError
from amdim_tf.setting_fields import checked, setting, shown

ENCODER_SIZES = (32, 64, 128)
SCALES = (1, 5, 7)
MOST_CLASSES = 100_000

_CIFAR_MEAN, _CIFAR_STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
_STL_MEAN, _STL_STD = (109.65, 107.1, 99.45), (68.85, 66.3, 68.85)
_IMAGENET_MEAN, _IMAGENET_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which images."""

    dataset: str = setting(
        "scenes",
        "Data set to learn from: scenes (built in), folder, places205, or of TensorFlow Datasets "
        "cifar10, cifar100, stl10, imagenet2012.",
    )
    data_dir: str = setting(
        "", "Directory of the data set; the built-in one needs none.", changeable=True
    )
    image_size: int = setting(
        32, "Side of the encoder's square input, in pixels.", choices=ENCODER_SIZES
    )
    max_bad_images: float = setting(
        0.05,
        "Largest share of images that may be undecodable before the run stops.",
        minimum=0,
        maximum=1,
        changeable=True,
    )


@dataclasses.dataclass(frozen=True)
class ViewConfig:
    """How an image becomes two views (paper section 3.4) and one evaluation view."""

    augmentation: str = setting(
        "basic",
        "none: both views are the evaluation view. basic: the paper's. strong: the authors' best "
        "ImageNet recipe.",
        choices=("none", "basic", "strong"),
    )
    flip: float = setting(
        0.5, "Probability of a horizontal flip, shared by both views.", minimum=0, maximum=1
    )
    translate: int = setting(
        0,
        "Largest shift in pixels, with reflection; used where crop_scale is 0,0.",
        minimum=0,
        maximum=1000,
    )
    translate_probability: float = setting(
        0.8, "Probability that a view is shifted.", minimum=0, maximum=1
    )
    crop_scale: tuple[float, ...] = setting(
        (0.3, 1.0),
        "Smallest and largest share of the image's area in a random resized crop; 0,0: no crop.",
        minimum=0,
        maximum=1,
        length=2,
    )
    crop_ratio: tuple[float, ...] = setting(
        (0.7, 1.4),
        "Smallest and largest ratio of width to height of a crop.",
        minimum=0.01,
        maximum=100,
        length=2,
    )
    jitter: tuple[float, ...] = setting(
        (0.4, 0.4, 0.4, 0.2),
        "Strength of the jitter of brightness, contrast, saturation and hue.",
        minimum=0,
        maximum=1,
        length=4,
    )
    jitter_probability: float = setting(
        0.8, "Probability that a view is jittered.", minimum=0, maximum=1
    )
    grayscale: float = setting(
        0.25, "Probability that a view is turned grey.", minimum=0, maximum=1
    )
    lighting: float = setting(
        0.0, "Standard deviation of PCA lighting noise; 0: none.", minimum=0, maximum=1
    )
    policy: str = setting(
        "",
        "AutoAugment-style policy applied to each view: autoaugment_imagenet, autoaugment_cifar10, "
        "autoaugment_svhn, randaugment(N,M), or a file POLICY.json.",
    )
    evaluation_resize: int = setting(
        32, "Shorter side of an image before the evaluation view's centre crop.", minimum=1
    )
    mean: tuple[float, ...] = setting(
        _CIFAR_MEAN,
        "Mean of red, green and blue, on the scale 0 to 255.",
        minimum=-1e6,
        maximum=1e6,
        length=3,
    )
    std: tuple[float, ...] = setting(
        _CIFAR_STD,
        "Standard deviation of red, green and blue.",
        minimum=1e-3,
        maximum=1e6,
        length=3,
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The encoder, its embeddings (paper section 3.6) and the NCE tasks (sections 3.3, 3.5)."""

    ndf: int = setting(128, "Channels of the encoder's first stage.", minimum=1, maximum=8192)
    n_rkhs: int = setting(
        1024, "Dimension D of f1 and of the embeddings.", minimum=1, maximum=65536
    )
    n_depth: int = setting(10, "Residual layers in each block.", minimum=1, maximum=1000)
    use_bn: bool = setting(False, "Batch normalization in every residual layer.")
    tasks: tuple[str, ...] = setting(
        ("1to5", "1to7", "5to5"), "Prediction tasks NtoM, with N and M among 1, 5 and 7."
    )
    score_clip: float = setting(
        20.0, "Soft limit c of the scores, c·tanh(s/c); 0: no clipping.", minimum=0
    )
    score_regularization: float = setting(4e-2, "Weight λ of the mean squared score.", minimum=0)
    mixture_components: int = setting(
        0,
        "Components of the mixture that takes the place of f1 as antecedent (paper section 3.7); "
        "0: no mixture.",
        minimum=0,
        maximum=64,
    )
    mixture_temperature: float = setting(
        1.0,
        "τ of the mixture: near 0 all components learn from every location, above about 10 the "
        "best alone.",
        minimum=1e-3,
        maximum=1e3,
    )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Adam with coupled L2, linear warm-up and milestones."""

    learning_rate: float = setting(2e-4, "Learning rate after warm-up.", minimum=0)
    beta_1: float = setting(0.8, "Adam's decay of the first moment.", minimum=0, maximum=0.99999)
    beta_2: float = setting(
        0.999, "Adam's decay of the second moment.", minimum=0, maximum=0.9999999
    )
    weight_decay: float = setting(1e-5, "L2 weight, added to the gradient.", minimum=0)
    warmup_steps: int = setting(500, "Steps of linear warm-up.", minimum=0, maximum=10**9)
    milestones: tuple[float, ...] = setting(
        (),
        "Epochs after which the learning rate is multiplied by decay_factor.",
        minimum=0,
        maximum=10**6,
    )
    decay_factor: float = setting(
        0.2, "Factor applied to the learning rate at each milestone.", minimum=0, maximum=1
    )


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Batches, length of the run, seed, and what is written how often."""

    batch_size: int = setting(
        128, "Images in a batch (two views of each).", minimum=2, maximum=10**6
    )
    epochs: float = setting(
        1.0, "Passes over the training images.", minimum=0, maximum=10**6, changeable=True
    )
    train_steps: int = setting(
        0,
        "Steps to train; 0: as many as --epochs makes.",
        minimum=0,
        maximum=10**12,
        changeable=True,
    )
    seed: int = setting(
        0, "Seed of weights, order, views and dropout.", minimum=0, maximum=2**31 - 1
    )
    deterministic: bool = setting(
        False, "Use only operations that give the same bits in every run; slower."
    )
    checkpoint_steps: int = setting(1000, "Steps between checkpoints.", minimum=1, changeable=True)
    checkpoint_minutes: float = setting(
        30.0,
        "Minutes after which a checkpoint is saved in any case; 0: by steps only.",
        minimum=0,
        changeable=True,
    )
    checkpoints_kept: int = setting(
        3, "How many of the newest checkpoints stay.", minimum=1, changeable=True
    )
    keep_every: int = setting(
        0,
        "Checkpoints of steps that this divides are saved and stay for good; 0: none.",
        minimum=0,
        changeable=True,
    )
    nonfinite: str = setting(
        "stop",
        "What to do when a loss or gradient is not finite. The weights stay as they were; stop: "
        "end the run with a report. skip: go on with the next batch.",
        choices=("stop", "skip"),
        changeable=True,
    )
    nonfinite_limit: int = setting(
        100,
        "How many steps --nonfinite=skip may leave out in the whole run.",
        minimum=0,
        changeable=True,
    )
    log_steps: int = setting(
        50, "Steps between rows of metrics.csv and TensorBoard.", minimum=1, changeable=True
    )
    profile_steps: tuple[int, ...] = setting(
        (),
        "First and last step of a profile for TensorBoard's Profile tab, such as 100,110.",
        minimum=1,
        changeable=True,
    )

    def total_steps(self, images: int) -> int:
        """Steps of a run on so many images; an epoch has whole batches only."""
        return self.train_steps or math.ceil(self.epochs * (images // self.batch_size))


@dataclasses.dataclass(frozen=True)
class DistributionConfig:
    """On which devices, in which precision and in which pieces a step is computed."""

    strategy: str = setting(
        "auto",
        "auto: a TPU if there is one, several workers if TF_CONFIG is set, all GPUs if there are "
        "several, else one device. mirrored: all devices of this machine. multi_worker: all "
        "machines of TF_CONFIG.",
        choices=("auto", "one_device", "mirrored", "multi_worker", "tpu"),
        changeable=True,
    )
    tpu: str = setting(
        "local", "Which TPU: local for that of this machine, or a name.", changeable=True
    )
    replicas: int = setting(
        0,
        "Split the CPU into this many devices, to try several replicas without GPUs; 0: no.",
        minimum=0,
        maximum=64,
        changeable=True,
    )
    batch_norm: str = setting(
        "per_replica",
        "per_replica: batch norm uses the statistics of each replica's own images. synchronized: "
        "those of the global batch.",
        choices=("per_replica", "synchronized"),
    )
    precision: str = setting(
        "float32",
        "Of the encoder in training. mixed_bfloat16, mixed_float16: weights, scores and losses "
        "stay float32; mixed_float16 scales the loss.",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
    )
    xla: str = setting(
        "auto",
        "Compile the step with XLA: on, off, or auto, which is on for GPUs and off for CPUs. A TPU "
        "always compiles.",
        choices=("auto", "on", "off"),
        changeable=True,
    )
    microbatch: int = setting(
        0,
        "The most images of a replica whose activations are held at a time: the replica's batch is "
        "cut into the fewest equal parts that have no more. The gradient is still that of the "
        "whole batch. 0: all.",
        minimum=0,
        maximum=10**6,
    )
    nce_block: str = setting(
        "auto",
        "Images of a replica whose scores are held at a time, or auto: all where the scores of a "
        "task take at most 50 MiB, else equal blocks that do.",
        changeable=True,
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run, in sections."""

    data: DataConfig = DataConfig()
    views: ViewConfig = ViewConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    distribution: DistributionConfig = DistributionConfig()


_CIFAR = {
    "image_size": 32, "evaluation_resize": 32, "translate": 4, "crop_scale": (0.0, 0.0),
    "mean": _CIFAR_MEAN, "std": _CIFAR_STD,
}  # fmt: skip
_PHOTOGRAPHS = {
    "image_size": 128, "evaluation_resize": 146, "jitter": (0.4, 0.4, 0.4, 0.1),
    "mean": _IMAGENET_MEAN, "std": _IMAGENET_STD,
}  # fmt: skip
# What a data set changes in the defaults above (the reference's recipes).
DATASET_DEFAULTS: dict[str, dict[str, Any]] = {
    "scenes": {"image_size": 32, "evaluation_resize": 32, "crop_scale": (0.5, 1.0)},
    "cifar10": _CIFAR,
    "cifar100": _CIFAR,
    "stl10": {"image_size": 64, "evaluation_resize": 70, "mean": _STL_MEAN, "std": _STL_STD},
    "imagenet2012": _PHOTOGRAPHS,
    "places205": _PHOTOGRAPHS,
    "folder": _PHOTOGRAPHS,
}  # fmt: skip
# What --augmentation=strong changes in the data set's recipe (the authors' best ImageNet runs).
# Their policy came from Fast AutoAugment; the one built in for ImageNet takes its place.
STRONG_DEFAULTS = {
    "crop_scale": (0.2, 0.9),
    "jitter_probability": 1.0,
    "lighting": 0.1,
    "policy": "autoaugment_imagenet",
}

SECTIONS = tuple(field.name for field in dataclasses.fields(Config))
_SECTION_CLASSES = (
    DataConfig, ViewConfig, ModelConfig, OptimizerConfig, TrainingConfig, DistributionConfig,
)  # fmt: skip
# Setting name -> (section name, dataclass field).
SETTINGS: dict[str, tuple[str, dataclasses.Field]] = {
    field.name: (section, field)
    for section, cls in zip(SECTIONS, _SECTION_CLASSES, strict=True)
    for field in dataclasses.fields(cls)
}


def make(settings: dict[str, Any]) -> Config:
    """The configuration with the given settings, and the data set's defaults for the others.

    Args:
        settings: setting name -> value, checked here against type and limits.

    Raises:
        UserError: for an unknown setting, a wrong type, a value outside its limits, or settings
            that contradict each other.
    """
    dataset = settings.get("dataset", DataConfig.dataset)
    _check_dataset(dataset)
    strong = STRONG_DEFAULTS if settings.get("augmentation") == "strong" else {}
    defaults = DATASET_DEFAULTS[dataset]
    values = {**defaults, **strong, **settings}
    # The evaluation view keeps its margin when only the encoder's size is changed.
    if "evaluation_resize" not in settings and values["image_size"] in ENCODER_SIZES:
        margin = defaults["evaluation_resize"] / defaults["image_size"]
        values["evaluation_resize"] = round(margin * values["image_size"])
    return update(Config(), values)


def update(config: Config, settings: dict[str, Any]) -> Config:
    """The same configuration with some settings replaced, checked."""
    config = replaced(config, settings)
    _check_together(config)
    return config


def replaced(config: Config, settings: dict[str, Any]) -> Config:
    """The same with each setting checked by itself; together they may contradict each other."""
    by_section: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in settings.items():
        if name not in SETTINGS:
            raise UserError(f"{name}: no such setting. Known: {', '.join(SETTINGS)}.")
        section, field = SETTINGS[name]
        by_section[section][name] = checked(field, value)
    return dataclasses.replace(
        config,
        **{
            section: dataclasses.replace(getattr(config, section), **values)
            for section, values in by_section.items()
        },
    )


def parse_task(task: str) -> tuple[int, int]:
    """Scales (n, m) of a task named 'NtoM' (paper section 3.5, n-to-m infomax costs)."""
    antecedent, separator, consequent = task.partition("to")
    names = [str(scale) for scale in SCALES]
    if not separator or antecedent not in names or consequent not in names:
        raise UserError(
            f"--tasks: expected tasks NtoM with N and M among {', '.join(names)}, "
            f"such as 1to5,1to7,5to5. Received: {task!r:.80}."
        )
    return int(antecedent), int(consequent)


def top_channels(image_size: int, ndf: int) -> int:
    """Channels of f7 and f5: 4·ndf for size 32, 8·ndf for 64 and 128."""
    return (4 if image_size == 32 else 8) * ndf


def _check_dataset(name: str) -> None:
    """Refuses unknown names, which in a config.json could also be paths to somewhere else."""
    if name not in DATASET_DEFAULTS:
        raise UserError(
            f"--dataset: expected one of {', '.join(DATASET_DEFAULTS)}. Received: {name!r:.80}."
        )


def _check_together(config: Config) -> None:
    """Checks that need more than one setting, or what is defined after the settings."""
    _check_dataset(config.data.dataset)
    tasks = config.model.tasks
    if not tasks or len(set(tasks)) != len(tasks):
        raise UserError(
            f"--tasks: expected at least one task, each once. Received: {','.join(tasks)!r:.200}."
        )
    for task in tasks:
        parse_task(task)
    if config.model.mixture_components and "1to7" not in tasks:
        raise UserError(
            "--mixture_components: expected 1to7 among --tasks, in which components share the "
            f"locations of f7. Received: {','.join(tasks)}."
        )
    for name in ("crop_scale", "crop_ratio"):
        low, high = getattr(config.views, name)
        if low > high:
            raise UserError(f"--{name}: expected smallest,largest. Received: {low},{high}.")
    if config.views.crop_scale[0] == 0 < config.views.crop_scale[1]:
        raise UserError(
            "--crop_scale: expected a smallest share above 0, or 0,0 for no crop. "
            f"Received: 0,{config.views.crop_scale[1]}."
        )
    least = top_channels(config.data.image_size, config.model.ndf)
    if config.model.n_rkhs < least:
        raise UserError(
            f"--n_rkhs: expected at least {least}, the channels below the top layer for "
            f"--image_size={config.data.image_size} --ndf={config.model.ndf}. "
            f"Received: {config.model.n_rkhs}."
        )
    if config.views.evaluation_resize < config.data.image_size:
        raise UserError(
            f"--evaluation_resize: expected at least the --image_size={config.data.image_size} "
            f"that is cut from its centre. Received: {config.views.evaluation_resize}."
        )
    _check_pieces(config)


def _check_pieces(config: Config) -> None:
    """Checks of how a step is divided."""
    pieces, profile = config.distribution, config.training.profile_steps
    block = pieces.nce_block
    if block != "auto" and not re.fullmatch("[1-9][0-9]{0,5}", block):
        raise UserError(
            f"--nce_block: expected auto, or a number of images from 1. Received: {block!r:.80}."
        )
    if pieces.microbatch and pieces.batch_norm == "synchronized":
        raise UserError(
            "--microbatch: expected 0 with --batch_norm=synchronized, whose statistics are those "
            f"of all images at once. Received: {pieces.microbatch}."
        )
    if profile and not (len(profile) == 2 and profile[0] <= profile[1]):
        raise UserError(
            "--profile_steps: expected FIRST,LAST with LAST not before FIRST, such as 100,110. "
            f"Received: {shown(profile)}."
        )


def settings_of(config: Config) -> dict[str, Any]:
    """Setting name -> value, without sections."""
    return {
        name: getattr(getattr(config, section), name) for name, (section, _) in SETTINGS.items()
    }
