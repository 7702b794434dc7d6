"""What an evaluation leaves: a table on the terminal, JSON, a history, figures, TensorBoard."""

from __future__ import annotations

import csv
import io
import json
import pathlib
from typing import Any

import tensorflow as tf

from amdim_tf import charts, directory_locks, features, safe_files, segmentation_probe
from amdim_tf.errors import UserError, tensorflow_reason, warn

_MOST_TABLE_BYTES = 2**28
# What results of one file have in common, beside what `conditions_of` tells.
_SHARED = ("weights_sha256", "step", "seed", "trained_on")
_OF_CLASSIFIERS = ("classes", "train_images", "test_images")
_SIDE = features.PIXELS_SIDE
_DESCRIBED = {"untrained": "untrained encoder", "pixels": f"raw pixels, {_SIDE}x{_SIDE}"}


def write(model_dir, results: dict[str, Any]) -> None:
    """Writes MODEL_DIR/evaluation: DATASET.json, DATASET_history.csv and figures; then TensorBoard.

    Args:
        model_dir: of the run.
        results: as evaluation.evaluate returns them.
    """
    directory = pathlib.Path(model_dir) / "evaluation"
    directory.mkdir(parents=True, exist_ok=True)
    with directory_locks.locked(directory, wait=True):  # evaluations at once wait for each other
        _write(pathlib.Path(model_dir), directory, results)


def _write(model_dir: pathlib.Path, directory: pathlib.Path, results: dict[str, Any]) -> None:
    dataset = results["dataset"]
    path = directory / f"{dataset}.json"
    document = json.dumps(_with_earlier(results, path), indent=2) + "\n"
    safe_files.write_whole(path, document.encode())
    history = comparable(_extend_history(directory / f"{dataset}_history.csv", results), results)
    if any(row.keys() - charts.PLACES for row in history):
        charts.learning_curve(history, directory / f"{dataset}_curve.png")
    confusion = results.get("linear", results.get("mlp", {})).get("confusion")
    picture = directory / f"{dataset}_confusion.png" if confusion else None
    if picture:
        title = f"{'linear' if 'linear' in results else 'mlp'}, {dataset}, step {results['step']}"
        charts.confusion_matrix(confusion, results["classes"], title, picture)
    logs = model_dir / "logs" / "evaluation"
    try:
        _log(logs, results, picture)
    except tf.errors.OpError as error:
        raise UserError(
            f"{logs}: expected a directory to write TensorBoard's events into. Received: "
            f"{tensorflow_reason(error)}. The results are in {path}."
        ) from None
    print(f"Wrote {path}.")


