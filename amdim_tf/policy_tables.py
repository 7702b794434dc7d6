"""AutoAugment-style policies as data: what one is, the published ones, and policy files.

A policy is a list of sub-policies; a sub-policy is a list of steps (operation, probability, level),
done one after the other, each with its probability. Each image gets sub-policies drawn uniformly:
one in AutoAugment and Fast AutoAugment, n of a single step each in RandAugment.

A level between 0 and 1 runs through the operation's range in AutoAugment's table of ranges
(arXiv 1805.09501, appendix A), from its low end to its high end (`RANGES`, `parameter`):

- shear 0..0.3 pixels per pixel, translate 0..150/331 of the side, rotate 0..30 degrees. AutoAugment
  gives them a random sign, and so does `policies.draw`.
- solarize 0..256: the threshold, so that level 0 inverts everything and level 1 nothing.
- posterize 4..8: the bits that are kept, to the nearest whole number; level 1 changes nothing.
- contrast, color, brightness, sharpness 0.1..1.9: Pillow's factor; level 0.5 changes nothing.
- cutout 0..0.2: the square's side, in sides of the image. It is Fast AutoAugment's; AutoAugment's
  60/331 = 0.181 is within it, and none of the tables below uses cutout.
- autocontrast, invert, equalize and identity have no parameter: their level means nothing.

The published lists number their levels in other ways, and are converted to this one:

- AutoAugment's tables have ten bins, 0..9, uniform from one end of the range to the other. As in
  the code that the authors released, a higher bin of solarize and posterize means a lower threshold
  and fewer bits, that is a stronger change: their level is 1 - bin/9; elsewhere it is bin/9.
- RandAugment has one strength m for all operations, here 0..30 as in torchvision: m/30 is the level
  of the signed operations; solarize and posterize have 1 - m/30; the four factors are 1 ± 0.9·m/30,
  either with probability 1/2. (The code its authors released has a top of 10 instead, and lets
  solarize and posterize grow weaker as m grows.)
- Fast AutoAugment (arXiv 1905.00397): see tools/convert_policy.py.

TensorFlow is not imported here, so that mistakes in a policy are answered at once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
import reprlib
import typing
from collections.abc import Collection
from typing import Any

from amdim_tf import safe_files
from amdim_tf.errors import UserError

FORMAT = "amdim_tf policy"
VERSION = 1
MAX_BYTES = 1_000_000  # of a policy file; the longest published lists take a twentieth
MAX_SUB_POLICIES = 10_000
MAX_STEPS = 10  # of a sub-policy
MAX_PICKS = 10

# Operation -> its parameter at level 0 and at level 1.
RANGES = {
    "shear_x": (0.0, 0.3),
    "shear_y": (0.0, 0.3),
    "translate_x": (0.0, 150 / 331),
    "translate_y": (0.0, 150 / 331),
    "rotate": (0.0, 30.0),
    "solarize": (0.0, 256.0),
    "posterize": (4.0, 8.0),
    "contrast": (0.1, 1.9),
    "color": (0.1, 1.9),
    "brightness": (0.1, 1.9),
    "sharpness": (0.1, 1.9),
    "cutout": (0.0, 0.2),
}
OPERATIONS = ("identity", "autocontrast", "invert", "equalize", *RANGES)
SIGNED = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
ENHANCEMENTS = ("contrast", "color", "brightness", "sharpness")


class Step(typing.NamedTuple):
    """One operation of a sub-policy."""

    operation: str  # one of OPERATIONS
    probability: float  # 0..1
    level: float  # 0..1


@dataclasses.dataclass(frozen=True)
class Policy:
    """Sub-policies, and how many of them each image gets, drawn uniformly with replacement."""

    sub_policies: tuple[tuple[Step, ...], ...]
    picks: int = 1


def parameter(operation: str, level: float) -> float:
    """The operation's parameter at a level of 0..1, without a sign; 0 where it has none."""
    low, high = RANGES.get(operation, (0.0, 0.0))
    value = low + level * (high - low)
    return float(math.floor(value + 0.5)) if operation == "posterize" else value


