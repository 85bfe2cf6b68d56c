"""The one pass with torch and numpy alone.

On CPU it works on pieces that stay in a core's cache, so that the passes over a piece after the first cost little
beside memory. numpy does the work there: its comparisons and ``flatnonzero`` are four to eight times as fast as
torch's ``gt`` and ``nonzero``, so that comparing everything is cheaper than taking the maxima of blocks first.
"""

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sidco_ddp.indexing import pick
from sidco_ddp.kernels.base import AbstractKernels, Found, nothing

PIECE = 1 << 17  # elements: a few arrays of this length fit a core's cache
DEVICE_PIECE = 1 << 24  # on an accelerator: each piece costs one host sync


class TorchKernels(AbstractKernels):
    """Serves every device, needs no further package."""

    name = "torch"

    def scan(self, vector: Tensor, threshold: float, limit: int | None = None) -> Found:
        """See :meth:`AbstractKernels.scan`."""
        if vector.device.type != "cpu":
            return _scan_on_device(vector, threshold, limit)
        search = PieceSearch(threshold, limit)
        array = vector.numpy()
        with np.errstate(all="ignore"):
            for start in range(0, len(array), PIECE):
                search.look(array[start : start + PIECE], start)
        return search.found()

    def compensate(
        self, gradient: Tensor, residual: Tensor, threshold: float, limit: int | None = None, out: Tensor | None = None
    ) -> Found:
        """See :meth:`AbstractKernels.compensate`."""
        if gradient.device.type != "cpu":
            return _compensate_on_device(gradient, residual, threshold, limit, out)
        search = PieceSearch(threshold, limit)
        numel = gradient.numel()
        old = residual.numpy()
        narrow = gradient.numpy() if gradient.dtype == torch.float32 else None
        target = None if out is None else out.numpy()
        scratch = np.empty(min(numel, PIECE), np.float32)
        with np.errstate(all="ignore"):  # infinities are reported, not warned about
            for start in range(0, numel, PIECE):
                end = min(start + PIECE, numel)
                piece = scratch[: end - start] if target is None else target[start:end]
                if narrow is None:
                    torch.from_numpy(piece).copy_(gradient[start:end])
                    np.add(piece, old[start:end], out=piece)
                else:
                    np.add(narrow[start:end], old[start:end], out=piece)
                if target is None and narrow is not None:
                    np.copyto(narrow[start:end], old[start:end])
                    np.copyto(old[start:end], piece)
                search.look(piece, start)
        return search.found()


class PieceSearch:
    """Collects the exceedances of one vector on CPU, piece by piece.

    Magnitudes are compared as the integers of their bits, which are in the same order, and where NaN and infinity are
    the largest: so they are found as exceedances are, and no pass of its own looks for them.
    """

    def __init__(self, threshold: float, limit: int | None) -> None:
        self.bits = np.float32(threshold).view(np.int32)
        self.limit = sys.maxsize if limit is None else limit
        self.collects = threshold < np.inf
        self.count = 0
        self.finite = True
        self.indices: list[Any] = []
        self.values: list[Any] = []
        self._magnitudes, self._above = np.empty(0, np.float32), np.empty(0, np.bool_)

    def look(self, piece: Any, start: int) -> None:
        """Look at ``piece`` (a float32 array), which begins at index ``start`` of the vector."""
        if len(piece) > len(self._magnitudes):
            self._magnitudes, self._above = np.empty_like(piece), np.empty(len(piece), np.bool_)
        magnitudes = np.abs(piece, out=self._magnitudes[: len(piece)])
        if not self.collects:
            self.finite &= bool(magnitudes.max() < np.inf)  # max carries NaN on
            return
        above = np.greater(magnitudes.view(np.int32), self.bits, out=self._above[: len(piece)])
        where = np.flatnonzero(above)
        values = piece[where]
        self.finite &= bool(np.isfinite(values).all())
        self.count += len(where)
        self.values.append(values)
        self.indices.append(np.add(where, start, out=where))
        if self.count > self.limit:
            self.collects, self.indices, self.values = False, [], []

    def found(self) -> Found:
        """What was found in all pieces."""
        if not self.indices:
            return Found(*nothing(torch.device("cpu")), self.count, self.finite)
        indices = torch.from_numpy(np.concatenate(self.indices)).long()
        return Found(indices, torch.from_numpy(np.concatenate(self.values)), self.count, self.finite)


def magnitudes_of(values: Tensor) -> Tensor:
    """``values.abs()``, without waking torch's threads where that is on CPU and short."""
    return torch.from_numpy(np.abs(values.numpy())) if values.device.type == "cpu" else values.abs()


def magnitudes_above(magnitudes: Tensor, threshold: float) -> Tensor:
    """The entries of ``magnitudes`` (1-D, float32, none negative) above ``threshold``, without their indices."""
    if magnitudes.device.type != "cpu":
        return pick(magnitudes, magnitudes > threshold)
    array, limit = magnitudes.numpy(), np.float32(threshold)
    pieces = (array[start : start + PIECE] for start in range(0, len(array), PIECE))
    return torch.from_numpy(np.concatenate([piece[np.flatnonzero(piece > limit)] for piece in pieces] or [array]))


def _compensate_on_device(
    gradient: Tensor, residual: Tensor, threshold: float, limit: int | None, out: Tensor | None
) -> Found:
    if out is not None:
        return _scan_on_device(torch.add(residual, gradient.float(), out=out), threshold, limit)
    for start in range(0, gradient.numel(), DEVICE_PIECE):
        new, old = gradient[start : start + DEVICE_PIECE], residual[start : start + DEVICE_PIECE]
        total = new + old
        new.copy_(old)
        old.copy_(total)
    return _scan_on_device(residual, threshold, limit)


def _scan_on_device(vector: Tensor, threshold: float, limit: int | None) -> Found:
    """One host sync a piece: count, sum and whether all is finite are read together, and the count sizes the result."""
    indices, values, total, weight, finite = [], [], 0, 0.0, True
    for start in range(0, vector.numel(), DEVICE_PIECE):
        piece = vector[start : start + DEVICE_PIECE]
        magnitudes = piece.abs()
        above = magnitudes > threshold
        heavy = torch.where(above, magnitudes, 0.0).sum(dtype=torch.float64)
        count, share, all_finite = torch.stack([above.sum().double(), heavy, magnitudes.amax() < torch.inf]).tolist()
        total, weight, finite = total + int(count), weight + share, finite and bool(all_finite)
        if limit is None or total <= limit:
            where = torch.nonzero_static(above, size=int(count)).squeeze(1)
            values.append(piece[where])
            indices.append(where + start)
    if not indices or (limit is not None and total > limit):
        return Found(*nothing(vector.device), total, finite)
    return Found(torch.cat(indices), torch.cat(values), total, finite, weight / max(total, 1))
