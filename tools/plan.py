"""Says what a configuration costs on a machine, before it is rented.

Usage:
    python tools/plan.py --flagfile=configs/imagenet.cfg --hardware=v100x4
    python tools/plan.py --flagfile=configs/imagenet.cfg --hardware=tpu_v5ex8 --microbatch=30
    python tools/plan.py --flagfile=configs/cifar10_reference.cfg --hardware=a100x1 --images=50000

--hardware is NAMExCOUNT; a TPU counts in chips, and a v3 chip is two devices. A folder's images are
counted, or given by --images. Printed are parameters, arithmetic, memory on each device and what
would fit, bytes that devices exchange, and hours for the whole schedule, with the assumptions
behind them.
"""

import math
import pathlib
import re
import sys
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from absl import flags

from amdim_tf import cli_flags
from amdim_tf import config as config_lib
from amdim_tf.config import Config, parse_task
from amdim_tf.errors import UserError


class Device(NamedTuple):
    """A device as its vendor describes it: 1e12 operations a second, and 2**30 bytes.

    TensorFlow multiplies float32 matrices on matrix units where they take it (TF32 on GPUs since
    the A100, bfloat16 on TPUs); a V100's do not.
    """

    float32: float
    half: float
    memory: float
    float32_units: str = "matrix"
    halves: tuple[str, ...] = ("mixed_float16", "mixed_bfloat16")  # what it has units for
    parts: int = 1  # of which one such device is, in what is counted

    def units_for(self, precision: str) -> str:
        """Which units compute in a precision: matrix or plain."""
        return self.float32_units if precision == "float32" else "matrix"


_FLOAT16, _BFLOAT16 = ("mixed_float16",), ("mixed_bfloat16",)
DEVICES = {
    "v100": Device(15.7, 125.0, 16, "plain", _FLOAT16),
    "v100_32gb": Device(15.7, 125.0, 32, "plain", _FLOAT16),
    "a100": Device(156.0, 312.0, 40),
    "h100": Device(494.0, 989.0, 80),
    "tpu_v3": Device(61.5, 61.5, 16, halves=_BFLOAT16, parts=2),  # a core, with its own weights
    "tpu_v4": Device(275.0, 275.0, 32, halves=_BFLOAT16),
    "tpu_v5e": Device(197.0, 197.0, 16, halves=_BFLOAT16),
}
# Shares of the peak that a step is assumed to reach. Matrix units: what makes the paper's 50 epochs
# of the small ImageNet model take its 2 days on 4 V100s, on which the authors' code uses mixed
# precision; in float32 it would have had 82% of the peak. Plain units: an assumption.
UTILIZATION = {"plain": 0.60, "matrix": 0.10}
_REASONS = {"plain": "a guess", "matrix": "what V100s reached in the paper's run"}
USABLE_MEMORY = 0.9
IMAGES = {
    "scenes": 20_000, "cifar10": 50_000, "cifar100": 50_000, "stl10": 105_000,
    "imagenet2012": 1_281_167, "places205": 2_448_873,
}  # fmt: skip
# A layer's tensors that its gradient needs: before and after the ReLU, and its output.
_KEPT_TENSORS = 3
# Score-sized tensors that exist at a time in one block of the NCE.
_SCORE_TENSORS = 6


class Plan(NamedTuple):
    """Figures of a configuration on a machine; bytes and operations, not thousands of them."""

    parameters: int
    step_flops: float
    weights: int
    activations: int
    embeddings: int
    scores: int
    capacity: float
    fitting: int  # images of a replica at a time; 0: none
    gathered: int
    reduced: int
    steps: int
    hours: float

    @property
    def memory(self) -> int:
        """Bytes on each device."""
        return self.weights + self.activations + self.embeddings + self.scores


def parse_hardware(text: str) -> tuple[Device, int]:
    """The device and how many of them NAMExCOUNT means; NAME alone is one."""
    match = re.fullmatch(r"(\w+?)(?:x([0-9]{1,6}))?", text.lower())
    count = int(match[2] or 1) if match else 0
    if not match or match[1] not in DEVICES or not 0 < count <= 10**5:
        raise UserError(
            f"--hardware: expected NAMExCOUNT with NAME among {', '.join(DEVICES)}, such as "
            f"v100x8. Received: {text!r:.80}."
        )
    device = DEVICES[match[1]]
    return device, count * device.parts


