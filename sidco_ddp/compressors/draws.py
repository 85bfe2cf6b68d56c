"""Random draws from a seed and a call counter, the same on every rank; torch's global generator is never touched."""

import math
import zlib

import torch
from torch import Tensor

SMALL = 1024  # numel up to which a permutation is cheaper than anything clever


def generator(seed: int, call: int, numel: int) -> torch.Generator:
    """A CPU generator for one call, equal wherever ``seed``, ``call`` and ``numel`` are.

    The three are hashed, for torch's CPU generator reads 32 bits of its seed, and neighbouring seeds should not meet.
    """
    return torch.Generator().manual_seed(zlib.crc32(repr((seed, call, numel)).encode()))


def draw_integer(source: torch.Generator, below: int) -> int:
    """A uniform integer in [0, below)."""
    return int(torch.randint(below, (1,), generator=source))


def draw_subset(source: torch.Generator, numel: int, count: int) -> Tensor:
    """A uniform subset of ``count`` of the first ``numel`` integers, ascending (int64, on the CPU).

    The work is that of sorting ``count`` integers, whatever ``numel`` is. The distinct values among independent draws
    are, given how many they are, a uniform subset, and so is what is left of it after a uniform subset is taken out.
    Integers alone are drawn: no rounding can differ from machine to machine.
    """
    if numel <= SMALL:
        return torch.randperm(numel, generator=source)[:count].sort().values
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    if 2 * count > numel:  # cheaper to draw what is left out
        return _without(torch.arange(numel), draw_subset(source, numel, numel - count))
    expected = -numel * math.log1p(-count / numel)  # draws that leave ``count`` distinct values on average
    num_draws = math.ceil(expected + 4.0 * math.sqrt(expected) + 4.0)
    while True:
        ordered = torch.randint(numel, (num_draws,), generator=source).sort().values
        distinct = ordered[ordered.diff(prepend=ordered.new_tensor([-1])) > 0]
        surplus = distinct.numel() - count
        if surplus >= 0:
            return _without(distinct, draw_subset(source, distinct.numel(), surplus))
        num_draws *= 2  # the failed draw is thrown away whole: keeping a part of it would favour the lucky ones


def _without(values: Tensor, positions: Tensor) -> Tensor:
    """``values`` less those at ``positions``."""
    kept = torch.ones(values.numel(), dtype=torch.bool)
    kept[positions] = False
    return values[kept]
