"""Models, gradients and comparisons that the distributed tests share."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sidco_ddp import attach


class Branches(nn.Module):
    """Layers of equal shapes, so that a rebuilt bucket can hide a permutation under an equal length."""

    def __init__(self, width=24):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, width)
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.head(torch.tanh(self.second(x)) + torch.tanh(self.third(x)))


def batch(rank, step, width=24):
    """A batch that differs by rank and step, with some heavy-tailed rows."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, width, generator=generator)
    return x * torch.rand(8, 1, generator=generator).pow(-0.5)


def wrap(model, *, many_buckets=False, **ddp_options):
    return DistributedDataParallel(model, bucket_cap_mb=0.002 if many_buckets else 25, **ddp_options)


def local_gradients(model, x):
    """This rank's own gradient by parameter name, from a copy without DDP."""
    twin = copy.deepcopy(model)
    twin.zero_grad(set_to_none=True)
    loss_of(twin, x).backward()
    return {name: parameter.grad.detach().clone() for name, parameter in twin.named_parameters()}


def loss_of(model, x):
    return model(x).square().mean()


def gradients(ddp_model):
    return {name: parameter.grad.detach().clone() for name, parameter in ddp_model.module.named_parameters()}


def mean_over_ranks(tensors):
    """Mean over all ranks of a dict of tensors, in float64; one collective, since many small ones are slow."""
    total = torch.cat([tensor.double().flatten() for tensor in tensors.values()]) if tensors else torch.zeros(1)
    dist.all_reduce(total)
    pieces = (total / dist.get_world_size()).split([tensor.numel() for tensor in tensors.values()]) if tensors else ()
    return {name: piece.view_as(tensor) for (name, tensor), piece in zip(tensors.items(), pieces, strict=True)}


def assert_equal_on_all_ranks(tensors):
    """Every tensor has the same bits on every rank (NaN included)."""
    bits = torch.cat([tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors.values()])
    gathered = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, bits)
    for rank, other in enumerate(gathered):
        assert torch.equal(bits, other), f"{list(tensors)}: some bits differ between this rank and rank {rank}"


def residuals(state):
    return state.feedback.state_dict()


def assert_conserved(true, applied, waiting, tolerance=1e-6):
    """Sum of true gradients = sum of what was applied + mean residual, relative to the sum of their magnitudes."""
    for name, expected in true.items():
        found = applied[name] + (waiting[name].view_as(expected) if name in waiting else 0)
        error = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
        assert error <= tolerance, f"{name}: {error:.2e} of the gradient is lost or misplaced"


def run_conservation(model, rank, *, steps=20, lr=0.05, width=24, ddp_options=None, order=None, **options):
    """Train ``steps`` steps; check conservation and bit-identity; returns the state and the DDP model.

    ``order``: the residual is one vector, kept by bucket index; it is read with these names at the end.
    """
    ddp_model = wrap(model, **(ddp_options or {}))
    state = attach(ddp_model, **options)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr)
    own, applied, every_step = {}, {}, {}
    for step in range(steps):
        x = batch(rank, step, width)
        for name, gradient in local_gradients(ddp_model.module, x).items():
            own[name] = own.get(name, 0) + gradient.double()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(ddp_model, x).backward()
        for name, gradient in gradients(ddp_model).items():
            applied[name] = applied.get(name, 0) + gradient.double()
            every_step[name, step] = gradient
        optimizer.step()
    assert_equal_on_all_ranks(every_step)
    true = mean_over_ranks(own)  # once, at the end: many small collectives are slow
    waiting = mean_over_ranks(residuals(state))
    if order is not None:
        pieces = waiting["bucket 0"].split([true[name].numel() for name in order])
        waiting = dict(zip(order, pieces, strict=True))
    assert_conserved(true, applied, waiting)
    return state, ddp_model
