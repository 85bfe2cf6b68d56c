"""Runs side by side: the paper's three measures, normalised by a baseline of the same task, scale and world size."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from sidco_ddp import COMPRESSORS
from sidco_ddp.tools.report.measures import Run, over_seeds, reached, row_of, scheme_of
from sidco_ddp.tools.report.records import ReportError

GROUP = ("task", "scale", "world_size")
# What the runs of one comparison may differ in, or say a second time.
UNCOMPARED = ("compressor", "ratio", "seed", "steps", "max_steps")


def compare(runs: Sequence[Run], baseline: Sequence[Run] = (), target: float | None = None) -> list[dict[str, Any]]:
    """One comparison for each task, scale and world size among the runs.

    * **Target**: `target`, or else the one that the baseline was given, or else the baseline's final metric; of several
      baseline runs the median one's, of an even number the worse of the two in the middle.
    * **Speed-up** of a run: the baseline's seconds to its first evaluation that reaches the target, over the run's. The
      clock includes evaluations. 0 for a run that never reaches it; None where the baseline does not.
    * **Throughput**: samples a second of training steps, all ranks together, over the baseline's.
    * **Estimation quality**: k̂/k, entries sent over the target count, averaged over the compressed steps; `ci90` is the
      normal 90 % confidence interval of that mean, mean ± 1.645 s / √n, as if steps were independent.

    Of several baseline runs, seconds and samples a second are medians. The baseline is `baseline`, all of one
    compressor and ratio, or else the group's runs of the compressor `none`. Raises a `ReportError` where a group has
    none, or `baseline` belongs to no group, and where one `target` is given for several metrics.
    """
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(group_of(run), []).append(run)
    chosen: dict[tuple[Any, ...], list[Run]] = {}
    for run in baseline:
        if group_of(run) not in groups:
            there = "; ".join(name_of(key) for key in groups)
            raise ReportError(
                f"--baseline: {run['name']!r} is a run of {name_of(group_of(run))}, to be compared are {there}; "
                "name a baseline of the same task, scale and world size"
            )
        chosen.setdefault(group_of(run), []).append(run)
    names = {run["metric_name"] for run in runs if run["metric_name"]}
    if target is not None and len(names) > 1:
        raise ReportError(f"--target is one value for {' and '.join(sorted(names))}; report on one task at a time")
    return [
        _compare_group(key, found, chosen.get(key, []), target) for key, found in sorted(groups.items(), key=_place)
    ]


def name_of(key: tuple[Any, ...]) -> str:
    """A group in words."""
    task, scale, world_size = key
    return f"{task}{f' ({scale})' if scale else ''} on {world_size} rank{'s' * (world_size != 1)}"


def label(compressor: str, ratio: float | None) -> str:
    """A scheme in words."""
    return compressor if ratio is None else f"{compressor} {ratio:g}"


def name_of_group(comparison: dict[str, Any]) -> str:
    """The group of a comparison in words."""
    return name_of(tuple(comparison[name] for name in GROUP))


def group_of(run: Run) -> tuple[Any, ...]:
    """Task, scale (None where the task has none) and world size."""
    return tuple(run["config"].get(name) for name in GROUP)


def _compare_group(key: tuple[Any, ...], runs: list[Run], baseline: list[Run], target: float | None) -> dict[str, Any]:
    baseline = baseline or [run for run in runs if run["config"]["compressor"] == "none"]
    if not baseline:
        raise ReportError(f"no run without compression ('none') of {name_of(key)}; add one, or give --baseline RUN")
    if len({scheme_of(run) for run in baseline}) > 1:
        schemes = ", ".join(sorted({label(*scheme_of(run)) for run in baseline}))
        raise ReportError(f"--baseline: several schemes ({schemes}) for {name_of(key)}; name runs of a single one")
    up = baseline[0]["higher_is_better"]
    given, source = target, "--target"
    if given is None:
        given, source = _default_target(key, baseline, up)
    to_target = statistics.median(reached(run, given, up)["seconds"] for run in baseline)
    per_second = statistics.median(run["samples_per_second"] for run in baseline)
    ordered = sorted([*runs, *(run for run in baseline if run not in runs)], key=order)
    rows = [row_of(run, given, up, to_target, per_second) for run in ordered]
    return {
        **dict(zip(GROUP, key, strict=True)),
        "metric_name": baseline[0]["metric_name"],
        "higher_is_better": up,
        "target": given,
        "target_source": source,
        "baseline": {
            "compressor": baseline[0]["config"]["compressor"],
            "ratio": scheme_of(baseline[0])[1],
            "runs": [run["name"] for run in baseline],
            "seconds_to_target": to_target if math.isfinite(to_target) else None,
            "samples_per_second": per_second,
        },
        "runs": rows,
        "schemes": over_seeds(rows),
        "notes": list(_notes(ordered, to_target)),
    }


def _default_target(key: tuple[Any, ...], baseline: list[Run], up: bool) -> tuple[float, str]:
    if baseline[0]["target"] is not None:
        return baseline[0]["target"], "the baseline's own target"
    finals = [run["evaluations"]["metric"][-1] for run in baseline if run["evaluations"]["metric"]]
    known = sorted(value for value in finals if value is not None)
    if not known:
        raise ReportError(f"the baseline of {name_of(key)} ends without a metric; give --target VALUE")
    several = f", the median of {len(known)} runs" if len(known) > 1 else ""
    middle = statistics.median_low(known) if up else statistics.median_high(known)
    return middle, f"the baseline's final metric{several}"


def _notes(runs: list[Run], to_target: float) -> Iterable[str]:
    if not math.isfinite(to_target):
        yield "the baseline does not reach the target, so there is no speed-up"
    for run in runs:
        if run["first_step"] > 1:
            yield f"{run['name']} goes on from a checkpoint: what came before step {run['first_step']} is not in it"
        if not run["complete"]:
            planned = run["config"].get("total_steps")
            yield f"{run['name']} was broken off after {run['steps']}{f' of {planned}' if planned else ''} steps"
    settings = [_flat(run["config"]) for run in runs]
    for name in dict.fromkeys(name for found in settings for name in found):
        values = {str(found.get(name)) for found in settings}
        if len(values) > 1:
            yield f"the runs differ in {name}: {', '.join(sorted(values))}"


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """What runs should have in common, the recipe's settings among the rest."""
    inner = {name: value for found in config.values() if isinstance(found, dict) for name, value in found.items()}
    outer = {name: value for name, value in config.items() if not isinstance(value, dict)}
    versions = config.get("versions", {})
    return {name: value for name, value in {**inner, **outer}.items() if name not in (*UNCOMPARED, *versions)}


def _place(group: tuple[tuple[Any, ...], list[Run]]) -> tuple[str, str, int]:
    task, scale, world_size = group[0]
    return task, scale or "", world_size


def order(run: Run) -> tuple[Any, ...]:
    """Compressors as the package lists them, large ratios first."""
    name, ratio = scheme_of(run)
    place = list(COMPRESSORS).index(name) if name in COMPRESSORS else len(COMPRESSORS)
    return place, name, -(ratio or 0.0), run["config"]["seed"], run["name"]
