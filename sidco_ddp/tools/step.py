"""The compress step that is timed: the one place in the tools that reaches below the public names."""

from typing import Any

from torch import Tensor

from sidco_ddp.compressors.base import AbstractCompressor
from sidco_ddp.feedback import ErrorFeedback
from sidco_ddp.layout import BucketLayout


class Step:
    """What the hook does to one bucket before its message is made: compensate, estimate, select, record."""

    def __init__(self, compressor: AbstractCompressor[Any], numel: int, feedback: ErrorFeedback | None = None) -> None:
        self.compressor = compressor
        self.k = compressor.target_count(numel)
        self._feedback = feedback or ErrorFeedback()
        self._layout = BucketLayout(("gradient",), (numel,))
        self._state = compressor.init(numel)

    def __call__(self, gradient: Tensor) -> int:
        """One step; returns how many entries were selected."""
        target = self._feedback.target(self._layout, gradient)
        payload, self._state = self.compressor.select(target, self._state)
        self._feedback.record(self._layout, payload)
        self._gradient = gradient
        return payload.count

    def forget(self) -> None:
        """Take the step's residual back, so that the next target is the next gradient alone."""
        self._feedback.undo(self._layout, self._gradient)
