"""The target, gradient + residual, added up when it is first looked at.

A compressor that asks for exceedances over a threshold gets them from the pass that adds; one that wants the whole
vector gets the vector. So compressors need not know residuals, and error feedback need not know compressors.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sidco_ddp.kernels import AbstractKernels, Found, get_kernels

Pass = Callable[[float, int | None], Found]  # threshold and limit -> what was found


class Target:
    """A vector of float32 that may still have to be written.

    Args:
        vector: 1-D float32 tensor, where the target is or will be.
        kernels: what scans it; by default the fastest for its device.
        add: writes ``vector`` and scans it, called once; None if it is written already.
    """

    def __init__(self, vector: Tensor, kernels: AbstractKernels | None = None, add: Pass | None = None) -> None:
        self._vector = vector
        self._kernels = kernels or get_kernels("auto", vector.device)
        self._add = add
        self._finite: bool | None = None

    @property
    def numel(self) -> int:
        """Length of the vector."""
        return self._vector.numel()

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._vector.device

    @property
    def written(self) -> bool:
        """Whether the vector holds the target by now."""
        return self._add is None

    @property
    def finite(self) -> bool:
        """Whether no entry is infinite or NaN."""
        return self.above(math.inf).finite if self._finite is None else self._finite

    def dense(self) -> Tensor:
        """The whole vector, which must not be written to."""
        if self._add is not None:
            self.above(math.inf)
        return self._vector

    def above(self, threshold: float, limit: int | None = None) -> Found:
        """The entries with magnitude above ``threshold``, if at most ``limit``; reads the vector once."""
        if self._add is not None:
            add, self._add = self._add, None
            found = add(threshold, limit)
        else:
            found = self._kernels.scan(self._vector, threshold, limit)
        self._finite = found.finite
        return found
