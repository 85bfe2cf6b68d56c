"""Deep Gradient Compression's selection: a threshold from the top-k of a small sample, then from what exceeds it."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sidco_ddp.compressors.base import AbstractCompressor, Report, keep_nonzeros
from sidco_ddp.compressors.draws import draw_integer, generator
from sidco_ddp.options import check_count, check_ratio
from sidco_ddp.payload import SparsePayload, largest, select_above

EXPECTED_IN_SAMPLE = 10  # top entries that the sample should hold at least, so that small vectors get an estimate too
TOO_MANY = 4 / 3  # of k; beyond it the selection is repeated exactly over the exceedances


class DgcState(NamedTuple):
    """What DGC carries from call to call on one bucket."""

    calls: int = 0  # so far; with the seed, where the next sample starts
    report: Report = Report()


@dataclass(frozen=True, kw_only=True)
class DgcCompressor(AbstractCompressor[DgcState]):
    """Sampled and hierarchical top-k (Lin et al., ICLR 2018, "Deep Gradient Compression").

    Every so many-th entry is sampled, from a random start. The smallest of the sample's own top-k is the threshold.
    Where more than 4/3 k entries reach it, the exact top-k of those few is taken. A top-k over the whole vector
    happens only where all of it reaches the threshold: with a constant, for example.

    Attributes:
        sample_ratio: share of the entries that is sampled; more, where the sample would hold fewer than ten
            of the k largest on average.
        seed: of the sample's start. Each call draws its own, and torch's global generator is not touched.
    """

    sample_ratio: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "sample_ratio", check_ratio(self.sample_ratio, "sample_ratio"))
        check_count(self.seed, "seed", 0, "any whole number will do")

    @property
    def holds_count(self) -> bool:
        """Nothing corrects a sample whose threshold is too high."""
        return False

    def init(self, numel: int) -> DgcState:
        """No call yet."""
        return DgcState()

    def compress(self, vector: Tensor, state: DgcState) -> tuple[SparsePayload, DgcState]:
        """The entries of ``vector`` that reach the sample's threshold, at most 4/3 k of them."""
        numel = vector.numel()
        k = self.target_count(numel)
        if k == numel:
            payload, report = keep_nonzeros(vector)
            return payload, DgcState(state.calls + 1, report)
        sample = self.sample(vector, state)
        threshold = self.threshold(sample)
        reached = select_above(vector, _just_below(threshold))
        payload = largest(reached, k) if reached.count > TOO_MANY * k else reached
        rounds = 2 if payload is reached else 3
        touched = sample.numel() + numel + (0 if payload is reached else reached.count)
        return payload, DgcState(state.calls + 1, Report(reached.count, 1, rounds, touched, threshold))

    def sample(self, vector: Tensor, state: DgcState) -> Tensor:
        """The sampled magnitudes of this call.

        The stride is odd: an even one would stay in the same few columns of a matrix whose rows have an even length.
        """
        numel = vector.numel()
        size = math.ceil(min(numel, max(self.sample_ratio * numel, EXPECTED_IN_SAMPLE / self.ratio)))
        stride = (numel // size - 1) | 1
        return vector[draw_integer(generator(self.seed, state.calls, numel), stride) :: stride].abs()

    def threshold(self, sample: Tensor) -> float:
        """The smallest of the largest ``ratio`` of the sample."""
        return torch.topk(sample, math.ceil(self.ratio * sample.numel()), sorted=False).values.amin().item()


def _just_below(threshold: float) -> float:
    """The next float32 towards zero, so that entries equal to ``threshold`` are above it; zeros are never selected."""
    return torch.nextafter(torch.tensor(threshold), torch.tensor(0.0)).item()
