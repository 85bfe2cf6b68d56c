"""Types of options: what they accept, and one line on what they do not."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sidco_ddp import make_compressor

SUFFIXES = {"k": 1e3, "M": 1e6, "G": 1e9}


def listed(item: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A type of option: items separated by commas."""
    return lambda text: [item(part.strip()) for part in text.split(",")]


def one_of(names: Any) -> Callable[[str], str]:
    """A type of option: one of these names."""

    def check(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return check


def size(text: str) -> tuple[str, int]:
    """A label and a number of elements."""
    digits, factor = (text[:-1], SUFFIXES[text[-1]]) if text[-1:] in SUFFIXES else (text, 1.0)
    try:
        elements = round(float(digits) * factor)
    except (ValueError, OverflowError):
        elements = 0
    if elements < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of elements; write 26000000, 260k or 26M")
    return text, elements


def ratio(text: str) -> float:
    """A fraction to send."""
    try:
        return make_compressor("topk", ratio=float(text)).ratio
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number in (0, 1]; write 0.001") from None


def count(least: int) -> Callable[[str], int]:
    """A type of option: a whole number."""

    def check(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return check


def number(text: str) -> float:
    """A type of option: any finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def file(text: str) -> Path:
    """A file to write, in a folder that is there."""
    path = Path(text)
    if not path.name or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is in no existing folder; make {str(path.parent)!r} first")
    return path
