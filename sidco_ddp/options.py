"""Checks of options, shared by everything that takes one: each error names the option, the value and the remedy."""

import math
from typing import Any


def check_ratio(value: Any, name: str = "ratio") -> float:
    """``value`` as a ratio in (0, 1].

    Raises:
        ValueError: it is not a number, not finite, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1.0:
        raise ValueError(
            f"{name} must be a number in (0, 1], got {value!r}; {name}=0.001 sends one entry in a thousand"
        )
    return float(value)


def check_count(value: Any, name: str, least: int, remedy: str) -> int:
    """``value`` as a whole number of at least ``least``.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}; {remedy}")
    return value


def check_number(value: Any, name: str, least: float, remedy: str) -> float:
    """``value`` as a finite number of at least ``least``.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise ValueError(f"{name} must be a finite number >= {least:g}, got {value!r}; {remedy}")
    return float(value)


def check_flag(value: Any, name: str) -> bool:
    """``value`` as a bool.

    Raises:
        ValueError: it is not one.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def check_choice(value: Any, name: str, choices: tuple[Any, ...]) -> Any:
    """``value``, which must be one of ``choices``.

    Raises:
        ValueError: it is not.
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}; got {value!r}")
    return value


def check_method(value: Any, name: str, method: str, remedy: str) -> Any:
    """``value``, None or something with a method of that name.

    Raises:
        ValueError: it has no such method.
    """
    if value is not None and not callable(getattr(value, method, None)):
        raise ValueError(f"{name} must have a {method}() method, got {value!r}; {remedy}")
    return value
