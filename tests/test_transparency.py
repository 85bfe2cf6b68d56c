"""First of all the hook is invisible: at ratio 1, and while its dense steps last, it is plain DDP."""

import copy

import pytest
import torch
from checks import Branches, assert_equal_on_all_ranks, batch, gradients, loss_of, wrap

from sidco_ddp import COMPRESSORS, attach


def train(model, rank, ddp_options, hook=None):
    """Gradients of every step, and the parameters at the end."""
    ddp_model = wrap(copy.deepcopy(model), **ddp_options)
    if hook:
        attach(ddp_model, **hook)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)
    steps = []
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(ddp_model, batch(rank, step)).backward()
        steps.append(gradients(ddp_model))
        optimizer.step()
    return steps, {n: p.detach().clone() for n, p in ddp_model.module.named_parameters()}


def check_equals_plain_ddp(rank, world_size, hooks, ddp_options):
    """Every hook equals plain DDP: to the bit where whole buckets are reduced, else to rounding."""
    model = Branches()
    expected_steps, expected_parameters = train(model, rank, ddp_options)
    for hook in hooks:
        steps, parameters = train(model, rank, ddp_options, hook)
        # DDP multiplies by 1/W where it copies a gradient into its bucket and divides by W where the gradient lives
        # there: the same bits only where W is a power of two
        exact = hook.get("dense_fallback", True) and world_size in (1, 2, 4)
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-7}
        for step, (expected, found) in enumerate(zip(expected_steps, steps, strict=True)):
            for name in expected:
                torch.testing.assert_close(
                    found[name], expected[name], **tolerance, msg=lambda m, s=step, n=name, h=hook: f"{h} {s} {n}: {m}"
                )
        every_step = {(name, step): found for step, part in enumerate(steps) for name, found in part.items()}
        assert_equal_on_all_ranks(every_step)
        torch.testing.assert_close(parameters, expected_parameters, **tolerance)


@pytest.mark.parametrize("many_buckets", [False, True])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ratio_one_is_plain_ddp(worlds, size, unused, view, many_buckets):
    """Both roads: whole buckets by all-reduce, as ratio 1 goes by itself, and whole selections by message."""
    ddp = {"find_unused_parameters": unused, "gradient_as_bucket_view": view, "many_buckets": many_buckets}
    roads = [{"ratio": 1.0, "dense_fallback": fallback} for fallback in (True, False)]
    hooks = [{"compressor": compressor, **road} for compressor in COMPRESSORS for road in roads]
    worlds(size).run(check_equals_plain_ddp, hooks=hooks, ddp_options=ddp)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_dense_steps_are_plain_ddp(worlds, size):
    hook = {"compressor": "sidco-e", "ratio": 0.01, "dense_steps": 10**9}
    worlds(size).run(check_equals_plain_ddp, hooks=[hook], ddp_options={"many_buckets": True})


def check_leaves_dense_steps(rank, world_size):
    model = Branches()
    ddp_model = wrap(model)
    state = attach(ddp_model, "sidco-e", 0.05, dense_steps=3)
    dense = []
    for step in range(5):
        loss_of(ddp_model, batch(rank, step)).backward()
        dense.append(state.stats()["total"]["dense"])
    assert dense == [True, True, True, False, False]
    assert state.step == 5


def test_dense_steps_end(worlds):
    worlds(2).run(check_leaves_dense_steps)
