"""From magnitudes and a target count to a threshold: multi-stage estimation, and the correction that bounds it.

The plan (paper, section 2.4, Lemma 2; ``docs/algorithm.md`` says where and why this differs):

1. Stage ``m`` fits a distribution to the exceedances over the last threshold (peaks over threshold) and moves the
   threshold up by the quantile at the tail that is still missing.
2. The count after the last stage is the *raw* count. Too many: further stages on what is left. Too few: interpolate
   between the last threshold that selects too many and the first that selects too few, where the logarithm of the
   count is roughly linear. Each round reads only the exceedances of the highest threshold that selects too many.
3. Ties are cut by taking only some of the entries that equal the threshold; a stubborn tail ends in an exact top-k
   over the few exceedances that are left.

A *warm* estimate has its first stage from the last call: the last threshold, lowered by a margin, and what exceeds it.
One fit over those exceedances gives the raw count, and the correction is the same.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sidco_ddp.distributions import Fit, Moments, moments
from sidco_ddp.kernels import magnitudes_above

MAX_ROUNDS = 32  # of the correction; real gradients need 2 to 6
FEW = 1024  # exceedances below which an exact top-k costs less than another round


class Estimate(NamedTuple):
    """A threshold and what it selects: entries with magnitude above it, and ``ties`` entries equal to it."""

    threshold: float
    ties: int
    selected: int  # k̂, ties included
    raw_count: int  # k̂ before the correction
    stages: int  # stages behind raw_count
    rounds: int  # stages and correction rounds together
    touched: int  # elements read, over all rounds


@dataclass(frozen=True)
class Exceedances:
    """The magnitudes above a threshold."""

    threshold: float
    values: Tensor

    @property
    def count(self) -> int:
        """How many there are."""
        return self.values.numel()


def max_stages(ratio: float) -> int:
    """Upper bound of the stage count: ``ceil(log2(1 / ratio))``; 1 where the first stage's tail would do alone."""
    return 1 if ratio >= 0.25 else math.ceil(math.log2(1.0 / ratio))


def acceptance(k: int, tolerance: float) -> tuple[int, int]:
    """Smallest and largest count accepted for a target of ``k``: within ``tolerance * k``, and k is always inside."""
    slack = math.floor(tolerance * k + 1e-9)
    return k - slack, k + slack


def to_float32(value: float) -> float:
    """``value`` rounded as a float32 comparison would see it (overflow becomes infinity)."""
    return torch.tensor(value, dtype=torch.float64).float().item()


class Search:
    """One estimation: the bracket around the wanted threshold, narrowed by every probe.

    ``low`` selects too many (or just enough), ``high`` too few; ``high_count`` is at least 0.
    """

    def __init__(self, low: Exceedances, k: int, tolerance: float, touched: int) -> None:
        self.k = k
        self.accepted = acceptance(k, tolerance)
        self.low = low
        self.high = math.inf
        self.high_count = 0
        self.rounds = 0
        self.touched = touched

    def fit(self, exceedances: Exceedances, fit: Fit, tail: float) -> tuple[Moments, float]:
        """Moments of the exceedances, and the threshold that leaves the share ``tail`` of them."""
        found = moments(exceedances.values, exceedances.threshold, with_log=fit.needs_log)
        self.touched += exceedances.count
        threshold = exceedances.threshold + fit.quantile(found, min(tail, 1.0))
        return found, to_float32(min(threshold, found.maximum))

    def probe(self, threshold: float, start: Exceedances | None = None) -> Exceedances:
        """The exceedances of ``threshold`` among those of ``start`` (default ``low``); narrows the bracket."""
        start = start or self.low
        self.rounds += 1
        self.touched += start.count
        found = Exceedances(threshold, magnitudes_above(start.values, threshold))
        if found.count >= self.k and threshold >= self.low.threshold:
            self.low = found
        elif found.count < self.k and threshold <= self.high:
            self.high, self.high_count = threshold, found.count
        return found

    def next_threshold(self, fit: Fit, bisect: bool) -> tuple[float, float]:
        """Smallest exceedance in ``low``, and the next threshold to try: from there up to below ``high``."""
        found, threshold = self.fit(self.low, fit, self.k / self.low.count)
        floor, ceiling = found.minimum, min(self.high, found.maximum)
        if math.isfinite(self.high) and not bisect:
            span = math.log(self.low.count) - math.log(max(self.high_count, 0.5))
            share = (math.log(self.low.count) - math.log(self.k)) / span
            threshold = self.low.threshold + (ceiling - self.low.threshold) * share
        elif bisect:  # magnitudes may span many powers of ten: halve the exponent, not the number
            threshold = math.sqrt(floor) * math.sqrt(ceiling)
        threshold = to_float32(min(max(threshold, floor), ceiling))
        return floor, threshold if threshold < self.high else floor  # never probe the same place twice

    def correct(self, current: Exceedances, fit: Fit, few: int) -> Estimate:
        """The estimate that ``current`` is, or that the correction makes of it.

        ``few``: at or below this many exceedances the rest is left to an exact top-k.
        """
        lowest, highest = self.accepted
        raw_count, stages = current.count, self.rounds
        if lowest <= raw_count <= highest:
            return Estimate(current.threshold, 0, raw_count, raw_count, stages, stages, self.touched)
        for attempt in range(MAX_ROUNDS):
            if self.low.count <= few:
                break
            floor, threshold = self.next_threshold(fit, bisect=attempt % 3 == 2)
            found = self.probe(threshold)
            if lowest <= found.count <= highest:
                return Estimate(threshold, 0, found.count, raw_count, stages, self.rounds, self.touched)
            if threshold == floor and found.count < self.k:  # the k-th largest equals the smallest: cut the tie
                ties = self.k - found.count
                return Estimate(floor, ties, self.k, raw_count, stages, self.rounds, self.touched)
        return self.exact(raw_count, stages)

    def exact(self, raw_count: int, stages: int) -> Estimate:
        """Exactly k of the exceedances of ``low``, by top-k."""
        kth = torch.topk(self.low.values, self.k, sorted=False).values.amin().item()
        self.touched += self.low.count
        above = int((self.low.values > kth).sum())
        return Estimate(kth, self.k - above, self.k, raw_count, stages, self.rounds + 1, self.touched)


