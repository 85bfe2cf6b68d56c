"""The search for a threshold: fits and probes that narrow a bracket, and the correction that ends within the bound.

Too many selected: further stages on what is left. Too few: interpolate between the last threshold that selects too many
and the first that selects too few, where the logarithm of the count is roughly linear. Each round reads only the
exceedances of the highest threshold that selects too many. Ties are cut by taking only some of the entries that equal
the threshold; a stubborn tail ends in an exact top-k over the few exceedances that are left.
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