# The 25 sub-policies of each data set in AutoAugment's appendix: operation, probability, bin 0..9.
_AUTOAUGMENT = {
    "autoaugment_imagenet": (
        (("posterize", 0.4, 8), ("rotate", 0.6, 9)),
        (("solarize", 0.6, 5), ("autocontrast", 0.6, 5)),
        (("equalize", 0.8, 8), ("equalize", 0.6, 3)),
        (("posterize", 0.6, 7), ("posterize", 0.6, 6)),
        (("equalize", 0.4, 7), ("solarize", 0.2, 4)),
        (("equalize", 0.4, 4), ("rotate", 0.8, 8)),
        (("solarize", 0.6, 3), ("equalize", 0.6, 7)),
        (("posterize", 0.8, 5), ("equalize", 1.0, 2)),
        (("rotate", 0.2, 3), ("solarize", 0.6, 8)),
        (("equalize", 0.6, 8), ("posterize", 0.4, 6)),
        (("rotate", 0.8, 8), ("color", 0.4, 0)),
        (("rotate", 0.4, 9), ("equalize", 0.6, 2)),
        (("equalize", 0.0, 7), ("equalize", 0.8, 8)),
        (("invert", 0.6, 4), ("equalize", 1.0, 8)),
        (("color", 0.6, 4), ("contrast", 1.0, 8)),
        (("rotate", 0.8, 8), ("color", 1.0, 2)),
        (("color", 0.8, 8), ("solarize", 0.8, 7)),
        (("sharpness", 0.4, 7), ("invert", 0.6, 8)),
        (("shear_x", 0.6, 5), ("equalize", 1.0, 9)),
        (("color", 0.4, 0), ("equalize", 0.6, 3)),
        (("equalize", 0.4, 7), ("solarize", 0.2, 4)),
        (("solarize", 0.6, 5), ("autocontrast", 0.6, 5)),
        (("invert", 0.6, 4), ("equalize", 1.0, 8)),
        (("color", 0.6, 4), ("contrast", 1.0, 8)),
        (("equalize", 0.8, 8), ("equalize", 0.6, 3)),
    ),
    "autoaugment_cifar10": (
        (("invert", 0.1, 7), ("contrast", 0.2, 6)),
        (("rotate", 0.7, 2), ("translate_x", 0.3, 9)),
        (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
        (("shear_y", 0.5, 8), ("translate_y", 0.7, 9)),
        (("autocontrast", 0.5, 8), ("equalize", 0.9, 2)),
        (("shear_y", 0.2, 7), ("posterize", 0.3, 7)),
        (("color", 0.4, 3), ("brightness", 0.6, 7)),
        (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
        (("equalize", 0.6, 5), ("equalize", 0.5, 1)),
        (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
        (("color", 0.7, 7), ("translate_x", 0.5, 8)),
        (("equalize", 0.3, 7), ("autocontrast", 0.4, 8)),
        (("translate_y", 0.4, 3), ("sharpness", 0.2, 6)),
        (("brightness", 0.9, 6), ("color", 0.2, 8)),
        (("solarize", 0.5, 2), ("invert", 0.0, 3)),
        (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
        (("equalize", 0.2, 8), ("equalize", 0.6, 4)),
        (("color", 0.9, 9), ("equalize", 0.6, 6)),
        (("autocontrast", 0.8, 4), ("solarize", 0.2, 8)),
        (("brightness", 0.1, 3), ("color", 0.7, 0)),
        (("solarize", 0.4, 5), ("autocontrast", 0.9, 3)),
        (("translate_y", 0.9, 9), ("translate_y", 0.7, 9)),
        (("autocontrast", 0.9, 2), ("solarize", 0.8, 3)),
        (("equalize", 0.8, 8), ("invert", 0.1, 3)),
        (("translate_y", 0.7, 9), ("autocontrast", 0.9, 1)),
    ),
    "autoaugment_svhn": (
        (("shear_x", 0.9, 4), ("invert", 0.2, 3)),
        (("shear_y", 0.9, 8), ("invert", 0.7, 5)),
        (("equalize", 0.6, 5), ("solarize", 0.6, 6)),
        (("invert", 0.9, 3), ("equalize", 0.6, 3)),
        (("equalize", 0.6, 1), ("rotate", 0.9, 3)),
        (("shear_x", 0.9, 4), ("autocontrast", 0.8, 3)),
        (("shear_y", 0.9, 8), ("invert", 0.4, 5)),
        (("shear_y", 0.9, 5), ("solarize", 0.2, 6)),
        (("invert", 0.9, 6), ("autocontrast", 0.8, 1)),
        (("equalize", 0.6, 3), ("rotate", 0.9, 3)),
        (("shear_x", 0.9, 4), ("solarize", 0.3, 3)),
        (("shear_y", 0.8, 8), ("invert", 0.7, 4)),
        (("equalize", 0.9, 5), ("translate_y", 0.6, 6)),
        (("invert", 0.9, 4), ("equalize", 0.6, 7)),
        (("contrast", 0.3, 3), ("rotate", 0.8, 4)),
        (("invert", 0.8, 5), ("translate_y", 0.0, 2)),
        (("shear_y", 0.7, 6), ("solarize", 0.4, 8)),
        (("invert", 0.6, 4), ("rotate", 0.8, 4)),
        (("shear_y", 0.3, 7), ("translate_x", 0.9, 3)),
        (("shear_x", 0.1, 6), ("invert", 0.6, 5)),
        (("solarize", 0.7, 2), ("translate_y", 0.6, 7)),
        (("shear_y", 0.8, 4), ("invert", 0.8, 8)),
        (("shear_x", 0.7, 9), ("translate_y", 0.8, 3)),
        (("shear_y", 0.8, 5), ("autocontrast", 0.7, 3)),
        (("shear_x", 0.7, 2), ("invert", 0.1, 5)),
    ),
}
_LAST_BIN = 9

# RandAugment's 14 operations (arXiv 1909.13719).
_RANDAUGMENT_OPERATIONS = tuple(name for name in OPERATIONS if name not in ("invert", "cutout"))
_RANDAUGMENT_STRONGEST = 30
_RANDAUGMENT = re.compile(r"randaugment\( *([0-9]{1,3}) *, *([0-9]{1,3}) *\)")


def _level(operation: str, strength: float) -> float:
    """The level that is as strong as `strength`, 0..1, says: see the module's docstring."""
    return 1 - strength if operation in ("solarize", "posterize") else strength


def _autoaugment(name: str) -> Policy:
    """A built-in table, its bins turned into levels."""
    return Policy(
        tuple(
            tuple(
                Step(operation, probability, _level(operation, bin_number / _LAST_BIN))
                for operation, probability, bin_number in sub_policy
            )
            for sub_policy in _AUTOAUGMENT[name]
        )
    )


def _randaugment(name: str) -> Policy:
    """The policy that a text such as "randaugment(2,9)" names.

    Each operation has two sub-policies of one step: with a factor above 1 and below 1, or twice the
    same, so that all operations are drawn equally often.
    """
    match = _RANDAUGMENT.fullmatch(name)
    count, strength = map(int, match.groups()) if match else (0, 0)
    if not 1 <= count <= MAX_PICKS or strength > _RANDAUGMENT_STRONGEST:
        raise UserError(
            f"--policy: expected randaugment(n,m) with n from 1 to {MAX_PICKS} and m from 0 to "
            f"{_RANDAUGMENT_STRONGEST}, such as randaugment(2,9). Received: {shown(name)}."
        )
    sub_policies = []
    for operation in _RANDAUGMENT_OPERATIONS:
        for direction in (1, -1):
            level = _level(operation, strength / _RANDAUGMENT_STRONGEST)
            if operation in ENHANCEMENTS:
                level = (1 + direction * level) / 2
            sub_policies.append((Step(operation, 1.0, level),))
    return Policy(tuple(sub_policies), picks=count)


def load(name_or_path: str | os.PathLike[str]) -> Policy:
    """The policy of a built-in name, of "randaugment(n,m)", or of a .json file.

    Raises:
        UserError: for anything else, and for any mistake in the file.
    """
    name = os.fspath(name_or_path)
    if name in _AUTOAUGMENT:
        return _autoaugment(name)
    if name.endswith(".json"):
        return _load_file(name)
    if name.startswith("randaugment"):
        return _randaugment(name)
    raise UserError(
        f"--policy: expected one of {', '.join(_AUTOAUGMENT)}, randaugment(n,m) such as "
        f"randaugment(2,9), or a path that ends in .json. Received: {shown(name)}."
    )


def save(policy: Policy, path: str | os.PathLike[str]) -> None:
    """Writes a policy file, aside first, so that there is never half of one."""
    path = pathlib.Path(path)
    picks = f'  "picks": {policy.picks},\n' if policy.picks != 1 else ""
    lines = ",\n".join("    " + json.dumps(sub_policy) for sub_policy in policy.sub_policies)
    text = (
        f'{{\n  "format": {json.dumps(FORMAT)},\n  "version": {VERSION},\n{picks}'
        f'  "sub_policies": [\n{lines}\n  ]\n}}\n'
    )
    try:
        safe_files.write_whole(path, text.encode())
    except OSError as error:
        raise UserError(
            f"{path}: expected a file that can be written. Received: {error.strerror}."
        ) from None


def path_in(model_dir: str | os.PathLike[str]) -> pathlib.Path:
    """Where a run keeps a copy of its policy."""
    return pathlib.Path(model_dir) / "policy.json"


def of_run(name: str, model_dir: str | os.PathLike[str]) -> str:
    """What to load as a run's policy: its own copy if there is one, else what the run names.

    The file that the run names may have moved, or have changed since.
    """
    kept = path_in(model_dir)
    return str(kept) if name and kept.exists() else name


def read_text(path: str) -> str:
    """The text of a file of limited size."""
    try:
        if not pathlib.Path(path).is_file():
            raise UserError(f"{path}: expected a file; there is none. Check the path.")
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"{path}: expected at most {MAX_BYTES} bytes. Received: more.")
        return content.decode("utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8
        raise UserError(f"{path}: expected a readable text file. Received: {error}.") from None


def _load_file(path: str) -> Policy:
    """Reads what `save` writes, every value checked; "picks" may be left out."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key that occurs twice")
        return dict(pairs)

    try:
        document = json.loads(read_text(path), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected JSON. Received: {error}.") from None
    if not isinstance(document, dict):
        raise _mistake(path, "the file", "an object {...}", document)
    missing = [key for key in ("format", "version", "sub_policies") if key not in document]
    if missing:
        raise UserError(f"{path}: expected the key {missing[0]!r}. Received: a file without it.")
    for key, value in document.items():
        if key == "format" and value != FORMAT:
            raise _mistake(path, key, repr(FORMAT), value)
        if key == "version" and (value != VERSION or type(value) is not int):
            raise _mistake(path, key, str(VERSION), value)
        if key == "picks" and (type(value) is not int or not 1 <= value <= MAX_PICKS):
            raise _mistake(path, key, f"a whole number from 1 to {MAX_PICKS}", value)
        if key not in ("format", "version", "picks", "sub_policies"):
            raise _mistake(path, "keys", "format, version, picks and sub_policies only", key)
    sub_policies = parse_sub_policies(document["sub_policies"], path)
    return Policy(sub_policies, document.get("picks", 1))


def parse_sub_policies(
    value: Any, source: str, operations: Collection[str] = OPERATIONS
) -> tuple[tuple[Step, ...], ...]:
    """Checks lists of lists of [operation, probability, level].

    Args:
        value: anything that JSON or a Python literal can hold.
        source: what a mistake is blamed on: a file or a flag.
        operations: the names that are known there.

    Raises:
        UserError: that names the source, the place, what was expected and what was received.
    """
    sub_policies = _checked_list(value, source, "sub_policies", "sub-policies", MAX_SUB_POLICIES)
    parsed = []
    for number, sub_policy in enumerate(sub_policies, 1):
        place = f"sub-policy {number}"
        steps = _checked_list(sub_policy, source, place, "steps", MAX_STEPS)
        parsed.append(
            tuple(
                _parse_step(step, source, f"{place}, step {position}", operations)
                for position, step in enumerate(steps, 1)
            )
        )
    return tuple(parsed)


def _checked_list(value: Any, source: str, place: str, items: str, most: int) -> Any:
    """`value`, if it is a list of 1 to `most` items."""
    expected = f"a list of 1 to {most} {items}"
    if not isinstance(value, (list, tuple)):
        raise _mistake(source, place, expected, value)
    if not 1 <= len(value) <= most:
        raise UserError(f"{source}: {place}: expected {expected}. Received: {len(value)}.")
    return value


def _parse_step(value: Any, source: str, place: str, operations: Collection[str]) -> Step:
    """One step, checked."""
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise _mistake(source, place, "[operation, probability, level]", value)
    operation, *numbers = value
    if not isinstance(operation, str) or operation not in operations:
        raise _mistake(source, place, f"an operation among {', '.join(operations)}", operation)
    for name, number in zip(("probability", "level"), numbers, strict=True):
        if type(number) not in (int, float) or not 0 <= number <= 1:  # NaN is not, either
            raise _mistake(source, place, f"a {name} from 0 to 1", number)
    return Step(operation, *map(float, numbers))


def _mistake(source: str, place: str, expected: str, received: Any) -> UserError:
    return UserError(f"{source}: {place}: expected {expected}. Received: {shown(received)}.")


def shown(value: Any) -> str:
    """A short text of any value, on one line."""
    text = reprlib.Repr()
    text.maxstring = 100
    try:
        return text.repr(value)
    except ValueError:  # a whole number of more digits than Python is willing to write
        return "a number that is too long"
