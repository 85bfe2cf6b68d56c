"""The optimizers by name."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from sidco_ddp.workloads import Recipe


def _sgd(parameters: Iterable[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        parameters,
        lr=recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        nesterov=recipe.optimizer == "nesterov",
    )


def _adamw(parameters: Iterable[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=recipe.lr, weight_decay=recipe.weight_decay)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter], Recipe], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "nesterov": _sgd,
    "adamw": _adamw,
}
