"""Exact top-k by magnitude: the yardstick for quality, and the price that threshold estimation avoids."""

from dataclasses import dataclass

from torch import Tensor

from sidco_ddp.compressors.base import AbstractCompressor, Report, Stateless
from sidco_ddp.indexing import top
from sidco_ddp.payload import SparsePayload, take


@dataclass(frozen=True, kw_only=True)
class TopKCompressor(AbstractCompressor[Stateless]):
    """Keeps the k entries of largest magnitude, ``torch.topk`` over the whole vector."""

    def init(self, numel: int) -> Stateless:
        """No state."""
        return Stateless()

    def compress(self, vector: Tensor, state: Stateless) -> tuple[SparsePayload, Stateless]:
        """The k largest of ``vector``."""
        k = self.target_count(vector.numel())
        magnitudes, indices = top(vector.abs(), k)
        report = Report(k, rounds=1, touched=vector.numel(), threshold=magnitudes.amin().item())
        return take(vector, indices), Stateless(report)
