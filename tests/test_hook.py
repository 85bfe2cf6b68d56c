"""The hook between DDP and the wire: agreement of the ranks, full messages, statistics, and bad use."""

import math

import pytest
import torch
import torch.distributed as dist
from checks import Branches, assert_equal_on_all_ranks, batch, gradients, loss_of, run_conservation, wrap
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sidco_ddp import SIDCoState, attach, make_compressor, sidco_hook


class Bucket:
    """What the hook uses of DDP's GradBucket."""

    def __init__(self, buffer, parameters=None, index=0, last=True):
        self._buffer = buffer
        self._parameters = parameters if parameters is not None else [nn.Parameter(torch.zeros_like(buffer))]
        self._index, self._last = index, last

    def buffer(self):
        return self._buffer

    def index(self):
        return self._index

    def is_last(self):
        return self._last

    def parameters(self):
        return self._parameters

    def gradients(self):
        return self._buffer.split([parameter.numel() for parameter in self._parameters])


def call(state, gradient):
    """One step with one bucket, the same parameter each time."""
    if not hasattr(state, "parameter"):
        state.parameter = nn.Parameter(torch.zeros_like(gradient))
    return sidco_hook(state, Bucket(gradient, [state.parameter])).wait()


def check_equals_decoded_mean(rank, world_size):
    """Heavy tails on rank 0, nearly flat on the others: counts differ, entry 0 and the last one are sent."""
    gradient = torch.randn(5000) ** (9 if rank == 0 else 1)
    gradient[[0, -1]] = 1e6 * (rank + 1)
    compressor = make_compressor("sidco-e", ratio=0.01)
    payload, _ = compressor.compress(gradient, compressor.init(5000))
    mine = torch.zeros(5000)
    mine[payload.indices] = payload.values
    everyone = [torch.empty(5000) for _ in range(world_size)]
    dist.all_gather(everyone, mine)
    expected = torch.zeros(5000)
    for part in everyone:
        expected += part * (1.0 / world_size)
    found = call(SIDCoState(compressor=compressor), gradient.clone())
    assert torch.equal(found, expected)
    assert found[0] != 0
    assert found[-1] != 0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_result_is_the_mean_of_what_every_rank_selected(worlds, size):
    worlds(size).run(check_equals_decoded_mean)


def check_full_message(rank, world_size, exchange):
    """Without the correction 10 k are selected: a fixed message takes the largest, an exact one takes all."""
    compressor = make_compressor("sidco-e", ratio=0.001, stage_rule="paper", bounded=False)
    state = SIDCoState(compressor=compressor, exchange=exchange)
    gradient = (torch.rand(100_000) ** -0.45 - 1) / 0.45
    call(state, gradient.clone())
    (stats,) = state.stats()["buckets"]
    assert stats["raw_khat"] > 500
    assert stats["sent_khat"] == (120 if exchange == "fixed" else stats["raw_khat"])
    assert stats["bytes_sent"] == 32 + 8 * stats["sent_khat"]
    (residual,) = state.state_dict()["residuals"].values()
    assert int((residual == 0).sum()) == stats["sent_khat"]
    if exchange == "fixed":
        assert residual.max() <= gradient.topk(120).values.min(), "the largest must go first"


@pytest.mark.parametrize("exchange", ["fixed", "exact"])
def test_full_message_keeps_the_largest_and_leaves_the_rest(worlds, exchange):
    worlds(2).run(check_full_message, exchange=exchange)


def check_disagreement(rank, world_size, case):
    numel, options = 10_000, {"ratio": 0.01}
    if case == "numel":
        numel += rank
    elif case == "ratio":
        options = {"ratio": 0.01 if rank == 0 else 0.02}
    elif case == "compressor":
        options["compressor"] = "topk" if rank == 0 else "sidco-e"
    elif case == "value_dtype":
        options["value_dtype"] = torch.float16 if rank == 0 else torch.float32
    elif case == "layout":
        numel = 10_000
    state = SIDCoState(**options)
    sizes = [4000, 6000] if case != "layout" or rank == 0 else [6000, 4000]
    sizes[-1] += numel - 10_000
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    with pytest.raises(RuntimeError, match=r"the ranks disagree on the .* in bucket 0: rank 0: \d+, rank 1: \d+"):
        sidco_hook(state, Bucket(torch.randn(numel), parameters))


@pytest.mark.parametrize("case", ["numel", "ratio", "compressor", "value_dtype", "layout"])
def test_disagreement_raises_on_every_rank(worlds, case):
    """Before anything of the wrong size is posted: Gloo would abort the process, NCCL hang or return junk."""
    worlds(2).run(check_disagreement, case=case)


def check_step_disagreement(rank, world_size):
    """Later on the headers tell: one rank has run one more synchronised backward than the other."""
    state = SIDCoState(ratio=0.01)
    call(state, torch.randn(1000))
    state._steps.count += rank
    with pytest.raises(RuntimeError, match="the ranks disagree on the step in bucket 0: rank 0: 2, rank 1: 3"):
        call(state, torch.randn(1000))


