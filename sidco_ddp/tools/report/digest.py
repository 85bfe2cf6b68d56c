"""What a report keeps of a run: exact statistics, every evaluation, and step curves thinned to a few points."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sidco_ddp.tools.report.records import Record

POINTS = 150  # of a curve, at most
WINDOW = 20  # steps of a running mean, at least
PARTS = ("data", "compute", "compress", "exchange", "optimizer", "step")  # of a step's time; "step" is all of it
LOWER_IS_BETTER = ("loss", "perplexity", "error", "cer", "wer")  # where a record does not say it
MAYBE = ("epoch", "train_loss", "bytes_sent")  # fields of an evaluation
DROPPED = ("quiet", "list_tasks", "download", "resume", "keep", "checkpoint_every")  # says nothing about the run


def digest(record: Record) -> dict[str, Any]:
    """All that tables and pictures are made of, as plain types, so that a pack gives the same ones.

    * `name`, `config` (without paths), `complete` (False where the run was broken off), `metric_name`,
      `higher_is_better`, `target` (that the run was given, or None), `seconds` (of the loop, evaluations included);
    * `first_step` (more than 1 where the run went on from a checkpoint, in a record of its own);
    * `steps`, `bytes_per_step` and `dense_bytes_per_step` (means over the steps, a rank's), and `samples_per_second`
      (all ranks' samples over the time of the steps alone);
    * `khat_over_k`, `raw_khat_over_k`: `spread` over the compressed steps, None where there are none;
    * `step_seconds`: `spread` over the steps for each of `PARTS`, None where the run did not record it;
    * `evaluations`: a list for each field;
    * `curves`: lists of at most `POINTS` entries, see `thin`.
    """
    config = _without_paths({name: value for name, value in record.config.items() if name not in DROPPED})
    steps, summary = record.steps, record.summary or {}
    step_seconds = sum(row["step_seconds"] for row in steps)
    elapsed = elapsed_seconds(steps, record.evaluations)
    metric_name = record.evaluations[-1]["metric_name"] if record.evaluations else config.get("metric_name")
    says = {**config, **summary}
    return {
        "name": record.folder.resolve().name,
        "config": config,
        "complete": record.summary is not None,
        "metric_name": metric_name,
        "higher_is_better": says.get("higher_is_better", not _counts_down(metric_name)),
        "target": says.get("target"),
        "seconds": summary.get("seconds", float(elapsed[-1])),
        "first_step": steps[0]["step"],
        "steps": len(steps),
        "samples_per_second": len(steps) * config["batch_size"] * config["world_size"] / step_seconds,
        "bytes_per_step": sum(row["bytes_sent"] for row in steps) / len(steps),
        "dense_bytes_per_step": sum(row["dense_bytes"] for row in steps) / len(steps),
        "khat_over_k": spread(row["khat_over_k"] for row in steps),
        "raw_khat_over_k": spread(row.get("raw_khat_over_k") for row in steps),
        "step_seconds": {part: spread(row.get(f"{part}_seconds") for row in steps) for part in PARTS},
        "evaluations": _columns(record.evaluations),
        "curves": thin(steps, elapsed),
    }


def spread(values: Iterable[float | None]) -> dict[str, Any] | None:
    """Count, mean, sample standard deviation (None of a single value), extremes, median and the 5th and 95th percentile
    (linear between values) of what is not None; None where nothing is left.
    """
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if not known.size:
        return None
    low, p5, median, p95, high = (float(value) for value in np.percentile(known, (0, 5, 50, 95, 100)))
    deviation = float(known.std(ddof=1)) if known.size > 1 else None
    # The sum in the order of the steps, so that the mean is the one in summary.json to the last digit.
    mean = sum(known.tolist()) / known.size
    return {
        "count": int(known.size),
        "mean": mean,
        "std": deviation,
        "min": low,
        "p5": p5,
        "median": median,
        "p95": p95,
        "max": high,
    }


def elapsed_seconds(steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> np.ndarray[Any, Any]:
    """Seconds from the start to the end of each step: the steps' own times, set right at every evaluation before it.

    Of a record that does not begin with the run, the first evaluation sets all steps right.
    """
    own = np.cumsum([row["step_seconds"] for row in steps])
    numbers = np.array([row["step"] for row in steps])
    between = np.zeros(len(steps))
    for evaluation in evaluations:
        done = int(np.searchsorted(numbers, evaluation["step"], side="right"))
        if done:
            if numbers[0] > 1 and not between.any():
                between[:done] = evaluation["seconds"] - own[done - 1]
            between[done:] = evaluation["seconds"] - own[done - 1]
    return np.asarray(own + between)


def thin(steps: Sequence[dict[str, Any]], elapsed: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Curves over the steps, at most `POINTS` of each, evenly spaced and ending with the last step.

    `loss` and `khat_over_k` are means over the last `window` steps, which is `WINDOW` or the distance of two points,
    whichever is more: no step is left out. `khat_over_k_min` and `khat_over_k_max` are over the steps since the point
    before. None stands where no step of the window has a value. Six significant digits.
    """
    count = min(POINTS, len(steps))
    ends = [len(steps) * (point + 1) // count for point in range(count)]
    window = max(WINDOW, -(-len(steps) // count))
    loss, quality = [numbers(row[name] for row in steps) for name in ("loss", "khat_over_k")]
    since = [quality[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return {
        "window": window,
        "step": [steps[end - 1]["step"] for end in ends],
        "seconds": [_short(elapsed[end - 1]) for end in ends],
        "loss": [_mean(loss[max(0, end - window) : end]) for end in ends],
        "khat_over_k": [_mean(quality[max(0, end - window) : end]) for end in ends],
        "khat_over_k_min": [_short(np.fmin.reduce(values)) for values in since],
        "khat_over_k_max": [_short(np.fmax.reduce(values)) for values in since],
    }


def _columns(evaluations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Evaluations by field, `metrics` by name too; of the fields that a record may lack, those that it has."""
    names = ["step", "seconds", "metric", *(name for name in MAYBE if any(name in row for row in evaluations))]
    columns: dict[str, Any] = {name: [row.get(name) for row in evaluations] for name in names}
    several = [row.get("metrics") or {} for row in evaluations]
    others = dict.fromkeys(name for row in several for name in row)
    if others:
        columns["metrics"] = {name: [row.get(name) for row in several] for name in others}
    return columns


def numbers(values: Iterable[float | None]) -> np.ndarray[Any, Any]:
    """As float64, NaN for None."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _mean(values: np.ndarray[Any, Any]) -> float | None:
    known = values[~np.isnan(values)]
    return _short(known.mean()) if known.size else None


def _short(value: float) -> float | None:
    return None if np.isnan(value) else float(f"{value:.6g}")


def _without_paths(config: dict[str, Any]) -> dict[str, Any]:
    """What is a path, or by its name a folder, tells of a machine and not of the run."""
    kept = {name: value for name, value in config.items() if not name.endswith("_dir") and not _is_path(value)}
    return {name: _without_paths(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and ("/" in value or "\\" in value)


def _counts_down(metric_name: str | None) -> bool:
    return any(word in (metric_name or "").lower().split("_") for word in LOWER_IS_BETTER)
