"""Loss scaling and bad steps: overflows are seen by all, skipped by all, and remembered by nobody."""

import random

import pytest
import torch
from checks import Branches, assert_equal_on_all_ranks, batch, gradients, loss_of, residuals, wrap
from torch import nn

from sidco_ddp import SIDCoState, attach, sidco_hook


def poison(ddp_model, flag):
    """Make the gradient of one layer infinite wherever ``flag`` is set: an overflow in one bucket of several."""
    for name, parameter in ddp_model.module.named_parameters():
        parameter.register_hook(lambda gradient, name=name: gradient * torch.inf if flag.get(name) else gradient)


def train(model, rank, world_size, scaled, scales, steps, hook):
    """Train with random overflows; without a scaler the same batches are left out."""
    dice = random.Random(11)
    ddp_model = wrap(model, many_buckets=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=10**6) if scaled else None
    state = attach(ddp_model, grad_scaler=scaler, **hook)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.02, momentum=0.9)
    flag, skipped = {}, 0
    poison(ddp_model, flag)
    for step in range(steps):
        bad = step > 2 and dice.random() < 0.1
        victim, layer = dice.randrange(world_size), dice.choice(["first.weight", "head.bias", "third.weight"])
        change = dice.choice(scales) if dice.random() < 0.1 else None
        if scaler is None:
            if not bad:
                optimizer.zero_grad()
                loss_of(ddp_model, batch(rank, step)).backward()
                optimizer.step()
            continue
        flag[layer] = bad and rank == victim
        optimizer.zero_grad()
        scaler.scale(loss_of(ddp_model, batch(rank, step))).backward()
        flag.clear()
        before = next(ddp_model.parameters()).clone()
        scaler.step(optimizer)
        assert torch.equal(before, next(ddp_model.parameters())) == bad, "all ranks skip together, and only then"
        skipped += bad
        scaler.update(change)
    assert not scaled or skipped > steps // 30
    return ddp_model, state


def check_scaled_run(rank, world_size, scales, tolerance, steps, hook):
    model = Branches()
    weights = {name: piece.clone() for name, piece in model.state_dict().items()}
    scaled, state = train(model, rank, world_size, True, scales, steps, hook)
    model = Branches()
    model.load_state_dict(weights)
    plain, expected = train(model, rank, world_size, False, scales, steps, hook)
    for name, parameter in scaled.module.named_parameters():
        other = dict(plain.module.named_parameters())[name]
        if tolerance == 0.0:
            assert torch.equal(parameter, other), name
            assert torch.equal(residuals(state)[name], residuals(expected)[name]), name
        else:
            assert (parameter - other).norm() <= tolerance * other.norm(), name
    assert_equal_on_all_ranks(dict(scaled.module.named_parameters()))


@pytest.mark.parametrize("compressor", ["sidco-e", "topk"])
def test_two_hundred_steps_with_overflows_equal_the_run_without_a_scaler(worlds, compressor):
    """H9, H3: residuals kept in units of an old loss scale weighed twice too much, or kept the overflow alive for ever.

    Powers of two scale without rounding, so the runs are equal to the bit: weights and residuals. Fails without the
    unscaling in ``ErrorFeedback.compensate``, and without ``Steps.settle`` (the finite buckets of a skipped step).
    """
    hook = {"compressor": compressor, "ratio": 0.05}
    worlds(2).run(check_scaled_run, scales=[2.0**4, 2.0**8, 2.0**16], tolerance=0.0, steps=200, hook=hook)


def test_scales_that_are_no_powers_of_two(worlds):
    """H9: equal within rounding, no drift."""
    hook = {"compressor": "topk", "ratio": 0.05}
    worlds(2).run(check_scaled_run, scales=[7.0, 1000.0, 30000.0], tolerance=1e-3, steps=60, hook=hook)


class UserSkips:
    """For loops that skip bad steps themselves, without a scaler."""

    def get_scale(self):
        return 1.0


def check_user_skips(rank, world_size, guarded):
    ddp_model = wrap(Branches(), many_buckets=True)
    state = attach(ddp_model, ratio=0.05, grad_scaler=UserSkips() if guarded else None)
    flag = {}
    poison(ddp_model, flag)
    for step in range(4):
        loss_of(ddp_model, batch(rank, step)).backward()
        ddp_model.zero_grad()
    before = state.state_dict()
    flag["head.bias"] = rank == 1
    loss_of(ddp_model, batch(rank, 4)).backward()
    bad = {name for name, gradient in gradients(ddp_model).items() if not gradient.isfinite().all()}
    assert "head.bias" in bad
    assert "first.weight" not in bad, "the other buckets are as usual"
    assert not state.stats()["total"]["finite"]
    after = state.state_dict()
    old, new = before["residuals"], after["residuals"]
    untouched = {name for name in old if torch.equal(old[name], new[name])}
    assert untouched == (set(old) if guarded else bad)
    assert (before["memory"] == after["memory"]) == guarded


@pytest.mark.parametrize("guarded", [True, False])
def test_a_loop_that_skips_steps_itself(worlds, guarded):
    """H3: with ``grad_scaler=`` the step leaves no trace at all; without it, only the bad bucket does not."""
    worlds(2).run(check_user_skips, guarded=guarded)


