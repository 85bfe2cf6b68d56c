"""Comparisons as tables, for a terminal or for Markdown."""

from collections.abc import Callable, Sequence
from typing import Any

from sidco_ddp.tools.report.comparison import label, name_of_group
from sidco_ddp.tools.report.digest import PARTS
from sidco_ddp.tools.table import milliseconds, table

Table = Callable[[Sequence[str], Sequence[Sequence[str]]], str]
SCHEME = ("compressor", "ratio", "seed")
QUALITY = ("k̂/k [90 % of the mean]", "5 .. 95 %", "min .. max")
MEASURES = ("steps", "seconds", "to target", "speed-up", "throughput", *QUALITY, "bytes/step", "reduction")
UNKNOWN = "-"


def render(comparison: dict[str, Any], *, markdown: bool = False) -> str:
    """One comparison: its title, each run's measures, each run's times, schemes over their seeds, and notes."""
    draw: Table = markdown_table if markdown else table
    rows, schemes = comparison["runs"], comparison["schemes"]
    metric = comparison["metric_name"] or "metric"
    blocks = [
        _title(comparison, metric),
        draw((*SCHEME, metric, *MEASURES), [_measures(row) for row in rows]),
        "Milliseconds of a step, means:",
        draw((*SCHEME, *PARTS), [_times(row) for row in rows]),
    ]
    if any(len(scheme["seeds"]) > 1 for scheme in schemes):
        headings = ("compressor", "ratio", "runs", f"{metric}, min .. max", "reached", "speed-up, min .. max")
        blocks += [
            "Means over seeds:",
            draw((*headings, "throughput", "k̂/k", *QUALITY[1:], "reduction"), [_scheme(scheme) for scheme in schemes]),
        ]
    if comparison["notes"]:
        blocks.append("\n".join(f"{'* ' * markdown}Note: {note}." for note in comparison["notes"]))
    return "\n\n".join(blocks)


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    rule = ["---", *("---:" for _ in headings[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *rows))


def _title(comparison: dict[str, Any], metric: str) -> str:
    baseline = comparison["baseline"]
    seconds = baseline["seconds_to_target"]
    several = len(baseline["runs"])
    return (
        f"{name_of_group(comparison)}: baseline {label(baseline['compressor'], baseline['ratio'])}"
        f"{f', median of {several} runs' if several > 1 else ''}, {baseline['samples_per_second']:,.0f} samples/s; "
        f"target {metric} {'at least' if comparison['higher_is_better'] else 'at most'} {comparison['target']:.4g} "
        f"({comparison['target_source']}), which it "
        f"{'does not reach' if seconds is None else f'reaches in {seconds:,.1f} s'}"
    )


def _measures(row: dict[str, Any]) -> tuple[str, ...]:
    planned = "" if row["complete"] or not row["planned_steps"] else f"/{row['planned_steps']}"
    return (
        *_name(row),
        str(row["seed"]),
        _number(row["metric"], ".4g"),
        f"{row['steps']}{planned}",
        f"{row['seconds']:,.1f}",
        _number(row["seconds_to_target"], ",.1f"),
        _number(row["speedup"], ".2f"),
        f"{row['throughput']:.2f}",
        *_quality(row["khat_over_k"]),
        f"{row['bytes_per_step']:,.0f}",
        _number(row["reduction"], ",.1f"),
    )


def _times(row: dict[str, Any]) -> tuple[str, ...]:
    times = (row["seconds_per_step"][part] for part in PARTS)
    return (*_name(row), str(row["seed"]), *(UNKNOWN if time is None else milliseconds(time) for time in times))


def _scheme(scheme: dict[str, Any]) -> tuple[str, ...]:
    quality = scheme["khat_over_k"]
    return (
        *_name(scheme),
        str(len(scheme["seeds"])),
        _spread(scheme["metric"], ".4g"),
        f"{scheme['reached']}/{len(scheme['seeds'])}",
        _spread(scheme["speedup"], ".2f"),
        _number(scheme["throughput"]["mean"], ".2f"),
        _number(quality and quality["mean"], ".3f"),
        *_ranges(quality),
        _number(scheme["reduction"] and scheme["reduction"]["mean"], ",.1f"),
    )


def _name(row: dict[str, Any]) -> tuple[str, str]:
    return row["compressor"], _number(row["ratio"], "g")


def _quality(quality: dict[str, Any] | None) -> tuple[str, ...]:
    if quality is None:
        return (UNKNOWN,) * len(QUALITY)
    interval = quality["ci90"]
    within = "" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]"
    return f"{quality['mean']:.3f}{within}", *_ranges(quality)


def _ranges(quality: dict[str, Any] | None) -> tuple[str, str]:
    if quality is None:
        return UNKNOWN, UNKNOWN
    p5, p95, low, high = (
        f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.1g}"
        for value in (quality["p5"], quality["p95"], quality["min"], quality["max"])
    )
    return f"{p5} .. {p95}", f"{low} .. {high}"


def _spread(values: dict[str, float] | None, style: str) -> str:
    if values is None:
        return UNKNOWN
    mean = format(values["mean"], style)
    if values["min"] == values["max"]:
        return mean
    return f"{mean}, {format(values['min'], style)} .. {format(values['max'], style)}"


def _number(value: float | None, style: str) -> str:
    return UNKNOWN if value is None else format(value, style)