def test_step_disagreement_raises_on_every_rank(worlds):
    worlds(2).run(check_step_disagreement)


def check_empty_selections(rank, world_size):
    """Zeros everywhere, then on one rank only: an empty selection once made Gloo hang or die of signal 8."""
    ddp_model = wrap(nn.Linear(64, 64))
    state = attach(ddp_model, ratio=0.01)
    for step in range(4):
        factor = 0.0 if step % 2 == 0 or rank == 0 else 1.0
        ddp_model.zero_grad()
        (ddp_model(batch(rank, step, 64)).sum() * factor).backward()
        found = gradients(ddp_model)
        assert all(gradient.isfinite().all() for gradient in found.values())
        if step == 0:
            assert all((gradient == 0).all() for gradient in found.values())
        assert_equal_on_all_ranks(found)
    assert all(piece.isfinite().all() for piece in state.state_dict()["residuals"].values())


def test_empty_selections(worlds):
    worlds(2).run(check_empty_selections)


def check_non_finite(rank, world_size, bad):
    """The bad step is visible on all ranks and leaves no trace: the next one is as if it had not been."""
    ddp_model = wrap(Branches())
    state = attach(ddp_model, ratio=0.05)
    seen = []
    for step in range(8):
        before = state.state_dict()
        ddp_model.zero_grad()
        (loss_of(ddp_model, batch(rank, step)) * (bad if step == 3 and rank == 1 else 1.0)).backward()
        finite = all(gradient.isfinite().all() for gradient in gradients(ddp_model).values())
        seen.append(finite)
        after = state.state_dict()
        if not finite:
            assert before["memory"] == after["memory"]
            for name, piece in before["residuals"].items():
                assert torch.equal(piece, after["residuals"][name])
        assert all(piece.isfinite().all() for piece in after["residuals"].values())
    assert seen == [True] * 3 + [False] + [True] * 4


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_non_finite_gradient_is_seen_everywhere_and_remembered_nowhere(worlds, bad):
    worlds(2).run(check_non_finite, bad=bad)


def check_stats(rank, world_size):
    ddp_model = wrap(Branches(), many_buckets=True)
    state = attach(ddp_model, "sidco-e", 0.05)
    for step in range(3):
        loss_of(ddp_model, batch(rank, step)).backward()
    stats = state.stats(residual_norm=True)
    assert stats["step"] == 3
    assert len(stats["buckets"]) > 1
    numel = sum(parameter.numel() for parameter in ddp_model.parameters())
    total = stats["total"]
    assert total["elements"] == numel
    assert total["dense_bytes"] == 4 * numel
    for name in ("elements", "k", "raw_khat", "sent_khat", "bytes_sent", "dense_bytes", "compress_seconds"):
        assert total[name] == pytest.approx(sum(bucket[name] for bucket in stats["buckets"]))
    for bucket in stats["buckets"]:
        assert bucket["k"] == max(1, round(0.05 * bucket["elements"]))
        assert abs(bucket["sent_khat"] - bucket["k"]) <= 0.2 * bucket["k"] + 1
        assert bucket["stages"] >= 1
        assert bucket["threshold"] > 0
    norm = torch.cat(list(state.state_dict()["residuals"].values())).norm().item()
    assert total["residual_norm"] == pytest.approx(norm, rel=1e-6)


def test_stats_describe_the_last_step(worlds):
    worlds(2).run(check_stats)


def check_sent_bytes(rank, world_size):
    """Measured on the collective itself, not taken from our own books."""
    sent = []
    original = sidco_transport()._all_gather_single

    def counted(output, message, **options):
        sent.append(message.numel() * message.element_size())
        return original(output, message, **options)

    sidco_transport()._all_gather_single = counted
    try:
        ddp_model = wrap(nn.Linear(300, 300))
        state = attach(ddp_model, "sidco-e", 0.001)
        for step in range(4):
            ddp_model(batch(rank, step, 300)).square().mean().backward()
            assert sent[-1] == state.stats()["total"]["bytes_sent"]
            assert sent[-1] <= 1.3 * 0.001 * 90_300 * 8 + 32
    finally:
        sidco_transport()._all_gather_single = original
    # one message a step, and one agreement for each of the two layouts before and after DDP's rebuild
    assert len(sent) == 4 + 2


def sidco_transport():
    from sidco_ddp import transport

    return transport


def test_sent_bytes_are_what_the_ratio_says(worlds):
    worlds(2).run(check_sent_bytes)


def check_one_element(rank, world_size):
    for compressor in ("sidco-e", "topk", "none"):
        for fallback in (True, False):
            ddp_model = wrap(nn.Linear(1, 1, bias=False))
            attach(ddp_model, compressor, 0.001, dense_fallback=fallback)
            ddp_model(torch.ones(1, 1) * (rank + 1)).sum().backward()
            assert ddp_model.module.weight.grad.item() == pytest.approx((world_size + 1) / 2)