def check_dense_skip(rank, world_size):
    ddp_model = wrap(Branches(), many_buckets=True)
    state = attach(ddp_model, ratio=0.05, dense_steps=10**9, grad_scaler=UserSkips())
    waiting = {name: torch.rand(parameter.numel()) for name, parameter in ddp_model.module.named_parameters()}
    state.load_state_dict(state.state_dict() | {"residuals": waiting})
    flag = {"head.bias": rank == 0}
    poison(ddp_model, flag)
    loss_of(ddp_model, batch(rank, 0)).backward()
    assert all(torch.equal(waiting[name], piece) for name, piece in residuals(state).items())
    flag.clear()
    ddp_model.zero_grad()
    loss_of(ddp_model, batch(rank, 0)).backward()
    assert all((piece == 0).all() for piece in residuals(state).values()), "all of it went out"
    assert all((gradient.flatten() > waiting[name] - 1).all() for name, gradient in gradients(ddp_model).items())


def test_a_skipped_step_whose_buckets_went_out_whole(worlds):
    """H3: an all-reduce takes the residual along; a skipped one puts it back. Fails without ``finish_dense``'s look."""
    worlds(2).run(check_dense_skip)


def check_bad_everywhere(rank, world_size, exchange, value_dtype):
    """Inf and NaN of both signs on any rank, also in the very first step, in every road of the hook."""
    for bad_rank in range(world_size):
        ddp_model = wrap(Branches())
        state = attach(ddp_model, ratio=0.05, exchange=exchange, value_dtype=value_dtype)
        for step, factor in enumerate([torch.nan, 1.0, torch.inf, -torch.inf, 1.0]):
            ddp_model.zero_grad()
            (loss_of(ddp_model, batch(rank, step)) * (factor if rank == bad_rank else 1.0)).backward()
            finite = all(gradient.isfinite().all() for gradient in gradients(ddp_model).values())
            assert finite == (factor == 1.0)
            assert all(piece.isfinite().all() for piece in residuals(state).values())


@pytest.mark.parametrize(("exchange", "value_dtype"), [("exact", torch.float32), ("fixed", torch.float16)])
def test_bad_values_in_every_road(worlds, exchange, value_dtype):
    """H3: ``abs(NaN) > threshold`` is False, so a NaN is never selected and would sit in the residual unseen.

    Fails without the NONFINITE flag of the header.
    """
    worlds(2).run(check_bad_everywhere, exchange=exchange, value_dtype=value_dtype)


def check_small_values_arrive(rank, world_size):
    """Values below float16's smallest number are late, not lost: the residual heaps them up until they can travel."""
    state = SIDCoState(ratio=1.0, compressor="topk", value_dtype=torch.float16, dense_fallback=False)
    layer = wrap(nn.Linear(50, 20, bias=False))
    layer.register_comm_hook(state, sidco_hook)
    applied = torch.zeros(20, 50)
    for _ in range(40):
        layer.zero_grad()
        (layer(torch.full((1, 50), 1e-8))).sum().backward()
        applied += layer.module.weight.grad
    assert (applied + residuals(state)["weight"].view(20, 50) - 40e-8).abs().max() < 1e-9
    assert applied.abs().min() > 20e-8, "most of it has arrived"


def test_values_below_the_range_of_float16(worlds):
    """H10: divided first, small gradients vanished. Fails when the residual is taken before the cast."""
    worlds(2).run(check_small_values_arrive)


def check_large_values(rank, world_size, model_dtype):
    """Gradient and residual that together leave the bucket's dtype: the excess waits, no infinity is made."""
    layer = wrap(nn.Linear(40, 10, bias=False).to(model_dtype))
    state = attach(layer, ratio=1.0, compressor="topk", dense_fallback=False)
    high = torch.finfo(model_dtype).max
    state.load_state_dict(state.state_dict() | {"residuals": {"weight": torch.full((400,), 0.9 * high)}})
    total = torch.zeros(10, 40, dtype=torch.float64)
    for step in range(3):
        layer.zero_grad()
        x = torch.full((1, 40), 0.8 * high if step == 0 else 0.0, dtype=model_dtype)
        layer(x).sum().backward()
        assert layer.module.weight.grad.isfinite().all()
        total += layer.module.weight.grad.double()
    torch.testing.assert_close(total / high, torch.full((10, 40), 1.7, dtype=torch.float64), rtol=0.01, atol=0)


@pytest.mark.parametrize("size", [1, 2])
def test_values_above_the_range_of_the_bucket(worlds, size):
    """H10: summed first, large gradients overflowed. Fails without ``Call.fit``'s limit."""
    worlds(size).run(check_large_values, model_dtype=torch.float16)


@pytest.mark.gpu
def test_autocast_and_scaler_on_cuda(tmp_path):
    """H9 on a GPU: float16 autocast with ``GradScaler("cuda")``, one process."""
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**20)
        ddp_model = wrap(Branches().cuda())
        state = attach(ddp_model, ratio=0.05, grad_scaler=scaler)
        optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.02)
        for step in range(30):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = loss_of(ddp_model, batch(0, step).cuda())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert all(parameter.isfinite().all() for parameter in ddp_model.parameters())
        assert all(piece.isfinite().all() for piece in residuals(state).values())
    finally:
        dist.destroy_process_group()
