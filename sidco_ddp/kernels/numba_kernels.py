"""The one pass as a loop compiled by numba, for CPU.

It works on short blocks: add, store, and take the largest magnitude of the block, all in vector registers. Only a block
that holds an exceedance is looked at, in short runs of entries, the same way. Magnitudes are compared as the integers
of their bits, which are in the same order; NaN and infinity are the largest there, so the maximum shows them.

It is compiled on first use and cached beside the package (``NUMBA_CACHE_DIR`` moves the cache).
"""

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from sidco_ddp.kernels.base import AbstractKernels, Found

PIECE = 1 << 17  # elements of another dtype than float32 that are converted at once
BLOCK, RUN = 128, 16  # entries; constants, so that the loops over them become vector instructions
MASK = np.int32(0x7FFFFFFF)  # every bit but the sign
INFINITE = 0x7F800000  # bits of infinity
SCAN, ADD, PARK = 0, 1, 2  # what is written: nothing; the target; the target over the residual, that over the gradient


@numba.njit(nogil=True, cache=True)
def _sweep(
    mode: int, gradient: Any, residual: Any, target: Any, threshold: int, limit: int, found: Any, offset: int
) -> Any:  # pragma: no cover: compiled
    """Stops early where there may be no room for more. Returns where, the count, and the maximum's bits."""
    indices, values, count = found
    bits = target.view(np.int32)
    numel = target.size
    top = np.int32(0)
    whole = numel - numel % BLOCK
    for block in range(0, whole, BLOCK):  # from 0: indices that may be negative would cost the vector instructions
        if count + BLOCK > indices.size and count <= limit:
            return block, count, top
        if mode == PARK:
            for i in range(BLOCK):  # two arrays and not three: vector instructions need them not to overlap
                old = residual[block + i]
                residual[block + i] = old + gradient[block + i]
                gradient[block + i] = old
        elif mode == ADD:
            for i in range(BLOCK):
                target[block + i] = residual[block + i] + gradient[block + i]
        largest = np.int32(0)
        for i in range(BLOCK):
            largest = max(largest, bits[block + i] & MASK)
        top = max(top, largest)
        if largest > threshold and count <= limit:
            for run in range(block, block + BLOCK, RUN):
                largest = np.int32(0)
                for i in range(RUN):
                    largest = max(largest, bits[run + i] & MASK)
                if largest > threshold:
                    for i in range(RUN):  # without a branch: what does not exceed is overwritten by the next
                        indices[count] = offset + run + i
                        values[count] = target[run + i]
                        count += (bits[run + i] & MASK) > threshold
    if count + BLOCK > indices.size and count <= limit:
        return whole, count, top
    for i in range(whole, numel):
        if mode != SCAN:
            old = residual[i]
            target[i] = old + gradient[i]
            if mode == PARK:
                gradient[i] = old
        magnitude = bits[i] & MASK
        top = max(top, magnitude)
        if magnitude > threshold and count <= limit:
            indices[count], values[count] = offset + i, target[i]
            count += 1
    return numel, count, top


class NumbaKernels(AbstractKernels):
    """Serves CPU; the loop runs without the GIL."""

    name = "numba"

    def scan(self, vector: Tensor, threshold: float, limit: int | None = None) -> Found:
        """See :meth:`AbstractKernels.scan`."""
        array = vector.numpy()
        sweep = Sweep(len(array), threshold, limit)
        sweep.over(SCAN, array, array, array)
        return sweep.found()

    def compensate(
        self, gradient: Tensor, residual: Tensor, threshold: float, limit: int | None = None, out: Tensor | None = None
    ) -> Found:
        """See :meth:`AbstractKernels.compensate`."""
        old = residual.numpy()
        sweep = Sweep(len(old), threshold, limit)
        target = old if out is None else out.numpy()
        if gradient.dtype == torch.float32:
            sweep.over(PARK if out is None else ADD, gradient.numpy(), old, target)
            return sweep.found()
        scratch = torch.empty(min(PIECE, len(old)))
        for start in range(0, len(old), PIECE):
            piece = gradient[start : start + PIECE]
            end = start + len(piece)
            converted = scratch[: len(piece)].copy_(piece).numpy()
            sweep.over(ADD, converted, old[start:end], target[start:end], start)
        return sweep.found()


class Sweep:
    """The exceedances of one vector, and room for more."""

    def __init__(self, numel: int, threshold: float, limit: int | None) -> None:
        self._threshold = np.float32(threshold).view(np.int32)
        self._limit = numel if limit is None else min(limit, numel)
        room = min(self._limit, max(1 << 12, numel // 16)) + 2 * BLOCK
        self._indices, self._values = np.empty(room, np.int64), np.empty(room, np.float32)
        self._count = self._top = 0

    def over(self, mode: int, gradient: Any, residual: Any, target: Any, offset: int = 0) -> None:
        """Sweep over all of ``target``, whose first element has index ``offset``."""
        while len(target):
            found = self._indices, self._values, self._count
            done, self._count, top = _sweep(
                mode, gradient, residual, target, self._threshold, self._limit, found, offset
            )
            self._top = max(self._top, top)
            gradient, residual, target, offset = gradient[done:], residual[done:], target[done:], offset + done
            if len(target):
                more = 4 * len(self._indices)
                self._indices, self._values = _grown(self._indices, more), _grown(self._values, more)

    def found(self) -> Found:
        """What was found so far."""
        count = self._count if self._count <= self._limit else 0
        indices, values = torch.from_numpy(self._indices[:count]), torch.from_numpy(self._values[:count])
        return Found(indices, values, self._count, self._top < INFINITE)


def _grown(array: Any, size: int) -> Any:
    grown = np.empty(size, array.dtype)
    grown[: len(array)] = array
    return grown
