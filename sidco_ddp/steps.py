"""Which step a call of the hook belongs to, and the steps that leave no trace: broken off, failed or skipped."""

from dataclasses import dataclass, field
from typing import Any

from sidco_ddp.call import Call
from sidco_ddp.layout import BucketLayout


@dataclass
class Steps:
    """Counts the synchronised backward passes and remembers the calls of the last one.

    Attributes:
        grad_scaler: has a ``get_scale()``, or is None.
        count: synchronised backward passes begun.
        calls: of the last step.
        loss_scale: by which its gradients are too large.
    """

    grad_scaler: Any
    count: int = 0
    calls: list[Call] = field(default_factory=list)
    loss_scale: float = 1.0
    _seen: set[str] = field(default_factory=set)  # parameters whose bucket came in this step
    _ended: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether the last step saw every bucket."""
        return self._ended and bool(self.calls)

    def starts_with(self, layout: BucketLayout) -> bool:
        """Whether a bucket opens a new step: the last one is over, or was broken off, since its parameters come again.

        The bucket's index does not tell: in the first backward of a static graph DDP calls every bucket 0.
        """
        return self._ended or not self._seen.isdisjoint(layout.names)

    def start(self) -> None:
        """Open a step."""
        self.settle()
        self.count += 1
        self.calls, self._seen = [], set()
        self.loss_scale = 1.0 if self.grad_scaler is None else float(self.grad_scaler.get_scale())

    def add(self, call: Call, *, is_last: bool, num_parameters: int) -> None:
        """Count ``call`` to the open step, which ends with DDP's last bucket, or when all parameters have come."""
        self.calls.append(call)
        self._seen.update(call.slot.layout.names)
        self._ended = is_last or len(self._seen) == num_parameters

    def settle(self) -> None:
        """Forget the last step where its averages never reached the optimizer, so that nothing of it is lost.

        That is where the backward was broken off, some exchange failed, or the ``GradScaler`` skipped the step since
        some bucket was not finite. To be called before the next step or a look at the residuals.
        """
        skipped = self.grad_scaler is not None and any(not call.stats.finite for call in self.calls)
        if skipped or not self._ended or any(not call.finished for call in self.calls):
            for call in self.calls:
                call.undo()

    def resume(self, count: int) -> None:
        """Go on from ``count``; the last step's calls are no longer to be undone."""
        self.count, self.calls, self._ended = count, [], True
