"""How long a run is."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to train. `max_steps` may end the run before its epochs are over; so may a metric of `target`."""

    epochs: int
    steps_per_epoch: int
    max_steps: int | None = None
    target: float | None = None

    @property
    def total_steps(self) -> int:
        """Optimizer steps of an undisturbed run."""
        all_steps = self.epochs * self.steps_per_epoch
        return all_steps if self.max_steps is None else min(all_steps, self.max_steps)


def make_plan(
    *, num_samples: int, global_batch: int, epochs: int, steps: int | None, is_fixed: bool, target: float | None = None
) -> Plan:
    """Settle the length of a run: its epochs, or, unless these are fixed, as many as `steps` needs, cut at `steps`."""
    steps_per_epoch = num_samples // global_batch
    if not is_fixed:
        epochs = max(epochs, math.ceil((steps or 0) / steps_per_epoch))
    return Plan(epochs=epochs, steps_per_epoch=steps_per_epoch, max_steps=steps, target=target)
