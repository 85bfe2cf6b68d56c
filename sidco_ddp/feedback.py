"""Error feedback: what was not sent waits, in float32, under the name of its parameter.

One flat buffer a bucket, in layout order, so that passes over it are contiguous. When DDP changes the layout the old
buffers are cut up by parameter and each piece finds its new place.
"""

from collections.abc import Sequence

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
        spare: give every bucket a spare buffer, so that it can be undone after the exchange, too.
    """

    def __init__(self, enabled: bool = True, kernels: str = "auto", *, spare: bool = False) -> None:
        self.enabled = enabled
        self.kernels = kernels
        self.spare = spare
        self._residuals: dict[BucketLayout, Tensor] = {}
        self._spares: dict[BucketLayout, Tensor] = {}  # of the layouts whose residual is not parked
        self._waiting: dict[str, Tensor] = {}  # pieces whose parameter is in no current layout
        self._idle: dict[BucketLayout, list[tuple[slice, Tensor]]] = {}  # residuals set aside in the last call

    def target(
        self, layout: BucketLayout, gradient: Tensor, *, factor: float = 1.0, idle: Sequence[str] = ()
    ) -> Target:
        """The target, ``factor * gradient`` + residual, in float32, added up when it is first read.

        Args:
            layout: of the bucket.
            gradient: 1-D, any real floating-point dtype. May be overwritten, with what :meth:`undo` needs.
            factor: one over the loss scale: residuals are kept unscaled, so that they outlive every change of scale.
            idle: names of parameters that the backward did not reach; their residual waits.

        Returns:
            The target, to be read before :meth:`record` and valid until the next one for ``layout``.
        """
        kernels = get_kernels(self.kernels, gradient.device)
        if factor != 1.0:
            gradient = gradient.float() * factor  # not in place: a float16 gradient may become too small for float16
        if not self.enabled:
            return Target(gradient.float(), kernels)
        residual = self._residual(layout, gradient.device)
        self._set_aside(layout, idle)
        if self.parks(gradient):
            self._spares.pop(layout, None)
            return Target(residual, kernels, lambda t, limit: kernels.compensate(gradient, residual, t, limit))
        spare = self._spare(layout)
        return Target(spare, kernels, lambda t, limit: kernels.compensate(gradient, residual, t, limit, out=spare))

    def compensate(
        self, layout: BucketLayout, gradient: Tensor, *, factor: float = 1.0, idle: Sequence[str] = ()
    ) -> Tensor:
        """The :meth:`target` as a float32 vector."""
        return self.target(layout, gradient, factor=factor, idle=idle).dense()

    def parks(self, gradient: Tensor) -> bool:
        """Whether the old residual waits in the bucket's own buffer."""
        return gradient.dtype == torch.float32 and not self.spare

    def record(self, layout: BucketLayout, sent: SparsePayload) -> None:
        """After the :meth:`target` was read: the residual is the target less what was sent, a cast's error included."""
        if not self.enabled:
            return
        if layout in self._spares:
            self._swap(layout)
        self._residuals[layout].index_add_(0, sent.indices, sent.values, alpha=-1)
        self.bring_back(layout)

    def flush(self, layout: BucketLayout, gradient: Tensor, *, factor: float = 1.0, idle: Sequence[str] = ()) -> bool:
        """Move the residual into ``gradient``, for a bucket that goes out whole; says whether there was one to move.

        What a narrower gradient cannot hold stays behind. A target that is not finite moves nothing.
        """
        if not self.enabled or not self.holds(layout):
            return False
        residual = self._residual(layout, gradient.device)
        self._set_aside(layout, idle)
        target = torch.add(residual, gradient, alpha=factor, out=self._spare(layout))
        if not is_finite(target):
            self.bring_back(layout)
            return False
        limit = torch.finfo(gradient.dtype).max
        gradient.copy_((target / factor).clamp_(-limit, limit))
        target.sub_(gradient, alpha=factor)
        self._swap(layout)
        self.bring_back(layout)
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
        self.bring_back(layout)

    def put_back(self, layout: BucketLayout, sent: SparsePayload) -> None:
        """Undo the sending alone: what was sent waits again, with the gradient that it came from."""
        if self.enabled and layout in self._residuals:
            self._residuals[layout].index_add_(0, sent.indices, sent.values)

    def holds(self, layout: BucketLayout) -> bool:
        """Whether any of the layout's parameters has a residual."""
        if layout in self._residuals or not self._waiting.keys().isdisjoint(layout.names):
            return True
        return any(held.overlaps(layout) for held in self._residuals)

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
        self._idle.clear()
        self._waiting = {name: piece.detach().float().flatten().clone() for name, piece in state.items()}

    def _residual(self, layout: BucketLayout, device: torch.device) -> Tensor:
        if layout not in self._residuals:
            self._adopt(layout, device)
        return self._residuals[layout]

    def _spare(self, layout: BucketLayout) -> Tensor:
        if layout not in self._spares:
            self._spares[layout] = torch.empty_like(self._residuals[layout])
        return self._spares[layout]

    def _swap(self, layout: BucketLayout) -> None:
        self._residuals[layout], self._spares[layout] = self._spares[layout], self._residuals[layout]

    def _set_aside(self, layout: BucketLayout, idle: Sequence[str]) -> None:
        """Take the residuals of idle parameters out of the next target."""
        residual = self._residuals[layout]
        self._idle[layout] = [(where, residual[where].clone()) for where in map(layout.slices.get, idle) if where]
        for where, _ in self._idle[layout]:
            residual[where] = 0.0

    def bring_back(self, layout: BucketLayout) -> None:
        """Put the residuals of idle parameters, which wait beside the target, into their place again."""
        for where, piece in self._idle.get(layout, ()):
            self._residuals[layout][where] = piece

    def _adopt(self, layout: BucketLayout, device: torch.device) -> None:
        """Give a new layout its buffers, and each of its parameters the residual that it left in an old one."""
        for old in [held for held in self._residuals if held.overlaps(layout)]:
            self._spares.pop(old, None)
            self._idle.pop(old, None)
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
    """Whether no entry is infinite or NaN."""
    if vector.is_sparse:
        vector = vector.coalesce().values()
    if vector.numel() == 0:
        return True
    low, high = torch.aminmax(vector)  # both carry a NaN on
    return bool((low > -torch.inf) & (high < torch.inf))
