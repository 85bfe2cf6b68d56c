"""Passes over a whole vector that leave nothing of its size behind."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CPU_PIECE = 1 << 18  # elements; the temporaries of one piece (1 MiB) stay in a core's cache
DEVICE_PIECE = 1 << 24  # on an accelerator few large launches are better, and 64 MiB are little
SAFE_SQUARES = (1e-25, 1e25)  # mean squares whose float32 sums neither overflow nor lose digits to denormals


class Scale(NamedTuple):
    """Size of a vector's magnitudes."""

    mean: float
    maximum: float


class Spread(NamedTuple):
    """Mean and standard deviation of a vector's signed entries."""

    mean: float
    deviation: float


def pieces(vector: Tensor) -> Sequence[Tensor]:
    """Views that together are ``vector``, each small enough for a temporary of its size."""
    return torch.split(vector, CPU_PIECE if vector.device.type == "cpu" else DEVICE_PIECE)


def count_above(vector: Tensor, threshold: float) -> int:
    """How many magnitudes are above ``threshold``."""
    counts = [torch.count_nonzero(piece.abs() > threshold) for piece in pieces(vector)]
    return int(torch.stack(counts).sum())


def magnitude_scale(vector: Tensor) -> Scale:
    """Mean and maximum of the magnitudes of ``vector`` (not empty)."""
    sums, extremes = [], []
    for piece in pieces(vector):
        sums.append(piece.abs().sum())
        extremes.append(torch.stack(torch.aminmax(piece)))
    maximum = torch.stack(extremes).abs().max().item()
    total = torch.stack(sums).double().sum().item()
    if not math.isfinite(total):  # a piece's float32 sum overflowed: the same in float64
        total = sum(piece.double().abs().sum().item() for piece in pieces(vector))
    return Scale(total / vector.numel(), maximum)


def signed_spread(vector: Tensor) -> Spread:
    """Mean and population standard deviation of the entries of ``vector`` (not empty), signs included."""
    mean, square = _mean_and_square(vector, wide=False)
    if not SAFE_SQUARES[0] < square < SAFE_SQUARES[1] or square < 2.0 * mean * mean:  # else float32 would do harm
        mean, square = _mean_and_square(vector, wide=True)
    return Spread(mean, math.sqrt(max(square - mean * mean, 0.0)))


def _mean_and_square(vector: Tensor, wide: bool) -> tuple[float, float]:
    """Mean and mean square; pieces are summed in float32 or float64, their sums always in float64."""
    sums, squares = [], []
    for piece in pieces(vector):
        values = piece.double() if wide else piece
        sums.append(values.sum())
        squares.append(torch.dot(values, values))
    totals = torch.stack([torch.stack(sums).double().sum(), torch.stack(squares).double().sum()])
    total, square = (totals / vector.numel()).tolist()
    return total, square
