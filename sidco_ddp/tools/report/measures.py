"""What each run and each scheme comes to, against a baseline's time and throughput."""

import math
import statistics
from collections.abc import Iterable
from typing import Any

from sidco_ddp.tools.report.digest import PARTS

Run = dict[str, Any]  # a digest
Z90 = statistics.NormalDist().inv_cdf(0.95)  # 1.645: two-sided 90 %
OUTERMOST = {"p5": min, "p95": max, "min": min, "max": max}


def reached(run: Run, target: float, up: bool) -> dict[str, Any]:
    """Seconds, steps and a rank's bytes at the first evaluation that reaches the target."""
    evaluations = run["evaluations"]
    for place, metric in enumerate(evaluations["metric"]):
        if metric is not None and (metric >= target if up else metric <= target):
            sent = evaluations.get("bytes_sent")
            place_of = {"seconds": evaluations["seconds"][place], "steps": evaluations["step"][place]}
            return {**place_of, "bytes": sent[place] if sent else None}
    return {"seconds": math.inf, "steps": None, "bytes": None}


def row_of(run: Run, target: float, up: bool, to_target: float, per_second: float) -> dict[str, Any]:
    """The measures of one run, given the baseline's seconds to the target and samples a second."""
    first = reached(run, target, up)
    seconds = first["seconds"]
    name, ratio = scheme_of(run)
    metrics, quality = run["evaluations"]["metric"], run["khat_over_k"]
    return {
        "name": run["name"],
        "compressor": name,
        "ratio": ratio,
        "seed": run["config"]["seed"],
        "complete": run["complete"],
        "planned_steps": run["config"].get("total_steps"),
        "metric": metrics[-1] if metrics else None,
        "steps": run["steps"],
        "seconds": run["seconds"],
        "seconds_to_target": seconds if math.isfinite(seconds) else None,
        "steps_to_target": first["steps"],
        "bytes_to_target": first["bytes"],
        "speedup": to_target / seconds if math.isfinite(to_target) and seconds else None,
        "samples_per_second": run["samples_per_second"],
        "throughput": run["samples_per_second"] / per_second,
        "khat_over_k": {**quality, "ci90": _interval(quality)} if quality else None,
        "bytes_per_step": run["bytes_per_step"],
        "reduction": run["dense_bytes_per_step"] / run["bytes_per_step"] if run["bytes_per_step"] else None,
        "seconds_per_step": {part: (run["step_seconds"][part] or {}).get("mean") for part in PARTS},
    }


def _interval(quality: dict[str, Any]) -> list[float] | None:
    if quality["std"] is None:
        return None
    half = Z90 * quality["std"] / math.sqrt(quality["count"])
    return [quality["mean"] - half, quality["mean"] + half]


def over_seeds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of one compressor and ratio, over their seeds."""
    found: dict[tuple[str, Any], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["compressor"], row["ratio"]), []).append(row)
    return [
        {
            "compressor": name,
            "ratio": ratio,
            "seeds": [row["seed"] for row in same],
            "reached": sum(row["seconds_to_target"] is not None for row in same),
            **{field: _range(row[field] for row in same) for field in ("metric", "speedup", "throughput", "reduction")},
            "khat_over_k": _quality_range([row["khat_over_k"] for row in same if row["khat_over_k"]]),
        }
        for (name, ratio), same in found.items()
    ]


def _range(values: Iterable[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"mean": statistics.fmean(known), "min": min(known), "max": max(known)} if known else None


def _quality_range(qualities: list[dict[str, Any]]) -> dict[str, float] | None:
    """The mean of the seeds' means, and the outermost of their percentiles and extremes."""
    if not qualities:
        return None
    outermost = {name: choose(quality[name] for quality in qualities) for name, choose in OUTERMOST.items()}
    return {"mean": statistics.fmean(quality["mean"] for quality in qualities), **outermost}


def scheme_of(run: Run) -> tuple[str, float | None]:
    """Compressor and ratio; what is sent whole has none."""
    name = run["config"]["compressor"]
    return name, None if name == "none" else run["config"]["ratio"]
