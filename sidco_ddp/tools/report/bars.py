"""The paper's three measures as bars: speed-up, throughput and estimation quality."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sidco_ddp.tools.figure import BAND, COLOURS, LEAST, OTHER, TOLERANCE, logarithmic, plain
from sidco_ddp.tools.report.comparison import label, name_of_group

TITLES = ("training speed-up", "throughput", "estimation quality, k̂/k")
BAND_LABEL = f"k ± {TOLERANCE * 100:.0f} %"
WIDTH = 0.84  # of a group of bars


def draw_bars(comparison: dict[str, Any]) -> Figure:
    """Three panels with a group for each ratio and a bar for each compressor but the baseline, which is the line at 1.

    Bars are means over seeds. Their whiskers reach from the least to the largest seed; those of k̂/k from the 5th to the
    95th percentile of the steps.
    """
    baseline = comparison["baseline"]
    known = (baseline["compressor"], baseline["ratio"])
    schemes = [scheme for scheme in comparison["schemes"] if (scheme["compressor"], scheme["ratio"]) != known]
    ratios = sorted({scheme["ratio"] for scheme in schemes}, key=lambda ratio: -(ratio or 2.0))
    names = list(dict.fromkeys(scheme["compressor"] for scheme in schemes))
    figure = Figure(figsize=(13.5, 4.3), layout="constrained")
    speedup, throughput, quality = figure.subplots(1, 3)
    for scheme in schemes:
        width = WIDTH / len(names)
        left = ratios.index(scheme["ratio"]) - WIDTH / 2 + (names.index(scheme["compressor"]) + 0.5) * width
        colour = COLOURS.get(scheme["compressor"], OTHER)
        _bar(speedup, left, width, colour, scheme["speedup"])
        _bar(throughput, left, width, colour, scheme["throughput"])
        _dot(quality, left, colour, scheme["khat_over_k"])
    for axis, title in zip((speedup, throughput, quality), TITLES, strict=True):
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xticks(range(len(ratios)), ["whole" if ratio is None else f"ratio {ratio:g}" for ratio in ratios])
        axis.set_xlim(-0.5, max(len(ratios), 1) - 0.5)
        plain(axis, grid="y")
    for axis in (speedup, throughput):
        axis.axhline(1.0, color="black", linewidth=0.9, zorder=1)
        axis.set_ylim(0, max(1.15, axis.get_ylim()[1]))
    scale_quality([quality])
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06)  # type: ignore[union-attr, call-arg]
    figure.legend(handles=_legend(names, baseline), loc="outside upper center", ncols=len(names) + 2, frameon=False)
    figure.supxlabel(_caption(comparison, schemes), fontsize=9)
    return figure


def scale_quality(panels: Sequence[Axes]) -> None:
    """The band around k, on axes of plain numbers that turn logarithmic where these lie far from 1."""
    for axis in panels:
        axis.axhline(1.0, color="black", linewidth=0.9, zorder=1)
        axis.axhspan(1.0 - TOLERANCE, 1.0 + TOLERANCE, color=BAND, zorder=0)
    low = min(axis.dataLim.y0 for axis in panels)
    high = max(axis.dataLim.y1 for axis in panels)
    for axis in panels:
        if low >= 0.4 and high <= 2.0:
            axis.set_ylim(min(0.5, low - 0.1), max(1.5, high + 0.1))
        else:
            logarithmic(axis)
            axis.set_ylim(min(low / 1.3, 0.45), max(high * 1.3, 2.2))


def _bar(axis: Axes, left: float, width: float, colour: str, values: dict[str, float] | None) -> None:
    """A bar; a cross on the ground where it has no height, nothing where there is no value."""
    if values is None:
        return
    axis.bar(left, values["mean"], 0.9 * width, color=colour)
    if values["max"] == 0:
        axis.plot(left, 0.0, marker="x", color=colour, markersize=7, markeredgewidth=2, clip_on=False, zorder=3)
    elif values["min"] != values["max"]:
        below, above = values["mean"] - values["min"], values["max"] - values["mean"]
        axis.errorbar(left, values["mean"], [[below], [above]], fmt="none", ecolor="black", elinewidth=1, capsize=2.5)


def _dot(axis: Axes, left: float, colour: str, quality: dict[str, float] | None) -> None:
    if quality is None:
        return
    mean, low, high = (max(quality[name], LEAST) for name in ("mean", "p5", "p95"))
    spread = [[max(mean - low, 0.0)], [max(high - mean, 0.0)]]
    axis.errorbar(left, mean, spread, fmt="o", color=colour, markersize=6, elinewidth=2, capsize=3)


def _legend(names: Sequence[str], baseline: dict[str, Any]) -> list[Any]:
    scheme = label(baseline["compressor"], baseline["ratio"])
    line = Line2D([], [], color="black", linewidth=0.9, label=f"1: baseline {scheme}, or k")
    patches = [Patch(color=COLOURS.get(name, OTHER), label=name) for name in names]
    return [*patches, line, Patch(color=BAND, label=BAND_LABEL)]


def _caption(comparison: dict[str, Any], schemes: Sequence[dict[str, Any]]) -> str:
    """What the bars are, in a line or two."""
    seeds = max((len(scheme["seeds"]) for scheme in schemes), default=1)
    several = ", bars from the least to the largest seed" if seeds > 1 else ""
    sense = "at least" if comparison["higher_is_better"] else "at most"
    metric = comparison["metric_name"] or "metric"
    return (
        f"{name_of_group(comparison)}; time to {metric} {sense} {comparison['target']:.4g} (×: never) and samples "
        f"a second, over the baseline's{several};\nk̂/k: mean, bars from the 5th to the 95th percentile of the steps"
    )
