"""The optimizers by name, and the learning rate's way through a run."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from sidco_ddp.workloads import Recipe


def _sgd(parameters: Iterable[nn.Parameter], lr: float, recipe: Recipe) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)


def _nesterov(parameters: Iterable[nn.Parameter], lr: float, recipe: Recipe) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay, nesterov=True)


def _adamw(parameters: Iterable[nn.Parameter], lr: float, recipe: Recipe) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=recipe.weight_decay)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter], float, Recipe], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "nesterov": _nesterov,
    "adamw": _adamw,
}


def warmup_then_cosine(optimizer: torch.optim.Optimizer, *, warmup_steps: int, total_steps: int) -> LambdaLR:
    """Climb linearly to the optimizer's learning rate over `warmup_steps`, then fall along a half cosine to zero.

    The warm-up matters more than in dense training: error feedback delays most of the gradient by many steps, so that
    early steps at the full rate would apply large gradients of weights that have long moved on.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, total_steps - warmup_steps)))

    return LambdaLR(optimizer, factor)
