"""Runs as curves: loss over steps and over time, metric over time, and k̂/k."""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sidco_ddp.tools.figure import BAND, COLOURS, LEAST, OTHER, plain
from sidco_ddp.tools.report.bars import BAND_LABEL, scale_quality
from sidco_ddp.tools.report.comparison import name_of_group, order
from sidco_ddp.tools.report.digest import numbers
from sidco_ddp.tools.report.measures import scheme_of

DASHES = ("-", (0, (5, 2)), (0, (1, 1.3)), (0, (5, 1.5, 1, 1.5)))  # large ratios first
MANY = 6  # schemes in one panel
FEW = 60  # evaluations that get a dot each
TARGET = "#888888"
SECONDS = "seconds, evaluations included"
WHOLE = "black"  # what is sent whole: its grey of the bars is too light for a line


def draw_curves(comparison: dict[str, Any], runs: Sequence[dict[str, Any]]) -> Figure:
    """Four panels with dashes for ratios; where there are many schemes, a column of four for each ratio instead.

    Colours are compressors, seeds are lines alike, and what is sent whole is in each column.
    """
    runs = sorted(runs, key=order)
    schemes = list(dict.fromkeys(map(scheme_of, runs)))
    ratios = sorted({ratio for _, ratio in schemes if ratio is not None}, reverse=True)
    if len(schemes) <= MANY or len(ratios) < 2:
        figure = Figure(figsize=(12, 8.2), layout="constrained")
        grid = figure.subplots(2, 2).reshape(4, 1)
        dashes = {ratio: DASHES[place % len(DASHES)] for place, ratio in enumerate(ratios)}
        _fill(grid[:, 0], comparison, runs, dashes)
    else:
        figure = Figure(figsize=(4.2 * len(ratios) + 1.6, 12.5), layout="constrained")
        grid = figure.subplots(4, len(ratios), sharey="row")
        dashes = {}
        for panels, ratio in zip(grid.T, ratios, strict=True):
            same = [run for run in runs if scheme_of(run)[1] in (None, ratio)]
            _fill(panels, comparison, same, dashes, f", ratio {ratio:g}")
        for axis in grid[:, 1:].flat:
            axis.set_ylabel("")
    _limit_loss(grid[:2].flat, runs)
    scale_quality(list(grid[3]))
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # type: ignore[union-attr, call-arg]
    figure.legend(handles=_legend(schemes, dashes), loc="outside right upper", frameon=False)
    figure.suptitle(name_of_group(comparison), fontweight="bold")
    return figure


def _fill(
    panels: Iterable[Axes],
    comparison: dict[str, Any],
    runs: Sequence[dict[str, Any]],
    dashes: dict[float, Any],
    where: str = "",
) -> None:
    by_step, by_time, metric, quality = panels
    seeds = max(collections.Counter(map(scheme_of, runs)).values())
    for run in runs:
        style: dict[str, Any] = _style(scheme_of(run), dashes)
        style |= {"linewidth": 1.5, "alpha": 0.9} if seeds == 1 else {"linewidth": 1.1, "alpha": 0.75}
        curves, evaluations = run["curves"], run["evaluations"]
        by_step.plot(curves["step"], numbers(curves["loss"]), **style)
        by_time.plot(curves["seconds"], numbers(curves["loss"]), **style)
        if run["khat_over_k"]:
            quality.plot(curves["step"], np.maximum(numbers(curves["khat_over_k"]), LEAST), **style)
        if len(evaluations["metric"]) <= FEW:
            style |= {"marker": "o", "markersize": 2.5}
        metric.plot(evaluations["seconds"], numbers(evaluations["metric"]), **style)
    smoothed = _mean_of(runs)
    _finish(by_step, f"Training loss{where}", "step", f"loss, {smoothed}")
    _finish(by_time, f"Training loss over time{where}", SECONDS, f"loss, {smoothed}")
    metric.axhline(comparison["target"], color=TARGET, linewidth=1, linestyle="--", zorder=0)
    _finish(metric, f"Quality over time{where}", SECONDS, comparison["metric_name"] or "metric")
    _finish(quality, f"Entries sent over the target{where}", "step", f"k̂/k, {smoothed}")


def _style(scheme: tuple[str, float | None], dashes: dict[float, Any]) -> dict[str, Any]:
    name, ratio = scheme
    colour = WHOLE if name == "none" else COLOURS.get(name, OTHER)
    return {"color": colour, "linestyle": "-" if ratio is None else dashes.get(ratio, "-")}


def _legend(schemes: Sequence[tuple[str, float | None]], dashes: dict[float, Any]) -> list[Any]:
    """Ratios are named where they have dashes; elsewhere the titles of the panels name them."""
    lines = {
        name if ratio is None or not dashes else f"{name}, {ratio:g}": _style((name, ratio), dashes)
        for name, ratio in schemes
    }
    return [
        *(Line2D([], [], label=label, linewidth=1.8, **style) for label, style in lines.items()),
        Line2D([], [], color=TARGET, linewidth=1, linestyle="--", label="target"),
        Patch(color=BAND, label=BAND_LABEL),
    ]


def _mean_of(runs: Sequence[dict[str, Any]]) -> str:
    windows = sorted({run["curves"]["window"] for run in runs})
    return f"mean of {' to '.join(str(window) for window in dict.fromkeys((windows[0], windows[-1])))} steps"


def _limit_loss(panels: Iterable[Axes], runs: Sequence[dict[str, Any]]) -> None:
    """A run that diverges must not flatten the others: nothing beyond twice the largest first loss is shown."""
    first = [run["curves"]["loss"][0] for run in runs if run["curves"]["loss"][0] is not None]
    for panel in panels:
        low, high = panel.get_ylim()
        panel.set_ylim(low, min(high, 2.0 * max(first)) if first and max(first) > 0 else high)


def _finish(axis: Axes, title: str, across: str, up: str) -> None:
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    plain(axis)
