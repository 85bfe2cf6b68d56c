"""Runs as curves: loss over steps and over time, metric over time, and k̂/k."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sidco_ddp.tools.figure import BAND, COLOURS, LEAST, OTHER, TOLERANCE
from sidco_ddp.tools.report.bars import scale_quality
from sidco_ddp.tools.report.comparison import name_of_group, order
from sidco_ddp.tools.report.measures import scheme_of

DASHES = ("-", (0, (5, 2)), (0, (1, 1.3)), (0, (5, 1.5, 1, 1.5)))  # large ratios first
MANY = 6  # schemes in one panel
SECONDS = "seconds, evaluations included"
WHOLE = "black"  # what is sent whole: its grey of the bars is too light for a line


def draw_curves(comparison: dict[str, Any], runs: Sequence[dict[str, Any]]) -> Figure:
    """Four panels; where there are many schemes, four for each ratio, side by side, with what is sent whole in each.

    Colours are compressors, dashes are ratios, and seeds are lines alike.
    """
    runs = sorted(runs, key=order)
    styles = _styles(runs)
    ratios = sorted({ratio for _, ratio in styles if ratio is not None}, reverse=True)
    if len(styles) <= MANY or len(ratios) < 2:
        figure = Figure(figsize=(12, 8.2), layout="constrained")
        _fill(list(figure.subplots(2, 2).flat), comparison, runs, styles)
    else:
        figure = Figure(figsize=(4.6 * len(ratios) + 1.5, 13), layout="constrained")
        grid = figure.subplots(4, len(ratios), sharey="row")
        for column, ratio in enumerate(ratios):
            same = [run for run in runs if scheme_of(run)[1] in (None, ratio)]
            _fill(list(grid[:, column]), comparison, same, styles, f", ratio {ratio:g}")
            for axis in grid[:, 1:].flat:
                axis.set_ylabel("")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # type: ignore[union-attr, call-arg]
    figure.legend(handles=_legend(styles), loc="outside right upper", frameon=False)
    figure.suptitle(name_of_group(comparison), fontweight="bold")
    return figure


def _fill(
    panels: Sequence[Axes],
    comparison: dict[str, Any],
    runs: Sequence[dict[str, Any]],
    styles: dict[tuple[str, float | None], dict[str, Any]],
    where: str = "",
) -> None:
    by_step, by_time, metric, quality = panels
    for run in runs:
        style, curves, evaluations = styles[scheme_of(run)], run["curves"], run["evaluations"]
        by_step.plot(curves["step"], _values(curves["loss"]), **style)
        by_time.plot(curves["seconds"], _values(curves["loss"]), **style)
        few = {"marker": "o", "markersize": 2.5} if len(evaluations["metric"]) <= 60 else {}
        metric.plot(evaluations["seconds"], _values(evaluations["metric"]), **few, **style)
        if run["khat_over_k"]:
            quality.plot(curves["step"], np.maximum(_values(curves["khat_over_k"]), LEAST), **style)
    smoothed = _mean_of(runs)
    _finish(by_step, f"Training loss{where}", "step", f"loss, {smoothed}")
    _finish(by_time, f"Training loss over time{where}", SECONDS, f"loss, {smoothed}")
    metric.axhline(comparison["target"], color="#888888", linewidth=1, linestyle="--", zorder=0)
    _finish(metric, f"Quality over time{where}", SECONDS, comparison["metric_name"] or "metric")
    scale_quality(quality)
    _finish(quality, f"Entries sent over the target{where}", "step", f"k̂/k, {smoothed}")
    _limit_loss((by_step, by_time), runs)


def _styles(runs: Sequence[dict[str, Any]]) -> dict[tuple[str, float | None], dict[str, Any]]:
    schemes = list(dict.fromkeys(map(scheme_of, runs)))
    ratios = sorted({ratio for _, ratio in schemes if ratio is not None}, reverse=True)
    seeds = max(sum(scheme_of(run) == scheme for run in runs) for scheme in schemes)
    return {
        (name, ratio): {
            "color": WHOLE if name == "none" else COLOURS.get(name, OTHER),
            "linestyle": DASHES[0 if ratio is None else ratios.index(ratio) % len(DASHES)],
            "linewidth": 1.5 if seeds == 1 else 1.1,
            "alpha": 0.9 if seeds == 1 else 0.75,
        }
        for name, ratio in schemes
    }


def _legend(styles: dict[tuple[str, float | None], dict[str, Any]]) -> list[Any]:
    lines: list[Any] = []
    for (name, ratio), style in styles.items():
        label = name if ratio is None else f"{name}, {ratio:g}"
        lines.append(Line2D([], [], label=label, **{**style, "linewidth": 1.8, "alpha": 1.0}))
    target = Line2D([], [], color="#888888", linewidth=1, linestyle="--", label="target")
    return [*lines, target, Patch(color=BAND, label=f"k ± {TOLERANCE:.0%}".replace("%", " %"))]


def _mean_of(runs: Sequence[dict[str, Any]]) -> str:
    windows = sorted({run["curves"]["window"] for run in runs})
    return f"mean of {' to '.join(str(window) for window in dict.fromkeys((windows[0], windows[-1])))} steps"


def _limit_loss(panels: Sequence[Axes], runs: Sequence[dict[str, Any]]) -> None:
    """A run that diverges must not flatten the others: nothing beyond twice the largest first loss is shown."""
    first = [run["curves"]["loss"][0] for run in runs if run["curves"]["loss"][0] is not None]
    for panel in panels:
        low, high = panel.get_ylim()
        panel.set_ylim(low, min(high, 2.0 * max(first)) if first and max(first) > 0 else high)


def _finish(axis: Axes, title: str, across: str, up: str) -> None:
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    axis.grid(which="major", color="#e6e6e6")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _values(values: Sequence[float | None]) -> np.ndarray[Any, Any]:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
