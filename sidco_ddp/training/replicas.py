"""A watch over drift: whether all ranks hold the same parameters, to the bit."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sidco_ddp.training.errors import RunError

_PIECE = 1 << 20  # elements taken at a time


def checksums(model: nn.Module) -> Tensor:
    """One int64 a parameter, which a change of any one element changes, and other changes but for a small chance."""
    device = next(model.parameters()).device
    weights = torch.randint(-(2**62), 2**62, (_PIECE,), generator=torch.Generator().manual_seed(1))
    weights = (weights | 1).to(device)  # odd: an even one would lose the highest bits of what it is multiplied by
    sums = []
    for parameter in model.parameters():
        data = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
        data = data.contiguous().flatten()
        bits = data.view(_INTEGERS[data.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=device)
        for piece in torch.split(bits, _PIECE):
            # Products and sums wrap around. Each piece moves on those before it, so that their order counts as well.
            total = total * 6364136223846793005 + (piece.long() * weights[: piece.numel()]).sum()
        sums.append(total)
    return torch.stack(sums)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes an element


def check_replicas(model: nn.Module, step: int) -> None:
    """Compare the parameters over all ranks.

    Raises:
        RunError: on every rank, if they differ; the message names the first parameter that does.
    """
    low = checksums(model)
    high = low.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    names = [name for name, _ in model.named_parameters()]
    differing = [name for name, differs in zip(names, (low != high).tolist(), strict=True) if differs]
    if differing:
        raise RunError(
            f"after step {step} the ranks hold different values of parameter {differing[0]!r} "
            f"({len(differing)} of {len(names)} parameters differ); what was trained since they last agreed is void: "
            "go on from a checkpoint of before, and look for what changes parameters on some ranks only"
        )
