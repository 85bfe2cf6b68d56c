"""The one pass as two Triton kernels, for CUDA.

The first one adds, stores, and counts the exceedances of each block; a prefix sum over the blocks says where each one's
go; the second one puts them there. Between the two the host reads three numbers, to size the result: the only point at
which it waits for the device.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sidco_ddp.kernels.base import AbstractKernels, Found, nothing

BLOCK = 1024


@triton.jit(do_not_specialize=["bits"])
def _count(  # pragma: no cover: compiled
    gradient,
    residual,
    target,
    counts,
    tops,
    sums,
    numel,
    bits,
    ADD: tl.constexpr,
    PARK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the target where asked to; per block, the number, the largest magnitude and the sum of exceedances."""
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    if ADD:
        old = tl.load(residual + at, mask=inside, other=0.0)
        value = old + tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        if PARK:
            tl.store(gradient + at, old, mask=inside)
        tl.store(target + at, value, mask=inside)
    else:
        value = tl.load(target + at, mask=inside, other=0.0)
    magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    above = magnitude > bits
    tl.store(counts + block, tl.sum(above.to(tl.int32)))
    tl.store(tops + block, tl.max(magnitude))
    tl.store(sums + block, tl.sum(tl.where(above, tl.abs(value), 0.0)))


@triton.jit(do_not_specialize=["bits"])
def _collect(  # pragma: no cover: compiled
    target, ends, indices, values, numel, bits, BLOCK: tl.constexpr
):
    """Put each block's exceedances behind those of the blocks before it."""
    block = tl.program_id(0).to(tl.int64)
    end = tl.load(ends + block)
    begin = tl.load(ends + block - 1, mask=block > 0, other=0)
    if end > begin:
        at = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(target + at, mask=at < numel, other=0.0)
        above = (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > bits
        to = begin + tl.cumsum(above.to(tl.int32), 0) - 1
        tl.store(indices + to, at, mask=above)
        tl.store(values + to, value, mask=above)


class TritonKernels(AbstractKernels):
    """Serves CUDA; and CPU under Triton's interpreter, for tests."""

    name = "triton"

    def scan(self, vector: Tensor, threshold: float, limit: int | None = None) -> Found:
        """See :meth:`AbstractKernels.scan`."""
        with torch.cuda.device_of(vector):  # kernels are launched on the current device
            return _sweep(vector, vector, vector, threshold, limit, add=False, park=False)

    def compensate(
        self, gradient: Tensor, residual: Tensor, threshold: float, limit: int | None = None, out: Tensor | None = None
    ) -> Found:
        """See :meth:`AbstractKernels.compensate`."""
        target = residual if out is None else out
        with torch.cuda.device_of(target):
            return _sweep(gradient, residual, target, threshold, limit, add=True, park=out is None)


def _sweep(
    gradient: Tensor, residual: Tensor, target: Tensor, threshold: float, limit: int | None, *, add: bool, park: bool
) -> Found:
    numel, device = target.numel(), target.device
    bits = int(np.float32(threshold).view(np.int32))
    blocks = triton.cdiv(numel, BLOCK)
    counts, tops = torch.empty(2, blocks, dtype=torch.int32, device=device)
    sums = torch.empty(blocks, device=device)
    _count[(blocks,)](gradient, residual, target, counts, tops, sums, numel, bits, ADD=add, PARK=park, BLOCK=BLOCK)
    ends = counts.cumsum(0)
    total, top, mean = torch.stack([ends[-1].double(), tops.amax().double(), sums.double().sum()]).tolist()
    found, finite = int(total), top < 0x7F800000
    if limit is not None and found > limit:
        return Found(*nothing(device), found, finite)
    indices = torch.empty(found, dtype=torch.int64, device=device)
    values = torch.empty(found, device=device)
    if found:
        _collect[(blocks,)](target, ends, indices, values, numel, bits, BLOCK=BLOCK)
    return Found(indices, values, found, finite, mean / max(found, 1))
