"""A setting by itself: how config.py declares it, its type and limits, and how a flag shows it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from amdim_tf.errors import UserError


def setting(default: Any, help: str, **limits: Any) -> Any:
    """A dataclass field with its help text and limits.

    Args:
        default: the value when neither a flag nor config.json gives one.
        help: what the setting does, for --help.
        **limits: any of `minimum`, `maximum`, `choices`, `length`; and `changeable=True` where the
            setting may differ when a run is resumed.
    """
    return dataclasses.field(default=default, metadata={"help": help, **limits})


def checked(field: dataclasses.Field, value: Any) -> Any:
    """`value` in the field's type and within its limits, or a UserError that names the flag."""
    kinds = {
        "int": (int, "a whole number"),
        "float": ((int, float), "a number"),
        "bool": (bool, "true or false"),
        "str": (str, "a text"),
    }
    is_tuple = field.type.startswith("tuple")
    kind = field.type[len("tuple[") : -len(", ...]")] if is_tuple else field.type
    types, wanted = kinds[kind]
    if "choices" in field.metadata:
        wanted = "one of " + ", ".join(map(str, field.metadata["choices"]))
    if "minimum" in field.metadata:
        wanted += f" of at least {field.metadata['minimum']}"
    if "maximum" in field.metadata:
        wanted += f" and at most {field.metadata['maximum']}"
    if is_tuple:
        wanted = f"{field.metadata.get('length', 'a list of')} values with commas, each {wanted}"

    def fits(item: Any) -> bool:
        limits = field.metadata
        return (
            isinstance(item, types)
            and (kind == "bool" or not isinstance(item, bool))
            and (not isinstance(item, float) or math.isfinite(item))
            and (not isinstance(item, int) or abs(item) < 2**63)
            and item in limits.get("choices", (item,))
            and not ("minimum" in limits and item < limits["minimum"])
            and not ("maximum" in limits and item > limits["maximum"])
        )

    items = value if is_tuple else (value,)
    length = field.metadata.get("length", len(items) if isinstance(items, (list, tuple)) else 0)
    if (
        not isinstance(items, (list, tuple))
        or len(items) != length
        or not all(fits(item) for item in items)
    ):
        raise UserError(
            f"--{field.name}: expected {wanted}. Received: {shown(value)[:200] or 'nothing'}."
        )
    converted = tuple(float(item) if kind == "float" else item for item in items)
    return converted if is_tuple else converted[0]


def shown(value: Any) -> str:
    """A setting's value as a flag has it."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
