"""Runs as `amdim_tf.train` and `amdim_tf.evaluate` left them, checked, for report.py."""

import json
import pathlib
import reprlib
from typing import Any, NamedTuple

from amdim_tf import config as config_lib
from amdim_tf import config_file, safe_files
from amdim_tf.errors import UserError

# The most that is read of a file: what a run writes is far smaller.
_MOST_BYTES = 50_000_000
_MOST_IMAGES = 10**12
PROBES = ("linear", "mlp", "knn", "bag_of_features")
MEASURES = ("adjusted_rand_index", "iou")


class Run(NamedTuple):
    """What a model_dir holds."""

    directory: pathlib.Path
    label: str  # its last name, or the whole path where another run has the same one
    settings: dict[str, Any]
    evaluations: dict[str, dict]  # by data set


def read_runs(directories: list[pathlib.Path]) -> list[Run]:
    """Reads runs, each once, and gives each a label of its own."""
    directories = list({directory.resolve(): directory for directory in directories}.values())
    names = [directory.absolute().name for directory in directories]
    return [
        _read_run(directory, name if names.count(name) == 1 else str(directory))
        for directory, name in zip(directories, names, strict=True)
    ]


def _read_run(directory: pathlib.Path, label: str) -> Run:
    """Reads config.json and evaluation/*.json of a run."""
    config, _ = config_file.load(config_file.path_in(directory))
    evaluations = {}
    for path in sorted((directory / "evaluation").glob("*.json")):
        evaluations[path.stem] = _read_json(path)
        _check_results(evaluations[path.stem], path)
    return Run(directory, label, config_lib.settings_of(config), evaluations)


def _read_json(path: pathlib.Path):
    try:
        return json.loads(safe_files.read_limited(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: expected JSON. Received: {error}. Evaluate the run again."
        ) from None


def _check_results(found, path: pathlib.Path) -> None:
    """Raises a UserError unless what the report shows of an evaluation is there and of its kind.

    Args:
        found: the JSON document.
        path: of its file, for the error.
    """

    def demand(holds: bool, what: str, received) -> None:
        if not holds:
            raise UserError(
                f"{path}: expected {what}, as amdim_tf.evaluate writes it. Received: "
                f"{reprlib.repr(received)}. Evaluate the run again."
            )

    def table(holder: dict, name: str) -> dict:
        value = holder.get(name, {})
        demand(isinstance(value, dict), f"an object {name!r}", value)
        return value

    def numbers(holder: dict, names: tuple[str, ...], least: int) -> None:
        for name in names:
            value = holder.get(name)
            demand(_is_number(value, least, 1), f"{name!r} from {least} to 1", value)

    demand(isinstance(found, dict) and {"dataset", "step"} <= set(found), "results", found)
    demand(type(found["step"]) is int, "a whole number 'step'", found["step"])
    images = found.get("test_images", 0)
    demand(type(images) is int, "a whole number 'test_images'", images)
    demand(isinstance(found.get("command", ""), str), "text 'command'", found.get("command"))
    earlier = found.get("earlier_commands", [])
    texts = isinstance(earlier, list) and all(isinstance(command, str) for command in earlier)
    demand(texts, "texts 'earlier_commands'", earlier)
    baselines = table(found, "baselines")
    for results in (found, *(table(baselines, name) for name in baselines)):
        for probe in PROBES:
            if probe in results:
                numbers(table(results, probe), ("accuracy",), 0)
        few = table(results, "few_labels")
        if "10%" in few:
            numbers(table(few, "10%"), ("mean", "std"), 0)
    regions = table(table(found, "segmentation"), "7x7")
    for method in regions:
        numbers(table(regions, method), MEASURES, -1)
    confusion = table(found, "linear").get("confusion", [])
    demand(_is_confusion(confusion, found.get("classes")), "counts 'confusion' of all pairs of "
           "'classes'", confusion)  # fmt: skip


def _is_number(value, least: float, most: float) -> bool:
    """Whether a value of JSON is a number in a range; true, false and NaN are not."""
    return type(value) in (int, float) and least <= value <= most


def _is_confusion(confusion, classes) -> bool:
    """Whether there is no confusion matrix, or one of K×K counts with K names."""
    if confusion == []:
        return True
    return (
        isinstance(confusion, list)
        and isinstance(classes, list)
        and all(isinstance(name, str) for name in classes)
        and len(confusion) == len(classes)
        and all(isinstance(row, list) and len(row) == len(classes) for row in confusion)
        and all(_is_number(count, 0, _MOST_IMAGES) for row in confusion for count in row)
    )
