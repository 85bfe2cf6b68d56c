"""Every dtype that a gradient can have, and everything that changes a bucket's dtype on its way."""

import pytest
import torch
from checks import (
    Branches,
    assert_equal_on_all_ranks,
    batch,
    gradients,
    local_gradients,
    loss_of,
    mean_over_ranks,
    residuals,
    wrap,
)
from shapes import SHAPES
from test_hook import call
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper, fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from sidco_ddp import SIDCoState, attach, sidco_hook, transport

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def check_dtype(rank, world_size, dtype):
    """Against a dense reference in float64; only bytes and integers meet the collectives."""
    carried = []
    original = transport._all_gather_single

    def spy(output, message, **options):
        carried.append(message.dtype)
        return original(output, message, **options)

    transport._all_gather_single = spy
    try:
        ddp_model = wrap(Branches().to(dtype))
        state = attach(ddp_model, "sidco-e", 0.1)
        true, applied = {}, {}
        for step in range(4):
            x = batch(rank, step).to(dtype)
            for name, mean in mean_over_ranks(local_gradients(ddp_model.module, x)).items():
                true[name] = true.get(name, 0) + mean
            ddp_model.zero_grad()
            loss_of(ddp_model, x).backward()
            for name, gradient in gradients(ddp_model).items():
                assert gradient.dtype == dtype
                applied[name] = applied.get(name, 0) + gradient.double()
            assert_equal_on_all_ranks(gradients(ddp_model))
    finally:
        transport._all_gather_single = original
    assert set(carried) <= {torch.uint8, torch.int64}
    waiting = mean_over_ranks(residuals(state))
    assert {piece.dtype for piece in residuals(state).values()} == {torch.float32}
    rounding = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    for name, expected in true.items():
        error = (applied[name] + waiting[name].view_as(expected) - expected).abs().max()
        assert error <= 10 * rounding * expected.abs().max(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(worlds, dtype):
    """H40: Gloo knows no all_gather of bfloat16, and counts were not exact in it. Fails when values travel as such."""
    worlds(2).run(check_dtype, dtype=dtype)


def check_mixed_and_wrapped(rank, world_size, wrapper):
    ddp_model = wrap(SHAPES["MixedDtypes"].build())
    state = SIDCoState(ratio=0.1)
    ddp_model.register_comm_hook(state, wrapper(sidco_hook) if wrapper else sidco_hook)
    for step in range(4):
        ddp_model.zero_grad()
        loss_of(ddp_model, batch(rank, step)).backward()
        for name, parameter in ddp_model.module.named_parameters():
            assert parameter.grad.dtype == parameter.dtype, name
            assert parameter.grad.isfinite().all(), name
        assert_equal_on_all_ranks(gradients(ddp_model))
    assert {piece.dtype for piece in residuals(state).values()} == {torch.float32}
    assert any(piece.any() for piece in residuals(state).values())


@pytest.mark.parametrize("wrapper", [None, fp16_compress_wrapper, bf16_compress_wrapper])
def test_mixed_buckets_and_the_casting_wrappers(worlds, wrapper):
    """H15: a wrapper swaps the bucket's buffer for another dtype; saved float32 state no longer matched it."""
    worlds(2).run(check_mixed_and_wrapped, wrapper=wrapper)


def check_wrapped_equals_plain(rank, world_size, wrapper):
    """Ratio 1 under a wrapper is what the wrapper makes of plain DDP, up to the cast."""
    model = Branches()
    plain, wrapped = wrap(model), wrap(Branches())
    wrapped.module.load_state_dict(model.state_dict())
    wrapped.register_comm_hook(SIDCoState(ratio=1.0), wrapper(sidco_hook))
    for step in range(3):
        for ddp_model in (plain, wrapped):
            ddp_model.zero_grad()
            loss_of(ddp_model, batch(rank, step)).backward()
        for name, expected in gradients(plain).items():
            torch.testing.assert_close(gradients(wrapped)[name], expected, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("wrapper", [fp16_compress_wrapper, bf16_compress_wrapper])
def test_wrapped_hook_at_ratio_one(worlds, wrapper):
    """H15: cast back once, divided once."""
    worlds(2).run(check_wrapped_equals_plain, wrapper=wrapper)


def check_ddp_mixed_precision(rank, world_size):
    """DDP has registered its own hook by then, so this one is refused, and the message says why."""
    ddp_model = wrap(Branches())
    ddp_model.mixed_precision = _MixedPrecision(param_dtype=torch.bfloat16)  # the real one wants an accelerator
    with pytest.raises(RuntimeError, match=r"mixed_precision=.* brings a hook of its own; leave it out and use auto"):
        attach(ddp_model, ratio=0.1)


def test_ddps_own_mixed_precision_is_refused(worlds):
    """H15: its all-reduce and the casts of its parameters are one hook, which no other can replace."""
    worlds(1).run(check_ddp_mixed_precision)


def check_complex(rank, world_size, ratio):
    """Real and imaginary parts are entries of their own, with the parameter's name."""
    model = nn.Linear(24, 24, dtype=torch.cfloat)
    ddp_model = wrap(model)
    state = attach(ddp_model, ratio=ratio)
    x = batch(rank, 0).to(torch.cfloat) * (1 + 1j)
    local = {"weight": None, "bias": None}
    twin = nn.Linear(24, 24, dtype=torch.cfloat)
    twin.load_state_dict(model.state_dict())
    twin(x).abs().sum().backward()
    local = {name: torch.view_as_real(parameter.grad) for name, parameter in twin.named_parameters()}
    true = mean_over_ranks(local)
    ddp_model(x).abs().sum().backward()
    waiting = mean_over_ranks(residuals(state))
    assert model.weight.grad.imag.abs().sum() > 0
    for name, parameter in model.named_parameters():
        found = torch.view_as_real(parameter.grad).double()
        if name in waiting:
            found = found + waiting[name].view_as(found)
        torch.testing.assert_close(found, true[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ratio", [1.0, 0.1])
@pytest.mark.parametrize("size", [1, 2])
def test_complex_parameters(worlds, size, ratio):
    """H42: the imaginary half of every gradient was zero, without an error. Newer DDP makes the buffer real itself."""
    worlds(size).run(check_complex, ratio=ratio)


def check_complex_buffer(rank, world_size):
    state = SIDCoState(ratio=0.1)
    gradient = torch.randn(500, dtype=torch.cfloat)
    found = call(state, gradient.clone())
    assert found.dtype == torch.cfloat
    waiting = residuals(state)["parameter.0"].view(-1, 2)
    torch.testing.assert_close(torch.view_as_real(found) + waiting, torch.view_as_real(gradient))


def test_complex_buffer(worlds):
    """H42: a bucket that is complex itself. Fails without the real view."""
    worlds(1).run(check_complex_buffer)


def check_beyond_float32(rank, world_size):
    """A float64 gradient that no float32 can hold counts as not finite: seen by all, kept by none."""
    ddp_model = wrap(nn.Linear(30, 30, bias=False).double())
    state = attach(ddp_model, ratio=0.05)
    for step in range(2):
        ddp_model.zero_grad()
        x = torch.ones(1, 30, dtype=torch.float64) * (1e300 if step == 1 and rank == 0 else 1.0)
        ddp_model(x).sum().backward()
        assert ddp_model.module.weight.grad.isnan().all() == (step == 1)
    assert residuals(state)["weight"].isfinite().all()


def test_float64_beyond_float32(worlds):
    """H15: statistics and residual are float32; what they cannot hold must not pass for an infinity in the residual."""
    worlds(2).run(check_beyond_float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_on_nccl(tmp_path, dtype):
    """H40, H15 on a GPU: every dtype, and the wrapped hook, one process."""
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ddp_model = DistributedDataParallel(Branches().to("cuda", dtype))
        ddp_model.register_comm_hook(SIDCoState(ratio=0.1), bf16_compress_wrapper(sidco_hook))
        for step in range(4):
            ddp_model.zero_grad()
            loss_of(ddp_model, batch(0, step).to("cuda", dtype)).backward()
            assert all(gradient.isfinite().all() for gradient in gradients(ddp_model).values())
    finally:
        dist.destroy_process_group()
