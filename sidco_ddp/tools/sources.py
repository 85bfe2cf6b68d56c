"""Synthetic gradients for timing, drawn anew for every step and written into one buffer."""

from collections.abc import Callable

import torch
from torch import Tensor

SHAPES = {  # parameters of the paper's models, as one vector
    "resnet20": 269_722,
    "vgg16": 14_982_987,
    "resnet50": 25_559_081,
    "lstm": 66_034_000,
}
SLOWNESS = 30  # steps after which the gradients of the error-fed sequence are half as large as the first one


def fill_laplace(out: Tensor, step: int, source: torch.Generator) -> None:
    """Laplace entries of scale 1, the distribution for which the exponential fit is exact."""
    signs = torch.empty_like(out).uniform_(-1.0, 1.0, generator=source)
    torch.copysign(out.exponential_(generator=source), signs, out=out)


def fill_student(out: Tensor, step: int, source: torch.Generator) -> None:
    """Student t entries with three degrees of freedom: a heavy tail."""
    normal = torch.empty_like(out)
    chi_square = torch.zeros_like(out)
    for _ in range(3):
        normal.normal_(generator=source)
        chi_square.addcmul_(normal, normal)
    out.normal_(generator=source).div_(chi_square.div_(3.0).sqrt_())


def fill_decaying(out: Tensor, step: int, source: torch.Generator) -> None:
    """Laplace noise whose scale falls as training goes on; a scheme's own residual is added by its step."""
    fill_laplace(out, step, source)
    out.mul_(1.0 / (1.0 + step / SLOWNESS))


SOURCES: dict[str, Callable[[Tensor, int, torch.Generator], None]] = {
    "laplace": fill_laplace,
    "t3": fill_student,
    "error-fed": fill_decaying,
}
