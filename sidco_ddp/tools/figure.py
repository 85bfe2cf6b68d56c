"""Measurements as a picture, in the manner of the paper's Figure 1: speed-up over top-k, time, and k̂/k."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

COLOURS = {  # grey for what does not estimate, warm for the other estimators, blue for ours
    "none": "#d0d0d0",
    "topk": "#555555",
    "randomk": "#a6a6a6",
    "dgc": "#c44e52",
    "redsync": "#dd8452",
    "gaussiank": "#e0b040",
    "sidco-e": "#16407a",
    "sidco-p": "#3f7fbf",
    "sidco-gp": "#8fbce6",
}
OTHER = "#55a868"
BAND = "#dddddd"
LEAST = 1e-3  # k̂/k that can still be drawn
TOLERANCE = 0.2  # the band in which the corrected schemes promise to stay
COLUMNS = ("speed-up over top-k", "time of a step [ms]", "selected / target, k̂/k")


def draw(report: dict[str, Any], path: Path) -> None:
    """Write a PNG with one row for each device, vector and source, and ratios side by side in each panel."""
    rows = list(_rows(report["cases"]))
    names = [result["compressor"] for result in report["cases"][0]["results"]]
    figure = Figure(figsize=(15, 1.5 + 2.9 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), 3, squeeze=False)
    for (title, cases), axes in zip(rows, grid, strict=True):
        _draw_speedup(axes[0], cases, names)
        _draw_time(axes[1], cases, names)
        _draw_count(axes[2], cases, names)
        axes[0].set_title(title, loc="left", fontsize=11, fontweight="bold")
        for axis, label in zip(axes, COLUMNS, strict=True):
            axis.set_ylabel(label)
            axis.set_xticks(range(len(cases)), [f"ratio {case['ratio']:g}" for case in cases])
            plain(axis, grid="y")
    figure.legend(handles=_legend(names), loc="outside upper center", ncols=len(names) + 2, frameon=False)
    threads = report["environment"]["threads"]
    figure.supxlabel(
        f"{report['environment']['cpu']}, {threads} thread{'s' * (threads != 1)}, torch "
        f"{report['environment']['torch']}; medians of {report['repeats']} interleaved steps, bars from quartile to "
        "quartile; k̂/k: mean, bars from minimum to maximum",
        fontsize=9,
    )
    figure.savefig(path, dpi=120, format="png")


def _rows(cases: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Cases that differ in their ratio alone, under one title."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        title = f"{case['device']}, {case['elements']:,} elements"
        if not case["label"][0].isdigit():
            title += f" ({case['label']})"
        groups.setdefault(f"{title}, {case['source']}", []).append(case)
    yield from groups.items()


def _grouped(
    axis: Axes,
    cases: Sequence[dict[str, Any]],
    names: Sequence[str],
    value_and_spread: Callable[[dict[str, Any]], tuple[float, float, float]],
    *,
    dots: bool = False,
) -> None:
    """A group for each case, in it a bar or a dot for each compressor, and its spread."""
    width = 0.84 / len(names)
    for place, name in enumerate(names):
        left = [group - 0.42 + (place + 0.5) * width for group in range(len(cases))]
        values, lows, highs = zip(*(value_and_spread(case["results"][place]) for case in cases), strict=True)
        below = [max(value - low, 0.0) for value, low in zip(values, lows, strict=True)]
        above = [max(high - value, 0.0) for value, high in zip(values, highs, strict=True)]
        colour = COLOURS.get(name, OTHER)
        if dots:
            axis.errorbar(left, values, [below, above], fmt="o", color=colour, markersize=6, elinewidth=2, capsize=3)
        else:
            axis.bar(left, values, 0.92 * width, color=colour)
            axis.errorbar(left, values, [below, above], fmt="none", ecolor="black", elinewidth=0.8, capsize=1.5)


def _draw_speedup(axis: Axes, cases: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Bars above 1 are faster than top-k; nothing where top-k was not measured."""
    if cases[0]["results"][0]["speedup_over_topk"] is None:
        axis.text(0.5, 0.5, "topk was not measured", ha="center", transform=axis.transAxes)
        return

    def values(result: dict[str, Any]) -> tuple[float, float, float]:
        seconds, speedup = result["seconds"], result["speedup_over_topk"]
        return speedup, speedup * seconds["median"] / seconds["q3"], speedup * seconds["median"] / seconds["q1"]

    _grouped(axis, cases, names, values)
    axis.axhline(1.0, color="black", linewidth=0.8)
    logarithmic(axis)


def _draw_time(axis: Axes, cases: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """A dashed line for the floor, the addition that error feedback needs anyway."""

    def values(result: dict[str, Any]) -> tuple[float, float, float]:
        seconds = result["seconds"]
        return seconds["median"] * 1e3, seconds["q1"] * 1e3, seconds["q3"] * 1e3

    _grouped(axis, cases, names, values)
    for group, case in enumerate(cases):
        floor = case["floor_seconds"]["median"] * 1e3
        axis.plot([group - 0.44, group + 0.44], [floor, floor], color="black", linestyle="--", linewidth=1.2)
    logarithmic(axis)


def _draw_count(axis: Axes, cases: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Every dot should lie in the grey band; none selected at all is drawn at the bottom."""

    def values(result: dict[str, Any]) -> tuple[float, float, float]:
        mean, low, high = (max(result["khat_over_k"][name], LEAST) for name in ("mean", "min", "max"))
        return mean, low, high

    axis.axhspan(1.0 - TOLERANCE, 1.0 + TOLERANCE, color=BAND, zorder=0)
    axis.axhline(1.0, color="black", linewidth=0.8, zorder=1)
    _grouped(axis, cases, names, values, dots=True)
    logarithmic(axis)
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 0.45), max(high, 2.2))


def plain(axis: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    """A pale grid behind what is drawn, and no frame above and to the right."""
    axis.grid(axis=grid, which="major", color="#e6e6e6")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def logarithmic(axis: Axes) -> None:
    """A logarithmic axis with plain numbers."""
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _legend(names: Sequence[str]) -> list[Any]:
    patches = [Patch(color=COLOURS.get(name, OTHER), label=name) for name in names]
    floor = Line2D([], [], color="black", linestyle="--", linewidth=1.2, label="floor: one addition")
    return [*patches, floor, Patch(color=BAND, label="k ± 20 %")]
