"""The sparse selection taken from a vector, and the ways to take one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sidco_ddp.indexing import positions, top
from sidco_ddp.kernels import TORCH


@dataclass(frozen=True, slots=True)
class SparsePayload:
    """Selected entries of a vector: ``vector[indices] == values``, indices ascending and unique.

    Attributes:
        values: 1-D float32 tensor.
        indices: 1-D int64 tensor of the same length.
        numel: length of the vector.
    """

    values: Tensor
    indices: Tensor
    numel: int

    @property
    def count(self) -> int:
        """Number of selected entries."""
        return self.indices.numel()


def take(vector: Tensor, indices: Tensor) -> SparsePayload:
    """The entries at ``indices``, in ascending order."""
    indices = indices.sort().values
    return SparsePayload(vector[indices], indices, vector.numel())


def empty(vector: Tensor) -> SparsePayload:
    """A payload that selects nothing from ``vector``."""
    indices = torch.empty(0, dtype=torch.int64, device=vector.device)
    return SparsePayload(vector[indices], indices, vector.numel())


def select_above(vector: Tensor, threshold: float, ties: int = 0) -> SparsePayload:
    """The entries with magnitude above ``threshold``, and the first ``ties`` entries whose magnitude equals it."""
    found = TORCH.scan(vector, threshold)
    if ties == 0:
        return SparsePayload(found.values, found.indices, vector.numel())
    equal = positions(vector.abs() == threshold)
    return take(vector, torch.cat([found.indices, equal[:ties]]))


def narrow(payload: SparsePayload, threshold: float, ties: int = 0) -> SparsePayload:
    """:func:`select_above` among the entries of ``payload``."""
    kept = select_above(payload.values, threshold, ties)
    if kept.indices.device.type == "cpu":  # numpy: torch would wake its second thread for so little
        indices = torch.from_numpy(payload.indices.numpy()[kept.indices.numpy()])
    else:
        indices = payload.indices[kept.indices]
    return SparsePayload(kept.values, indices, payload.numel)


def largest(payload: SparsePayload, count: int) -> SparsePayload:
    """The ``count`` entries of largest magnitude (all of them, if there are no more)."""
    if payload.count <= count:
        return payload
    kept = top(payload.values.abs(), count)[1].sort().values
    return SparsePayload(payload.values[kept], payload.indices[kept], payload.numel)