def _with_earlier(results: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """The results, and of those in the file what they do not measure anew.

    Only results of the same weights, images and protocol are kept; their commands are too.
    """
    try:
        earlier = json.loads(safe_files.read_limited(path, _MOST_TABLE_BYTES))
        alike = all(earlier.get(name) == results.get(name) for name in _SHARED)
        for name in _OF_CLASSIFIERS:  # empty, or not there, where no probe classifies
            alike &= earlier.get(name) == results.get(name) or not (
                earlier.get(name) and results.get(name)
            )
        alike &= _same_images(earlier.get("images_sha256"), results.get("images_sha256"))
        if not alike or conditions_of(earlier) != conditions_of(results):
            return results
        baselines = {
            name: {**earlier["baselines"].get(name, {}), **results["baselines"].get(name, {})}
            for name in {**earlier["baselines"], **results["baselines"]}
        }
        commands = dict.fromkeys([*earlier.get("earlier_commands", []), earlier["command"]])
        commands.pop(results["command"], None)
        merged = {**earlier, **results, "baselines": baselines, "earlier_commands": [*commands]}
        return {**merged, "classes": results["classes"] or earlier["classes"]}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return results  # there is none, or none of ours


def _same_images(earlier: list[str] | None, now: list[str] | None) -> bool:
    """Whether digests of the training and the test images agree, where both are known."""
    pairs = zip(earlier or ["", ""], now or ["", ""], strict=True)
    return all(one == other or not one or not other for one, other in pairs)


def accuracies(found: dict[str, Any]) -> dict[str, float]:
    """{what: accuracy} of one set of features, in the order of the table."""
    shown = {
        name: found[name]["accuracy"]
        for name in ("linear", "bag_of_features", "linear_adam", "mlp", "knn")
        if name in found
    }
    few = found.get("few_labels", {})
    return shown | {f"few_labels {setting}": value["mean"] for setting, value in few.items()}


def print_table(results: dict[str, Any]) -> None:
    """Prints what was measured: accuracies, and agreement with masks."""
    if accuracies(results):
        _print_accuracies(results)
    if "segmentation" in results:
        _print_segmentation(results)


def _print_segmentation(results: dict[str, Any]) -> None:
    """Prints a row per way to divide images and a column per measure and resolution."""
    found = results["segmentation"]
    columns = [
        (measure, resolution)
        for measure in segmentation_probe.MEASURES
        for resolution in segmentation_probe.RESOLUTIONS
    ]
    print(
        f"\nSegmentation of {found['images']} test images of {results['dataset']} into "
        f"{found['components']} regions (step {results['step']})."
    )
    if found["left_out"]:
        print(f"{found['left_out']} more show a single segment, and are left out.")
    headings = "".join(f"{text:>24}" for text in segmentation_probe.MEASURES.values())
    print(" " * 22 + headings)
    print(" " * 22 + "".join(f"{resolution:>12}" for _, resolution in columns))
    for method, described in segmentation_probe.METHODS.items():
        cells = (found[resolution][method][measure] for measure, resolution in columns)
        print(f"{described:<22}" + "".join(f"{cell:>12.3f}" for cell in cells))


def _print_accuracies(results: dict[str, Any]) -> None:
    """Prints a row per set of features and a column per probe, in percent."""
    rows = {f"learned features (step {results['step']})": results}
    rows |= {_DESCRIBED[name]: found for name, found in results["baselines"].items()}
    columns = list(accuracies(results))
    widths = [max(len(column) + 2, 13) for column in columns]
    print(
        f"\nAccuracy in % on {results['test_images']} test images of {results['dataset']} "
        f"({len(results['classes'])} classes); {results['train_images']} training images."
    )
    print(" " * 30 + "".join(f"{c:>{w}}" for c, w in zip(columns, widths, strict=True)))
    for described, found in rows.items():
        cells = [_cell(found, column) for column in columns]
        print(
            f"{described:<30}"
            + "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True))
        )


def _cell(found: dict[str, Any], column: str) -> str:
    """An accuracy in percent; a mean over draws with its standard deviation."""
    share = accuracies(found).get(column)
    if share is None:  # a bag of features has no counterpart among the baselines
        return "-"
    if column.startswith("few_labels "):
        spread = found["few_labels"][column.removeprefix("few_labels ")]["std"]
        return f"{100 * share:.1f} ± {100 * spread:.1f}"
    return f"{100 * share:.1f}"


def conditions_of(results: dict[str, Any]) -> str:
    """What figures of different steps must share to be compared: images and protocol."""
    words = [results.get("data_dir", ""), results.get("probe_training", "cached")]
    if results.get("probe_epochs"):
        words[-1] += f" for {results['probe_epochs']:g} epochs"
    if results.get("recalibrated_on"):
        words.append(f"recalibrated on {results['recalibrated_on']}")
    return ", ".join(word for word in words if word)


def comparable(history: list[dict], results: dict[str, Any]) -> list[dict[str, float]]:
    """The numbers of a history's rows that were measured as these results were.

    Rows that do not tell are taken to be: histories had no conditions once.
    """
    return [
        {name: value for name, value in row.items() if name != "conditions"}
        for row in history
        if row["conditions"] in ("", conditions_of(results))
    ]


def _extend_history(path: pathlib.Path, results: dict[str, Any]) -> list[dict]:
    """Adds the figures of this step to the history, a row per step and conditions; all rows."""
    there = read_history(path)
    if "segmentation" in results and not accuracies(results):  # the history has no column for it
        return there
    _keep_damaged(path, len(there))
    rows = {(row["conditions"], row["step"]): row for row in there}
    place = {"step": results["step"], "conditions": conditions_of(results)}
    key = (place["conditions"], place["step"])
    hours = results.get("training_hours")
    measured = accuracies(results) if hours is None else {"hours": hours, **accuracies(results)}
    # What an earlier evaluation of the same step measured beside this one's probes stays.
    rows[key] = {**place, **rows.get(key, {}), **measured}
    ordered = [rows[key] for key in sorted(rows)]
    names = list(dict.fromkeys(name for row in ordered for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(ordered)
    safe_files.write_whole(path, text.getvalue().encode(errors="surrogateescape"))
    return ordered


def _keep_damaged(path: pathlib.Path, rows: int) -> None:
    """Copies a history with anything but these rows aside, before it is written anew."""
    if not path.exists():
        return
    contents = safe_files.read_limited(path, _MOST_TABLE_BYTES)
    text = io.StringIO(contents.decode(errors="surrogateescape"), newline="")
    records = [record for record in csv.reader(text) if record]
    if len(records) != rows + 1 or "step" not in records[0]:
        aside = path.with_name(path.name + ".damaged")
        safe_files.write_whole(aside, contents)
        warn(
            f"{path}: expected a head and rows of numbers. Received: {len(records)} lines with "
            f"{rows} such rows; only these are kept. As it was, it is {aside}."
        )


def read_history(path: pathlib.Path) -> list[dict]:
    """The rows of a history; what cannot be read as finite numbers is left out."""
    rows = []
    for row in read_table(path):
        conditions = row.pop("conditions", None) or ""
        try:
            step = int(row["step"])
            numbers = {name: float(value) for name, value in row.items() if value}
        except (TypeError, ValueError, KeyError):
            continue
        if all(abs(number) < charts.MOST_SHOWN for number in numbers.values()):
            rows.append({**numbers, "step": step, "conditions": conditions})
    return rows


def read_table(path: pathlib.Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a head, if there is one.

    Raises:
        UserError: where it is no table.
    """
    try:
        text = safe_files.read_limited(path, _MOST_TABLE_BYTES).decode(errors="surrogateescape")
        return list(csv.DictReader(io.StringIO(text, newline="")))
    except FileNotFoundError:
        return []
    except (OSError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{path}: expected rows of numbers, separated by commas. Received: {reason}. "
            "Move the file away."
        ) from None


def _log(directory: pathlib.Path, results: dict[str, Any], picture: pathlib.Path | None) -> None:
    """Accuracies and a confusion matrix, if any, for TensorBoard, at the checkpoint's step."""
    with tf.summary.create_file_writer(str(directory)).as_default(step=results["step"]):
        for name, value in accuracies(results).items():
            tf.summary.scalar(f"{results['dataset']}/{name.replace(' ', '_')}", value)
        for resolution in segmentation_probe.RESOLUTIONS if "segmentation" in results else ():
            for method, measures in results["segmentation"][resolution].items():
                for measure, value in measures.items():
                    tag = f"{results['dataset']}/segmentation_{resolution}/{measure}/{method}"
                    tf.summary.scalar(tag, value)
        if picture:
            pixels = tf.io.decode_png(picture.read_bytes(), channels=3)
            tf.summary.image(f"{results['dataset']}/confusion", pixels[None])
