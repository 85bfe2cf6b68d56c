"""No compression: the baseline, by the same road as everything else."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sidco_ddp.compressors.base import AbstractCompressor, Report, Stateless
from sidco_ddp.payload import SparsePayload


@dataclass(frozen=True, kw_only=True)
class NoneCompressor(AbstractCompressor[Stateless]):
    """Keeps every entry, whatever ``ratio`` says; the hook then all-reduces the bucket as plain DDP does."""

    sparse: ClassVar[bool] = False

    def target_count(self, numel: int) -> int:
        """Every entry is the target."""
        return numel

    def init(self, numel: int) -> Stateless:
        """No state."""
        return Stateless()

    def compress(self, vector: Tensor, state: Stateless) -> tuple[SparsePayload, Stateless]:
        """All entries of ``vector``."""
        numel = vector.numel()
        indices = torch.arange(numel, device=vector.device)
        return SparsePayload(vector.clone(), indices, numel), Stateless(Report(numel, touched=numel))
