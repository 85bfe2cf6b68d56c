"""SIDCo: the threshold that keeps about ``ratio`` of a vector, from fits of sparsity-inducing distributions."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from sidco_ddp.compressors.base import AbstractCompressor, Report
from sidco_ddp.compressors.stages import StageCount, adapt_by_paper, adapt_by_record
from sidco_ddp.compressors.warm import WarmStart
from sidco_ddp.distributions import EXPONENTIAL, GAMMA, GENERALIZED_PARETO, Fit
from sidco_ddp.kernels import magnitudes_of
from sidco_ddp.options import check_choice, check_count, check_flag, check_number
from sidco_ddp.payload import SparsePayload, empty, largest, narrow, select_above
from sidco_ddp.search import Estimate, acceptance
from sidco_ddp.target import Target
from sidco_ddp.threshold import estimate_threshold, max_stages, refine_threshold

FITS = {  # first stage, later stages and correction
    "exponential": (EXPONENTIAL, EXPONENTIAL),
    "pareto": (GENERALIZED_PARETO, GENERALIZED_PARETO),
    "gamma-pareto": (GAMMA, GENERALIZED_PARETO),
}
STAGE_RULES = {"learned": adapt_by_record, "paper": adapt_by_paper}


class SidcoState(NamedTuple):
    """What SIDCo carries from call to call on one bucket."""

    stages: StageCount = StageCount()
    warm: WarmStart = WarmStart()
    report: Report = Report()


@dataclass(frozen=True, kw_only=True)
class SidcoCompressor(AbstractCompressor[SidcoState]):
    """Multi-stage threshold estimation (SIDCo, MLSys 2021, section 2.4 and Algorithm 1).

    Attributes:
        fits: ``"exponential"`` (the paper's SIDCo-E), ``"pareto"`` (SIDCo-P) or ``"gamma-pareto"`` (SIDCo-GP).
        stages: fixed stage count M; None adapts it every ``adapt_every`` calls.
        stage_rule: how M adapts. ``"learned"`` moves towards the M whose raw count was nearest to k;
            ``"paper"`` is Algorithm 1, whose stages ask for nominal tails.
        bounded: correct the count to within ``tolerance``. With False and ``stage_rule="paper"`` this
            is the published method.
        tolerance: ε, as a share of k.
        first_tail: δ₁, the share of the non-zeros that the first of several stages keeps.
        adapt_every: Q, cold calls between two changes of M.
        warm_start: begin with the last call's threshold, so that the vector is read once; the stages are for calls
            that have no use for it. Never with ``bounded=False`` or ``stage_rule="paper"``.
    """

    fits: str = "exponential"
    stages: int | None = None
    stage_rule: str = "learned"
    bounded: bool = True
    tolerance: float = 0.2
    first_tail: float = 0.25
    adapt_every: int = 5
    warm_start: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.fits, "fits", tuple(FITS))
        check_choice(self.stage_rule, "stage_rule", tuple(STAGE_RULES))
        check_flag(self.bounded, "bounded")
        check_flag(self.warm_start, "warm_start")
        check_number(self.tolerance, "tolerance", 0.0, "0.2 is the paper's")
        check_number(self.first_tail, "first_tail", 1e-6, "0.25 is the paper's")
        check_count(self.adapt_every, "adapt_every", 1, "5 is the paper's")
        if self.stages is not None:
            check_count(self.stages, "stages", 1, "None adapts the stage count")
        if self.tolerance >= 1.0 or self.first_tail >= 1.0:
            raise ValueError(f"tolerance and first_tail must be below 1, got {self.tolerance} and {self.first_tail}")

    @property
    def holds_count(self) -> bool:
        """Only the correction holds the count."""
        return self.bounded

    @property
    def max_stages(self) -> int:
        """Largest stage count that adaptation tries: ``ceil(log2(1 / ratio))``."""
        return max_stages(self.ratio)

    def init(self, numel: int) -> SidcoState:
        """One stage, nothing measured."""
        return SidcoState(StageCount(self.stages or 1))

    def compress(self, vector: Tensor, state: SidcoState) -> tuple[SparsePayload, SidcoState]:
        """The entries of ``vector`` above the estimated threshold."""
        return self.select(Target(vector), state)

    def select(self, target: Target, state: SidcoState) -> tuple[SparsePayload, SidcoState]:
        """The entries of ``target`` above the estimated threshold; nothing where it is not finite."""
        k = self.target_count(target.numel)
        warm = state.warm
        limit = WarmStart.limit(k, target.numel)
        wasted = 0
        if self.warm_start and self.bounded and self.stage_rule != "paper" and warm.known and limit < target.numel:
            first = warm.first_threshold
            found = target.above(first, limit)
            if not target.finite:
                return empty(target.dense()), state
            warm = warm.follow(found.total, k)
            if found.total <= limit and (found.total >= acceptance(k, self.tolerance)[0] or first == 0.0):
                base = SparsePayload(found.values, found.indices, target.numel)
                if found.mean is not None and found.total > k:
                    return self._warm_on_device(base, first, found.mean, k, state.stages, warm)
                return self._warm(base, first, k, state.stages, warm)
            wasted = target.numel
        elif not target.finite:
            return empty(target.dense()), state
        estimate, stages = self._cold(target.dense(), k, state.stages)
        report = _report(estimate, warm=False)._replace(touched=estimate.touched + wasted)
        if estimate.ties:
            payload = select_above(target.dense(), estimate.threshold, estimate.ties)
        else:
            found = target.above(estimate.threshold)
            payload = SparsePayload(found.values, found.indices, target.numel)
        return payload, SidcoState(stages, warm.after(estimate.threshold), report)

    def _warm(
        self, base: SparsePayload, first: float, k: int, stages: StageCount, warm: WarmStart
    ) -> tuple[SparsePayload, SidcoState]:
        """From the exceedances of the carried threshold alone."""
        found = refine_threshold(
            first, magnitudes_of(base.values), k, self._fits[1], tolerance=self.tolerance, touched=base.numel
        )
        payload = base if found.threshold == first else narrow(base, found.threshold, found.ties)
        return payload, SidcoState(stages, warm.after(found.threshold), _report(found, warm=True))

    def _warm_on_device(
        self, base: SparsePayload, first: float, mean: float, k: int, stages: StageCount, warm: WarmStart
    ) -> tuple[SparsePayload, SidcoState]:
        """The same with no further host round trip: the correction is the exact top-k of the exceedances.

        The next threshold is the exponential fit's, from the mean that came with the count; rounds of counting would
        each wait for the device. The carried threshold's own count stands for the raw count.
        """
        threshold = first + (mean - first) * math.log(base.count / k)
        report = Report(base.count, 1, 2, base.numel + base.count, threshold, warm=True)
        return largest(base, k), SidcoState(stages, warm.after(threshold), report)

    def _cold(self, vector: Tensor, k: int, stages: StageCount) -> tuple[Estimate, StageCount]:
        """From fits over the whole vector."""
        first, later = self._fits
        found = estimate_threshold(
            vector.abs(),
            k,
            first,
            later,
            stages.current,
            first_tail=self.first_tail,
            tolerance=self.tolerance,
            bounded=self.bounded,
            nominal=self.stage_rule == "paper",
        )
        if found.stages == 0:  # hardly more non-zeros than k: nothing was fitted, nothing is learnt
            return found, stages
        return found, self._adapt(stages, found.raw_count / k)

    @property
    def _fits(self) -> tuple[Fit, Fit]:
        return FITS[self.fits]

    def _adapt(self, stages: StageCount, quality: float) -> StageCount:
        """Count the call, and every ``adapt_every`` calls let the rule choose the next M."""
        stages = stages._replace(calls=stages.calls + 1, total=stages.total + quality)
        if self.stages is not None or stages.calls < self.adapt_every:
            return stages
        return STAGE_RULES[self.stage_rule](stages, self.tolerance, self.max_stages)


def _report(found: Estimate, *, warm: bool) -> Report:
    return Report(found.raw_count, found.stages, found.rounds, found.touched, found.threshold, warm)
