"""What every implementation of the one pass over a vector offers."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class Found(NamedTuple):
    """What a pass over a vector found.

    Attributes:
        indices: 1-D int64 tensor, ascending: where the magnitude exceeds the threshold.
        values: 1-D float32 tensor, the (signed) entries there.
        total: how many there are. Beyond the limit of the pass it only says "more", and nothing was collected.
        finite: whether no entry of the vector, above the threshold or not, is infinite or NaN. Where one is, only this
            is to be relied on.
        mean: mean magnitude of the exceedances, where it would cost another host round trip to ask for it later.
    """

    indices: Tensor
    values: Tensor
    total: int
    finite: bool
    mean: float | None = None


class AbstractKernels(ABC):
    """One pass: add the residual, find what exceeds a threshold, and see whether everything is finite.

    All implementations give the same indices, values and order. None keeps anything between calls, so two models,
    or two threads, may use the same one at once.
    """

    name: ClassVar[str]

    @abstractmethod
    def scan(self, vector: Tensor, threshold: float, limit: int | None = None) -> Found:
        """What of ``vector`` (1-D, float32, contiguous) has a magnitude above ``threshold``, if at most ``limit``."""

    @abstractmethod
    def compensate(
        self, gradient: Tensor, residual: Tensor, threshold: float, limit: int | None = None, out: Tensor | None = None
    ) -> Found:
        """Write the target, ``gradient + residual``, and :meth:`scan` it in the same pass.

        Args:
            gradient: 1-D, contiguous, of any floating dtype; it is rounded to float32 first.
            residual: 1-D float32, of the same length.
            threshold: magnitude that must be exceeded; infinite: only ``finite`` is wanted.
            limit: most exceedances to collect; None collects all.
            out: 1-D float32, where the target goes. None: it takes the residual's place, and the old residual is
                parked in ``gradient``, which must be float32 then. That costs no memory and can be undone to the bit.
        """


def nothing(device: torch.device) -> tuple[Tensor, Tensor]:
    """No indices and no values."""
    return torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, dtype=torch.float32, device=device)
