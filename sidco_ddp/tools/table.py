"""Measurements as text."""

from collections.abc import Sequence
from typing import Any

HEADINGS = ("compressor", "x topk", "ms", "q1 .. q3", "ns/elem", "x floor", "k̂/k", "min .. max", "held", "scratch")


def render(case: dict[str, Any]) -> str:
    """One case as a title and a table."""
    floor = case["floor_seconds"]
    title = (
        f"{case['device']}, {case['label']} = {case['elements']:,} elements, {case['source']}, "
        f"ratio {case['ratio']:g}, k = {case['k']:,}; floor {milliseconds(floor['median'])} ms"
    )
    return f"{title}\n{table(HEADINGS, [_row(result, case['elements']) for result in case['results']])}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need, the first to the left and the others to the right, under a rule."""
    rows = [headings, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(headings))]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def milliseconds(seconds: float) -> str:
    """Three significant digits or whole milliseconds."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def mebibytes(value: int | None) -> str:
    """In MiB; a dash where it is not known."""
    return "-" if value is None else f"{value / 2**20:,.1f} MiB"


def _row(result: dict[str, Any], elements: int) -> tuple[str, ...]:
    seconds, quality = result["seconds"], result["khat_over_k"]
    speedup = result["speedup_over_topk"]
    held = result["held_bytes"]
    return (
        result["compressor"],
        "-" if speedup is None else f"{speedup:.2f}",
        milliseconds(seconds["median"]),
        f"{milliseconds(seconds['q1'])} .. {milliseconds(seconds['q3'])}",
        f"{result['ns_per_element']:.2f}",
        f"{result['times_floor']:.1f}",
        f"{quality['mean']:.2f}",
        f"{quality['min']:.2f} .. {quality['max']:.2f}",
        "-" if held is None else f"{held / elements:.1f} B/elem",
        mebibytes(result["scratch_bytes"]),
    )


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *others = zip(row, widths, strict=True)
    return [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