def estimate_threshold(
    magnitudes: Tensor,
    k: int,
    first: Fit,
    later: Fit,
    stages: int,
    *,
    first_tail: float = 0.25,
    tolerance: float = 0.2,
    bounded: bool = True,
    nominal: bool = False,
) -> Estimate:
    """Threshold that about ``k`` of the magnitudes exceed.

    Args:
        magnitudes: 1-D float32 tensor, finite, not negative; zeros take no part in any fit.
        k: target count, at least 1.
        first: the distribution of the first stage.
        later: the distribution of the stages after it, and of the correction.
        stages: the stage count M, at least 1.
        first_tail: share of the non-zeros that the first of several stages keeps (the paper's δ₁).
        tolerance: half-width ε of the accepted counts, as a share of k.
        bounded: correct the estimate until the count is accepted.
        nominal: ask every stage for the paper's nominal tail δ_m instead of the tail that is really missing.

    Returns:
        An :class:`Estimate`; with ``bounded`` its count is within ``tolerance * k`` of k on every finite input
        (``docs/algorithm.md``, "Why the correction exists"), or all non-zeros where there are fewer than k.
    """
    nonzeros = int(torch.count_nonzero(magnitudes))
    values = magnitudes if nonzeros == magnitudes.numel() else magnitudes_above(magnitudes, 0.0)
    search = Search(Exceedances(0.0, values), k, tolerance, magnitudes.numel())
    highest = search.accepted[1]
    if nonzeros <= (highest if bounded else k):
        return Estimate(0.0, 0, nonzeros, nonzeros, 0, 0, search.touched)

    current = search.low
    for stage in range(1, stages + 1):
        tail = _stage_tail(stage, stages, k / nonzeros, k / current.count, first_tail, nominal)
        _, threshold = search.fit(current, first if stage == 1 else later, tail)
        current = search.probe(threshold, start=current)
        if current.count == 0 or (not nominal and current.count <= highest):
            break
    if not bounded:
        count, used = current.count, search.rounds
        return Estimate(current.threshold, 0, count, count, used, used, search.touched)
    return search.correct(current, later, few=min(FEW, nonzeros - 1))


def refine_threshold(
    threshold: float, magnitudes: Tensor, k: int, fit: Fit, *, tolerance: float, touched: int
) -> Estimate:
    """:func:`estimate_threshold` where the first stage is known: ``magnitudes`` are all that exceed ``threshold``.

    Args:
        threshold: the first stage.
        magnitudes: 1-D float32 tensor, every entry above ``threshold``; at least as many as accepted for ``k``,
            or all non-zeros.
        k: target count.
        fit: the distribution of the second stage and of the correction.
        tolerance: half-width of the accepted counts.
        touched: elements read to find ``magnitudes``.
    """
    current = Exceedances(threshold, magnitudes)
    search = Search(current, k, tolerance, touched)
    search.rounds = 1
    if current.count <= search.accepted[1]:  # or all non-zeros
        return Estimate(threshold, 0, current.count, current.count, 1, 1, touched)
    current = search.probe(search.fit(current, fit, k / current.count)[1])
    return search.correct(current, fit, few=FEW)


def _stage_tail(stage: int, stages: int, overall: float, missing: float, first_tail: float, nominal: bool) -> float:
    """Tail asked of a stage (counted from 1): δ₁ first, what is left shared geometrically (paper, section 2.4)."""
    if stages == 1 or overall >= first_tail:
        return overall if stage == 1 else 1.0 if nominal else missing
    if stage == 1:
        return first_tail
    if nominal:
        return float((overall / first_tail) ** (1.0 / (stages - 1)))
    return float(missing ** (1.0 / (stages - stage + 1)))
