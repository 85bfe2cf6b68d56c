"""Moments of magnitudes, and tail quantiles of the sparsity-inducing distributions fitted to them.

Everything here is about positive numbers and probabilities; nothing knows of gradients, indices or ranks.
Corollary, lemma and equation names are those of the SIDCo paper (MLSys 2021).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

PIECE = 1 << 18  # elements; a float64 copy of one piece (2 MiB) stays in a core's cache


class Moments(NamedTuple):
    """Sample moments of ``y = x - location`` over the values ``x`` that exceed ``location``."""

    mean: float
    variance: float  # population variance, never negative
    mean_log: float  # mean of ln(y); NaN unless it was asked for
    minimum: float  # of x, not of y
    maximum: float  # of x, not of y


class Fit(NamedTuple):
    """One fitted family: its tail quantile, and whether it needs the mean logarithm."""

    quantile: Callable[[Moments, float], float]
    needs_log: bool


def moments(values: Tensor, location: float = 0.0, *, with_log: bool = False) -> Moments:
    """Moments of ``values - location``.

    Args:
        values: 1-D float tensor, not empty, every entry above ``location``.
        location: where the excess starts; the last stage's threshold.
        with_log: also compute the mean of the logarithm (the gamma fit needs it).

    The sums are taken in float64 over cache-sized pieces: squares of denormals and of 1e30 both survive.
    """
    total = squares = logs = 0.0
    minimum, maximum = math.inf, -math.inf
    sums = _sums_on_cpu if values.device.type == "cpu" else _sums
    for piece in torch.split(values, PIECE):
        low, high, first, second, third = sums(piece, location, with_log)
        minimum, maximum = min(minimum, low), max(maximum, high)
        total, squares, logs = total + first, squares + second, logs + third
    count = values.numel()
    mean = total / count
    mean_log = logs / count if with_log else math.nan
    return Moments(mean, max(squares / count - mean * mean, 0.0), mean_log, minimum, maximum)


def _sums(piece: Tensor, location: float, with_log: bool) -> tuple[float, ...]:
    """Minimum and maximum of a piece; sums of its excess, the square of it, and the logarithm if that is wanted."""
    low, high = torch.aminmax(piece)
    excess = piece.double().sub_(location)
    first, second = excess.sum(), torch.dot(excess, excess)
    logs = excess.log_().sum() if with_log else excess.new_zeros(())
    return tuple(torch.stack([low.double(), high.double(), first, second, logs]).tolist())


def _sums_on_cpu(piece: Tensor, location: float, with_log: bool) -> tuple[float, ...]:
    """The same by numpy: a pass over so little is over before torch has woken its second thread."""
    values = piece.numpy()
    excess = values.astype(np.float64)
    excess -= location
    logs = float(np.log(excess).sum()) if with_log else 0.0
    first = float(excess.sum())
    return float(values.min()), float(values.max()), first, float(np.square(excess, out=excess).sum()), logs


def exponential_quantile(fit: Moments, tail: float) -> float:
    """Value exceeded with probability ``tail`` under the fitted exponential: ``-mean * ln(tail)`` (Corollary 1.1)."""
    return -fit.mean * math.log(tail)


def generalized_pareto_quantile(fit: Moments, tail: float) -> float:
    """Value exceeded with probability ``tail`` under the moment-matched generalized Pareto (Corollary 1.3, Lemma 2).

    With ``r = mean² / variance``: shape ``(1 - r) / 2``, scale ``mean (r + 1) / 2``. The shape is held in [-1/2, 1/2),
    and the scale follows from the held shape, ``mean (1 - shape)``, which keeps the fitted mean equal to the sample's.
    """
    r = min(fit.mean**2 / fit.variance, 2.0) if fit.variance > 0.0 else 2.0
    shape = min((1.0 - r) / 2.0, 0.5 - 1e-9)
    scale = fit.mean * (1.0 - shape)
    if abs(shape) < 1e-9:
        return -scale * math.log(tail)
    return scale / shape * math.expm1(-shape * math.log(tail))


def gamma_quantile(fit: Moments, tail: float) -> float:
    """Approximate value exceeded with probability ``tail`` under the fitted gamma, never below 0 (Corollary 1.2).

    With ``s = ln(mean) - mean(ln y)``: shape ``(3 - s + sqrt((s - 3)² + 24 s)) / (12 s)``, scale ``mean / shape``,
    quantile ``-scale (ln(tail) + ln Γ(shape))``. The bound behind it holds for shapes up to 1.
    """
    s = max(math.log(fit.mean) - fit.mean_log, 1e-12)  # 0 for constants, by rounding even below
    shape = (3.0 - s + math.sqrt((s - 3.0) ** 2 + 24.0 * s)) / (12.0 * s)
    return max(-fit.mean / shape * (math.log(tail) + math.lgamma(shape)), 0.0)


EXPONENTIAL = Fit(exponential_quantile, needs_log=False)
GENERALIZED_PARETO = Fit(generalized_pareto_quantile, needs_log=False)
GAMMA = Fit(gamma_quantile, needs_log=True)
