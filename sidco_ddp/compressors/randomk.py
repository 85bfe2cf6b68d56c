"""Random-k: the same random entries on every rank, so that their indices need not travel."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from sidco_ddp.compressors.base import AbstractCompressor, Report
from sidco_ddp.compressors.draws import draw_subset, generator
from sidco_ddp.options import check_count
from sidco_ddp.payload import SparsePayload


class RandomKState(NamedTuple):
    """What random-k carries from call to call on one bucket."""

    calls: int = 0  # so far; with the seed and the bucket's length, what the next call draws
    report: Report = Report()


@dataclass(frozen=True, kw_only=True)
class RandomKCompressor(AbstractCompressor[RandomKState]):
    """Keeps k entries drawn uniformly, without a look at their magnitudes (Stich et al., NeurIPS 2018, rand-k).

    Values are sent as they are, not scaled by ``1 / ratio``: with error feedback that would diverge.

    Attributes:
        seed: equal on all ranks. Each call draws its own entries, and torch's global generator is not touched.
    """

    seed: int = 0

    shares_indices: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.seed, "seed", 0, "any whole number will do")

    def init(self, numel: int) -> RandomKState:
        """No call yet."""
        return RandomKState()

    def compress(self, vector: Tensor, state: RandomKState) -> tuple[SparsePayload, RandomKState]:
        """Exactly k entries of ``vector``, the same ones on every rank."""
        numel = vector.numel()
        k = self.target_count(numel)
        drawn = draw_subset(generator(self.seed, state.calls, numel), numel, k)
        indices = drawn.to(vector.device)
        payload = SparsePayload(vector[indices], indices, numel)
        return payload, RandomKState(state.calls + 1, Report(k, rounds=1, touched=k))

    def shared_draw(self, state: RandomKState) -> int:
        """The call that will be drawn: it travels in the header, so that ranks out of step are noticed."""
        return state.calls
