"""The learning rate's and the ratio's way through a run."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sidco_ddp.workloads import Recipe

FIRST_RATIO = 0.25  # of a ratio warm-up: the first of Deep Gradient Compression (Lin et al., 2018, section 3.3)


class Schedule:
    """Sets the learning rate of an optimizer, before each step, as a recipe wants it.

    It climbs linearly over the warm-up, which matters more than in dense training: error feedback delays most of the
    gradient by many steps, so that early steps at the full rate would apply large gradients of weights that have long
    moved on. Then it follows the recipe's shape (`sidco_ddp.workloads.recipe.Recipe` describes them).

    Args:
        optimizer: whose groups' rates are set, each to its own share of its first rate.
        recipe: warm-up, shape and decay.
        steps_per_epoch: what the recipe's epochs come to.
        epochs: planned; the shapes are stretched over them.
        lower_is_better: how the watched metric counts, for the plateau.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        *,
        steps_per_epoch: int,
        epochs: int,
        lower_is_better: bool = True,
    ) -> None:
        self.recipe, self.steps_per_epoch, self.epochs = recipe, steps_per_epoch, epochs
        self.warmup_steps = round(recipe.warmup_epochs * steps_per_epoch)
        self._optimizer, self._sign = optimizer, 1.0 if lower_is_better else -1.0
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self._step, self._best, self._reductions = 0, math.inf, 0
        self._apply()

    @property
    def lr(self) -> float:
        """The rate of the coming step, of the optimizer's first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def step(self) -> None:
        """One optimizer step is done."""
        self._step += 1
        self._apply()

    def end_epoch(self, watched: float) -> None:
        """An epoch is done and evaluated. On a plateau, `watched` is not better than it ever was, the rate falls."""
        watched *= self._sign
        if watched < self._best:  # false of nan as well
            self._best = watched
        elif self.recipe.schedule == "plateau":
            self._reductions += 1
            self._apply()

    def factor(self, step: int) -> float:
        """The share of the full rate at `step`, counted from 0, as things stand."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return _SHAPES[self.recipe.schedule](self, step)

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart."""
        return {"step": self._step, "best": self._best, "reductions": self._reductions}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._step, self._best, self._reductions = saved["step"], saved["best"], saved["reductions"]
        self._apply()

    def resume(self, step: int) -> None:
        """Go on at `step`, counted in the epochs of this run: those of another number of ranks have other lengths."""
        self._step = step
        self._apply()

    def _apply(self) -> None:
        factor = self.factor(self._step)
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            group["lr"] = base * factor

    def _cosine(self, step: int) -> float:
        total = self.epochs * self.steps_per_epoch
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup_steps) / max(1, total - self.warmup_steps)))

    def _steps(self, step: int) -> float:
        done = step / (self.steps_per_epoch * self.epochs)
        return self.recipe.decay ** sum(done >= at for at in self.recipe.decay_at)

    def _plateau(self, step: int) -> float:
        return self.recipe.decay**self._reductions

    def _anneal(self, step: int) -> float:
        return self.recipe.decay ** (step // self.steps_per_epoch)

    def _constant(self, step: int) -> float:
        return 1.0


_SHAPES: dict[str, Callable[[Schedule, int], float]] = {
    "constant": Schedule._constant,
    "cosine": Schedule._cosine,
    "step": Schedule._steps,
    "plateau": Schedule._plateau,
    "anneal": Schedule._anneal,
}


def warmup_ratio(ratio: float, epoch: int, warmup_epochs: int) -> float:
    """The ratio of `epoch`, counted from 0: from 0.25 it falls geometrically, epoch by epoch, and then is `ratio`.

    After Deep Gradient Compression (Lin et al., 2018, section 3.3), whose sparsity grows exponentially from 75 %.
    """
    if epoch >= warmup_epochs or ratio >= FIRST_RATIO:
        return ratio
    return float(FIRST_RATIO * (ratio / FIRST_RATIO) ** (epoch / warmup_epochs))
