"""Error feedback: what was not sent waits, in float32, under the name of its parameter.

One flat buffer a bucket, in layout order, so that passes over it are contiguous. When DDP changes the layout the old
buffers are cut up by parameter and each piece finds its new place.
"""

import torch
from torch import Tensor

from sidco_ddp.kernels import get_kernels
from sidco_ddp.layout import BucketLayout
from sidco_ddp.payload import SparsePayload
from sidco_ddp.target import Target


class ErrorFeedback:
    """The residuals of one model on one rank.

    So that :meth:`undo` can restore the old residual to the bit, it is kept until the exchange is done. A float32
    gradient has room for it: the target takes the residual's place and the old residual is *parked* in the bucket,
    which the exchange overwrites anyway. Other buckets have a spare buffer, in which the target is written.

    Args:
        enabled: False keeps nothing, the target is the gradient.
        kernels: which implementation adds and scans (:mod:`sidco_ddp.kernels`).
    """

    def __init__(self, enabled: bool = True, kernels: str = "auto") -> None:
        self.enabled = enabled
        self.kernels = kernels
        self._residuals: dict[BucketLayout, Tensor] = {}
        self._spares: dict[BucketLayout, Tensor] = {}  # of the layouts whose residual is not parked
        self._waiting: dict[str, Tensor] = {}  # pieces whose parameter is in no current layout

    def target(self, layout: BucketLayout, gradient: Tensor) -> Target:
        """The target, gradient + residual, added up when it is first read; valid until the next one for ``layout``.

        It must be read before :meth:`record`. ``gradient`` may be overwritten by it, with what :meth:`undo` needs.
        """
        kernels = get_kernels(self.kernels, gradient.device)
        if not self.enabled:
            return Target(gradient.float(), kernels)
        if layout not in self._residuals:
            self._adopt(layout, gradient.device)
        residual = self._residuals[layout]
        if self.parks(gradient):
            self._spares.pop(layout, None)
            return Target(residual, kernels, lambda t, limit: kernels.compensate(gradient, residual, t, limit))
        spare = self._spare(layout)
        return Target(spare, kernels, lambda t, limit: kernels.compensate(gradient, residual, t, limit, out=spare))

    def compensate(self, layout: BucketLayout, gradient: Tensor) -> Tensor:
        """The :meth:`target` as a float32 vector."""
        return self.target(layout, gradient).dense()

    def parks(self, gradient: Tensor) -> bool:
        """Whether the old residual waits in the bucket's own buffer."""
        return gradient.dtype == torch.float32

    def record(self, layout: BucketLayout, sent: SparsePayload) -> None:
        """After the :meth:`target` was read: the residual is the target less what was sent, a cast's error included."""
        if not self.enabled:
            return
        if layout in self._spares:
            self._swap(layout)
        self._residuals[layout].index_add_(0, sent.indices, sent.values, alpha=-1)

    def flush(self, layout: BucketLayout, gradient: Tensor) -> bool:
        """Move the residual into ``gradient``, for a bucket that goes out whole; says whether there was one to move.

        What a narrower gradient cannot hold stays behind. A target that is not finite moves nothing.
        """
        if not self.holds(layout):
            return False
        if layout not in self._residuals:
            self._adopt(layout, gradient.device)
        target = torch.add(self._residuals[layout], gradient, out=self._spare(layout))
        if not is_finite(target):
            return False
        gradient.copy_(target)
        target.sub_(gradient)
        self._swap(layout)
        return True

    def undo(self, layout: BucketLayout, gradient: Tensor) -> None:
        """Restore the residual from before the last :meth:`record` or :meth:`flush`, to the bit.

        ``gradient``: the bucket's buffer, as that :meth:`target` left it.
        """
        if not self.enabled:
            return
        if layout in self._spares:
            self._swap(layout)
        else:
            self._residuals[layout].copy_(gradient)

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

    def _spare(self, layout: BucketLayout) -> Tensor:
        if layout not in self._spares:
            self._spares[layout] = torch.empty_like(self._residuals[layout])
        return self._spares[layout]

    def _adopt(self, layout: BucketLayout, device: torch.device) -> None:
        """Give a new layout its buffers, and each of its parameters the residual that it left in an old one."""
        for old in [held for held in self._residuals if not set(held.names).isdisjoint(layout.names)]:
            self._spares.pop(old, None)
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


def is_finite(vector: Tensor) -> bool:
    """Whether no entry is infinite or NaN (``vector`` is not empty)."""
    low, high = torch.aminmax(vector)  # both carry a NaN on
    return bool((low > -torch.inf) & (high < torch.inf))