def make_plan(config: Config, device: Device, count: int, images: int) -> Plan:
    """The figures; `images` is the size of the data set."""
    import keras

    from amdim_tf import blocked_nce, costs, distribution, microbatches
    from amdim_tf.model import AMDIM

    distribution.check_batch(config, count)
    precision = config.distribution.precision
    if precision not in ("float32", *device.halves):
        raise UserError(
            f"--precision: expected float32 or {' or '.join(device.halves)}, which the hardware "
            f"has units for. Received: {precision}."
        )
    if config.training.batch_size > images:
        raise UserError(
            f"--batch_size: expected at most {images}, the number of training images. Received: "
            f"{config.training.batch_size}."
        )
    with keras.StatelessScope(initialize_variables=False):  # shapes, without the weights
        model = AMDIM(config)
    settings, batch = config.model, config.training.batch_size
    share = batch // count
    half = precision != "float32"
    width = 2 if half else 4
    parameters = sum(math.prod(v.shape) for v in model.variables)
    flops = costs.step_flops(model, batch)
    per_image = 2 * width * _KEPT_TENSORS * costs.forward_elements(model)
    at_a_time = microbatches.size_of(share, config.distribution.microbatch or share)
    antecedents, consequents = map(set, zip(*map(parse_task, settings.tasks), strict=True))
    local = 2 * sum(n * n for n in model.scales) * settings.n_rkhs  # numbers of one image pair
    components = max(settings.mixture_components, 1)
    vectors = sum(components if n == 1 else 1 for n in antecedents)  # that an image sends, per view
    gathered = 4 * 2 * vectors * settings.n_rkhs * batch if count > 1 else 0
    embeddings = 2 * (width * local * share + gathered)  # with their gradient
    # A replica scores the antecedents of all images with the consequents of its own.
    shape = [share, max(consequents) ** 2, settings.n_rkhs]
    rows = blocked_nce.block_rows(config.distribution.nce_block, batch, shape, components)
    scores = _SCORE_TENSORS * 4 * rows * components * shape[0] * shape[1]
    weights = 16 * parameters  # weight, gradient, and Adam's two moments
    summed = weights + 4 * parameters  # and the gradient's sum over microbatches
    capacity = USABLE_MEMORY * device.memory * 2**30
    room = capacity - summed - embeddings - scores
    # Batch norm needs two images.
    divisors = [n for n in range(2, share) if share % n == 0 and n * per_image <= room]
    steps = config.training.total_steps(images)
    # A microbatch is embedded once more than a plain batch: 4 parts instead of 3.
    again = 4 / 3 if at_a_time < share else 1
    flops *= again
    peak = device.half if half else device.float32
    utilization = UTILIZATION[device.units_for(precision)]
    seconds = steps * flops / (peak * 1e12 * utilization * count)
    return Plan(
        parameters, flops, summed if at_a_time < share else weights, per_image * at_a_time,
        embeddings, scores, capacity,
        divisors[-1] if divisors else 0,
        gathered,
        4 * parameters if count > 1 else 0,
        steps, seconds / 3600,
    )  # fmt: skip


def describe(plan: Plan, config: Config, device: Device, count: int) -> list[str]:
    """The plan as lines of text."""

    def gib(count) -> str:
        return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"

    share = config.training.batch_size // count
    memory, hours = gib(plan.memory), _shown_time(plan.hours)
    if plan.memory <= plan.capacity:
        verdict = "it fits"
    elif plan.fitting:
        memory = "more than " + memory if memory == gib(plan.capacity) else memory
        verdict = f"it does NOT fit; --microbatch={plan.fitting} would"
        hours += f"; {_shown_time(plan.hours * 4 / 3)} in microbatches"
        if config.distribution.batch_norm == "synchronized":
            verdict += " with --batch_norm=per_replica"
    else:
        verdict = "it does NOT fit with any microbatch; use more devices, or a smaller model"
    units = device.units_for(config.distribution.precision)
    return [
        f"parameters            {plan.parameters:,}, without classifiers",
        f"arithmetic            {plan.step_flops / 1e12:.2f} TFLOP a step of "
        f"{config.training.batch_size} image pairs, {share} on each device",
        f"memory of each device {memory} of {gib(plan.capacity)}: {verdict}",
        f"  weights, optimizer  {gib(plan.weights)}",
        f"  activations         {gib(plan.activations)}",
        f"  embeddings          {gib(plan.embeddings)}",
        f"  scores              {gib(plan.scores)}",
        f"all-gather            {gib(plan.gathered)} a step, and as much to sum its gradient",
        f"all-reduce            {gib(plan.reduced)} a step, of gradients",
        f"schedule              {plan.steps:,} steps, {hours}",
        f"Assumed: {100 * UTILIZATION[units]:.0f}% of the peak of {units} units in "
        f"{config.distribution.precision}, {_REASONS[units]};",
        "arithmetic alone counts, with communication, input and the start of each operation hidden",
        "behind it, which those of small models and batches are not;",
        f"{100 * USABLE_MEMORY:.0f}% of memory usable,",
        f"{_KEPT_TENSORS} tensors kept of each layer, {_SCORE_TENSORS} the size of the scores.",
    ]


def _shown_time(hours: float) -> str:
    """Hours and days; of less than an hour, minutes or seconds."""
    for most, unit, factor in ((1 / 60, "seconds", 3600), (1, "minutes", 60)):
        if hours < most:
            return f"{hours * factor:.3g} {unit}"
    return f"{hours:.3g} hours ({hours / 24:.2g} days)"


def main() -> None:
    """Prints the plan."""
    config = config_lib.make(cli_flags.given_settings())
    device, count = parse_hardware(cli_flags.FLAGS.hardware)
    cli_flags.import_tensorflow_quietly()
    images = cli_flags.FLAGS.images or _count_images(config)
    plan = make_plan(config, device, count, images)
    print(f"{config.data.dataset} on {cli_flags.FLAGS.hardware}")
    print("\n".join(describe(plan, config, device, count)))


def _count_images(config: Config) -> int:
    """Training images of a data set that is known, or of a folder that is here."""
    if config.data.dataset in IMAGES:
        return IMAGES[config.data.dataset]
    if not config.data.data_dir:
        raise UserError(
            f"--images: expected the number of training images of {config.data.dataset}, or "
            "--data_dir to count them. Received: neither."
        )
    from amdim_tf import sources

    return len(sources.load(config.data, "train", files_as_files=True))


if __name__ == "__main__":
    cli_flags.define_config_flags()
    flags.adopt_module_key_flags(cli_flags)
    flags.DEFINE_string(
        "hardware", "v100x4", f"NAMExCOUNT, such as v100x8; names are {', '.join(DEVICES)}."
    )
    flags.DEFINE_integer(
        "images",
        0,
        "Training images, where neither the data set nor --data_dir tells.",
        lower_bound=0,
        upper_bound=10**12,
    )
    cli_flags.run(main)
