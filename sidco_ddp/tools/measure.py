"""Timing of compress steps: interleaved over the compressors, beside the addition that none of them can avoid."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sidco_ddp import make_compressor
from sidco_ddp.feedback import ErrorFeedback
from sidco_ddp.tools import memory
from sidco_ddp.tools.sources import SOURCES
from sidco_ddp.tools.step import Step

FLOOR = "floor"


@dataclass(frozen=True)
class Case:
    """One table: the same gradients for every compressor."""

    device: str
    label: str
    elements: int
    source: str
    ratio: float

    @property
    def keeps_residuals(self) -> bool:
        """Whether every scheme is fed its own residual; else targets are the gradients, as the source draws them."""
        return self.source == "error-fed"

    def needed_bytes(self, num_compressors: int) -> int:
        """Memory that the case needs, roughly: gradient, floor, drawing or estimating, and two buffers a feedback."""
        feedbacks = num_compressors if self.keeps_residuals else 1
        return 4 * self.elements * (4 + 6 + 2 * feedbacks)


def run_case(case: Case, names: Sequence[str], *, repeats: int, warmup: int, seed: int) -> dict[str, Any]:
    """Times, counts and memory of every compressor on one case, as plain types (``docs/benchmarks.md`` lists them)."""
    device = torch.device(case.device)
    draw = torch.Generator(device).manual_seed(seed)
    fill = SOURCES[case.source]
    drawn, gradient, residual, target = (torch.empty(case.elements, device=device) for _ in range(4))
    residual.zero_()
    fill(drawn, 0, draw)
    gradient.copy_(drawn)
    for name in names:  # code and pools that a first use brings in are no scheme's own
        _refilled(_make_step(case, name), drawn)(gradient)
    memories = {
        name: memory.measure(lambda name=name: _refilled(_make_step(case, name), drawn), gradient)  # type: ignore[misc]
        for name in names
    }
    # where the residual is taken back after every step, one will do for all
    shared = None if case.keeps_residuals else ErrorFeedback()
    steps = {name: _make_step(case, name, shared) for name in names}

    def add(gradient: Tensor) -> int:
        torch.add(gradient, residual, out=target)
        return 0

    runners: dict[str, Callable[[Tensor], int]] = {FLOOR: add, **steps}
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    counts: dict[str, list[int]] = {name: [] for name in runners}
    for repeat in range(warmup + repeats):
        fill(drawn, repeat, draw)
        for name in _rotated(list(runners), repeat):
            gradient.copy_(drawn)
            elapsed, count = _timed(runners[name], gradient, device)
            if name in steps and not case.keeps_residuals:
                steps[name].forget()
            if repeat >= warmup:
                seconds[name].append(elapsed)
                counts[name].append(count)
    k = max(1, round(case.ratio * case.elements))
    floor = summary(seconds[FLOOR])
    topk = summary(seconds["topk"])["median"] if "topk" in steps else None
    results = []
    for name in names:
        times = summary(seconds[name])
        quality = [count / steps[name].k for count in counts[name]]
        results.append(
            {
                "compressor": name,
                "seconds": times,
                "ns_per_element": times["median"] / case.elements * 1e9,
                "times_floor": times["median"] / floor["median"],
                "speedup_over_topk": None if topk is None else topk / times["median"],
                "khat_over_k": summary(quality) | {"mean": float(np.mean(quality))},
                "held_bytes": memories[name].held,
                "scratch_bytes": memories[name].scratch,
            }
        )
    return {
        "device": case.device,
        "label": case.label,
        "elements": case.elements,
        "source": case.source,
        "ratio": case.ratio,
        "k": k,
        "floor_seconds": floor,
        "results": results,
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and spread."""
    names = ("min", "q1", "median", "q3", "max")
    return dict(zip(names, map(float, np.percentile(values, (0, 25, 50, 75, 100))), strict=True))


def _make_step(case: Case, name: str, feedback: ErrorFeedback | None = None) -> Step:
    return Step(make_compressor(name, ratio=case.ratio), case.elements, feedback)


def _refilled(step: Step, drawn: Tensor) -> Callable[[Tensor], int]:
    """The step on the same gradient each time: a step overwrites its own, as the hook's bucket is."""

    def run(gradient: Tensor) -> int:
        gradient.copy_(drawn)
        return step(gradient)

    return run


def _rotated(names: list[str], by: int) -> list[str]:
    """Another one begins in every round: none is always the first to read a fresh gradient."""
    by %= len(names)
    return list(itertools.chain(names[by:], names[:by]))


def _timed(run: Callable[[Tensor], int], gradient: Tensor, device: torch.device) -> tuple[float, int]:
    """Seconds until everything that ``run`` started is done, and what it returned."""
    _synchronise(device)
    started = time.perf_counter()
    count = run(gradient)
    _synchronise(device)
    return time.perf_counter() - started, count


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
