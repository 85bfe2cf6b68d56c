"""From magnitudes and a target count to a threshold: multi-stage estimation, and the correction that bounds it.

Stage ``m`` fits a distribution to the exceedances over the last threshold (peaks over threshold) and moves the
threshold up by the quantile at the tail that is still missing (paper, section 2.4, Lemma 2; ``docs/algorithm.md`` says
where and why this differs). The count after the last stage is the *raw* count; :mod:`sidco_ddp.search` corrects it.

A *warm* estimate has its first stage from the last call: the last threshold, lowered by a margin, and what exceeds it.
One fit over those exceedances gives the raw count, and the correction is the same.
"""

import math

import torch
from torch import Tensor

from sidco_ddp.distributions import Fit
from sidco_ddp.kernels import magnitudes_above
from sidco_ddp.search import FEW, Estimate, Exceedances, Search


def max_stages(ratio: float) -> int:
    """Upper bound of the stage count: ``ceil(log2(1 / ratio))``; 1 where the first stage's tail would do alone."""
    return 1 if ratio >= 0.25 else math.ceil(math.log2(1.0 / ratio))


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
