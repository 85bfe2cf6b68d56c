"""The pictures of a report: two PNGs a comparison, curves and measures."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from sidco_ddp.tools.report.bars import draw_bars
from sidco_ddp.tools.report.comparison import GROUP, group_of
from sidco_ddp.tools.report.curves import draw_curves
from sidco_ddp.tools.report.records import ReportError

DPI = 120


def draw(comparisons: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]], folder: Path) -> Iterator[Path]:
    """Draw each comparison of the `runs` into `<task>-<scale>-<N>ranks-curves.png` and `...-measures.png`.

    Yields each path once it is written. Raises a `ReportError` where the folder cannot be written.
    """
    for comparison in comparisons:
        key = tuple(comparison[name] for name in GROUP)
        shown: list[dict[str, Any]] = []
        for run in runs:
            if group_of(run) == key and run not in shown:
                shown.append(run)
        stem = "-".join(re.sub(r"[^\w.]+", "_", str(part)) for part in key[:2] if part) + f"-{key[2]}ranks"
        yield _save(draw_curves(comparison, shown), folder / f"{stem}-curves.png")
        yield _save(draw_bars(comparison), folder / f"{stem}-measures.png")


def _save(figure: Figure, path: Path) -> Path:
    try:
        figure.savefig(path, dpi=DPI, format="png")
    except OSError as error:
        raise ReportError(f"--output: {str(path)!r} cannot be written ({error.strerror or error})") from None
    return path
