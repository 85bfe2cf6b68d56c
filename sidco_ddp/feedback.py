"""Error feedback: what was not sent waits, in float32, under the name of its parameter.

One flat buffer a bucket, in layout order, so that passes over it are contiguous. When DDP changes the layout the old
buffers are cut up by parameter and each piece finds its new place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sidco_ddp.layout import BucketLayout
from sidco_ddp.payload import SparsePayload


class ErrorFeedback:
    """The residuals of one model on one rank.

    Two buffers a bucket take turns: the target is written beside the residual it was made from, so that
    :meth:`undo` can restore the old residual to the bit.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled  # False: nothing is kept, the target is the gradient
        self._residuals: dict[BucketLayout, Tensor] = {}
        self._spares: dict[BucketLayout, Tensor] = {}
        self._waiting: dict[str, Tensor] = {}  # pieces whose parameter is in no current layout
        self._idle: list[slice] = []  # of the last target: parameters whose residual waits

    def compensate(
        self, layout: BucketLayout, gradient: Tensor, *, factor: float = 1.0, idle: Sequence[str] = ()
    ) -> Tensor:
        """The target, ``factor * gradient`` + residual, valid until the next call for ``layout``.

        Args:
            layout: of the bucket.
            gradient: 1-D, any real floating-point dtype.
            factor: one over the loss scale: residuals are kept unscaled, so that they outlive every change of scale.
            idle: names of parameters that the backward did not reach; their residual waits.

        Returns:
            A float32 vector.
        """
        if not self.enabled:
            return gradient.float() * factor
        if layout not in self._residuals:
            self._adopt(layout, gradient.device)
        target = self._spares[layout]
        torch.add(self._residuals[layout], gradient, alpha=factor, out=target)
        self._idle = [layout.slices[name] for name in idle]
        for where in self._idle:
            target[where] = 0.0
        return target

    def record(self, layout: BucketLayout, sent: SparsePayload) -> None:
        """After :meth:`compensate`: the residual is the target less what was sent, so a cast's error is kept too."""
        if not self.enabled:
            return
        target = self._spares[layout]
        target[sent.indices] -= sent.values
        for where in self._idle:
            target[where] = self._residuals[layout][where]
        self._swap(layout)

    def flush(self, layout: BucketLayout, gradient: Tensor, *, factor: float = 1.0, idle: Sequence[str] = ()) -> bool:
        """Move the residual into ``gradient``, for a bucket that goes out whole; says whether there was one to move.

        What a narrower gradient cannot hold stays behind. A target that is not finite moves nothing.
        """
        if not self.enabled or not self.holds(layout):
            return False
        target = self.compensate(layout, gradient, factor=factor, idle=idle)
        if not is_finite(target):
            return False
        limit = torch.finfo(gradient.dtype).max
        gradient.copy_((target / factor).clamp_(-limit, limit))
        target.sub_(gradient, alpha=factor)
        for where in self._idle:
            target[where] = self._residuals[layout][where]
        self._swap(layout)
        return True

    def undo(self, layout: BucketLayout) -> None:
        """Restore the residual from before the last :meth:`record` or :meth:`flush`, to the bit."""
        if self.enabled:
            self._swap(layout)

    def holds(self, layout: BucketLayout) -> bool:
        """Whether any of the layout's parameters has a residual."""
        if layout in self._residuals or not self._waiting.keys().isdisjoint(layout.names):
            return True
        return any(not set(held.names).isdisjoint(layout.names) for held in self._residuals)

    def norm(self, layout: BucketLayout) -> float:
        """Euclidean norm of the residual of a bucket; 0 where there is none."""
        residual = self._residuals.get(layout)
        return 0.0 if residual is None else torch.linalg.vector_norm(residual).item()

    @property
    def waiting(self) -> list[str]:
        """Names of the residuals whose parameter is in no current layout."""
        return list(self._waiting)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all residuals, flat float32 vectors by parameter name."""
        pieces = {
            name: buffer[where].clone()
            for layout, buffer in self._residuals.items()
            for name, where in layout.slices.items()
        }
        return pieces | {name: piece.clone() for name, piece in self._waiting.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace all residuals by those of ``state``, which find their place when their parameter next appears."""
        self._residuals.clear()
        self._spares.clear()
        self._waiting = {name: piece.detach().float().flatten().clone() for name, piece in state.items()}

    def _swap(self, layout: BucketLayout) -> None:
        self._residuals[layout], self._spares[layout] = self._spares[layout], self._residuals[layout]

    def _adopt(self, layout: BucketLayout, device: torch.device) -> None:
        """Give a new layout its buffers, and each of its parameters the residual that it left in an old one."""
        for old in [held for held in self._residuals if not set(held.names).isdisjoint(layout.names)]:
            del self._spares[old]
            buffer = self._residuals.pop(old)
            self._waiting.update({name: buffer[where] for name, where in old.slices.items()})
        residual = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        for name, where in layout.slices.items():
            piece = self._waiting.pop(name, None)
            if piece is None:
                continue
            if piece.numel() != where.stop - where.start:
                raise ValueError(
                    f"the residual of parameter {name!r} has {piece.numel()} elements, the parameter has "
                    f"{where.stop - where.start}; load the checkpoint of the same model, or drop this residual from it"
                )
            residual[where] = piece
        self._residuals[layout] = residual
        self._spares[layout] = torch.empty_like(residual)


def is_finite(vector: Tensor) -> bool:
    """Whether no entry is infinite or NaN."""
    if vector.is_sparse:
        vector = vector.coalesce().values()
    if vector.numel() == 0:
        return True
    low, high = torch.aminmax(vector)  # both carry a NaN on
    return bool((low > -torch.inf) & (high < torch.inf))