@pytest.mark.parametrize("size", [1, 2])
def test_bucket_of_one_element(worlds, size):
    worlds(size).run(check_one_element)


def check_value_dtypes(rank, world_size, dtype):
    run_conservation(Branches(), rank, ratio=0.05, value_dtype=dtype, compressor="sidco-e")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_values_lose_nothing_in_the_end(worlds, dtype):
    """The cast's error stays in the residual."""
    worlds(2).run(check_value_dtypes, dtype=dtype)


def check_no_error_feedback(rank, world_size):
    ddp_model = wrap(Branches())
    state = attach(ddp_model, ratio=0.05, error_feedback=False)
    for step in range(3):
        loss_of(ddp_model, batch(rank, step)).backward()
    assert state.state_dict()["residuals"] == {}


def test_error_feedback_off_keeps_nothing(worlds):
    worlds(2).run(check_no_error_feedback)


def check_second_registration(rank, world_size):
    ddp_model = wrap(Branches())
    attach(ddp_model)
    with pytest.raises(RuntimeError, match="has a communication hook already, and DDP takes only one"):
        attach(ddp_model)


def check_two_modules(rank, world_size):
    state = SIDCoState(ratio=0.1)
    first, second = wrap(Branches()), wrap(Branches())
    for ddp_model in (first, second):
        ddp_model.register_comm_hook(state, sidco_hook)
    with pytest.raises(RuntimeError, match="one SIDCoState is registered on 2 DDP modules"):
        loss_of(first, batch(rank, 0)).backward()


def check_two_lines(rank, world_size):
    """``register_comm_hook`` alone finds the model's group and names, as ``attach`` does."""
    pair = dist.new_group([0, 1])
    if rank == 2:
        return
    ddp_model = DistributedDataParallel(Branches(), process_group=pair)
    state = SIDCoState(compressor="sidco-e", ratio=0.05)
    ddp_model.register_comm_hook(state, sidco_hook)
    loss_of(ddp_model, batch(rank, 0)).backward()
    assert set(state.state_dict()["residuals"]) == {name for name, _ in Branches().named_parameters()}


def test_second_registration_says_what_to_do(worlds):
    worlds(2).run(check_second_registration)


def test_one_state_on_two_modules_is_refused(worlds):
    worlds(2).run(check_two_modules)


def test_group_and_names_are_the_models_own(worlds):
    worlds(3).run(check_two_lines)


def check_group_mismatch(rank, world_size):
    other = dist.new_group([0, 1])
    with pytest.raises(ValueError, match="process_group is not the model's own"):
        attach(wrap(Branches()), process_group=other)


def test_another_group_than_the_models_is_refused(worlds):
    worlds(2).run(check_group_mismatch)


def test_attach_wants_ddp():
    with pytest.raises(TypeError, match=r"attach needs a torch.nn.parallel.DistributedDataParallel model, got Linear"):
        attach(nn.Linear(2, 2))


def test_hook_wants_a_bucket():
    """FSDP hands over a gradient, torch.compile's Python reducer a tuple."""
    for thing in (torch.zeros(3), (torch.zeros(3), None)):
        with pytest.raises(TypeError, match=r"sidco_hook needs the GradBucket of DistributedDataParallel, got"):
            sidco_hook(SIDCoState(), thing)


def test_hook_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) before"):
        sidco_hook(SIDCoState(), Bucket(torch.randn(10)))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("compressor", "sidco", "compressor must be one of none, topk, .*sidco-gp; got 'sidco'"),
        ("compressor", 3, "compressor must be one of .*; got 3"),
        ("ratio", 0, r"ratio must be a number in \(0, 1\], got 0; ratio=0.001 sends one entry in a thousand"),
        ("ratio", "abc", "ratio must be a number .* got 'abc'"),
        ("dense_steps", -1, "dense_steps must be a whole number >= 0, got -1"),
        ("headroom", -0.1, "headroom must be a finite number >= 0, got -0.1"),
        ("headroom", math.nan, "headroom must be a finite number >= 0, got nan"),
        ("value_dtype", torch.int8, "value_dtype must be one of torch.float32, torch.float16, torch.bfloat16; got"),
        ("error_feedback", "no", "error_feedback must be True or False, got 'no'"),
        ("exchange", "ring", "exchange must be one of fixed, exact; got 'ring'"),
        ("dense_fallback", None, "dense_fallback must be True or False, got None"),
    ],
)
def test_bad_options_are_named(option, value, message):
    with pytest.raises(ValueError, match=message):
        SIDCoState(**{option: value})


def test_instance_brings_its_ratio():
    compressor = make_compressor("topk", ratio=0.25)
    assert SIDCoState(compressor=compressor).ratio == 0.25
    with pytest.raises(ValueError, match=r"ratio=0.1 contradicts the compressor's own 0.25; leave it out"):
        SIDCoState(compressor=compressor, ratio=0.1)
