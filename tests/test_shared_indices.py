"""Random-k through the hook: every rank selects the same entries, and no index is sent."""

import math

import pytest
import torch
import torch.distributed as dist
from checks import Branches, assert_equal_on_all_ranks, batch, gradients, loss_of, run_conservation, wrap
from torch import nn

from sidco_ddp import SIDCoState, attach, make_compressor, sidco_hook, transport


def check_bytes(rank, world_size, exchange):
    """Measured on the collective itself: 4 bytes an entry, and all ranks' gradients are non-zero in the same places."""
    sent = []
    original = transport._all_gather_single

    def counted(output, message, **options):
        sent.append(message.numel() * message.element_size())
        return original(output, message, **options)

    transport._all_gather_single = counted
    try:
        ddp_model = wrap(nn.Linear(300, 300))
        state = attach(ddp_model, "randomk", 0.01, exchange=exchange)
        places = []
        for step in range(6):
            ddp_model.zero_grad()
            ddp_model(batch(rank, step, 300)).square().mean().backward()
            assert sent[-1] == state.stats()["total"]["bytes_sent"] == 32 + -(-4 * 903 // 8) * 8
            found = gradients(ddp_model)
            assert_equal_on_all_ranks(found)
            places.append(torch.cat([gradient.flatten() for gradient in found.values()]).nonzero().squeeze(1))
    finally:
        transport._all_gather_single = original
    for place in places:
        assert 890 <= place.numel() <= 903, "ranks that drew apart would fill twice as many places"
    common = set(places[3].tolist()) & set(places[4].tolist())
    assert len(common) < 60, "9 in common are expected of two calls"


@pytest.mark.parametrize("exchange", ["fixed", "exact"])
def test_no_index_travels(worlds, exchange):
    worlds(2).run(check_bytes, exchange=exchange)


def check_ranks_with_other_global_seeds(rank, world_size):
    torch.manual_seed(rank)
    torch.rand(rank * 7)
    run_conservation(Branches(), rank, compressor="randomk", ratio=0.05, value_dtype=torch.float16, steps=8)


def test_the_global_generators_of_the_ranks_may_differ(worlds):
    """Fails on bit-identity where the draw comes from the global generator."""
    worlds(2).run(check_ranks_with_other_global_seeds)


def check_non_finite(rank, world_size, exchange):
    """The rank with the bad gradient has not drawn: afterwards all of them must draw the same again."""
    ddp_model = wrap(Branches())
    state = attach(ddp_model, "randomk", 0.05, exchange=exchange)
    finite = []
    for step in range(7):
        ddp_model.zero_grad()
        before = state.state_dict()
        (loss_of(ddp_model, batch(rank, step)) * (math.inf if step == 3 and rank == 1 else 1.0)).backward()
        found = gradients(ddp_model)
        finite.append(all(gradient.isfinite().all() for gradient in found.values()))
        assert_equal_on_all_ranks(found)
        if not finite[-1]:
            after = state.state_dict()
            assert before["memory"] == after["memory"]
            for name, piece in before["residuals"].items():
                assert torch.equal(piece, after["residuals"][name])
    assert finite == [True] * 3 + [False] + [True] * 3


@pytest.mark.parametrize("exchange", ["fixed", "exact"])
def test_non_finite_gradients_keep_the_ranks_in_step(worlds, exchange):
    worlds(2).run(check_non_finite, exchange=exchange)


def check_out_of_step(rank, world_size):
    """A rank that loaded another checkpoint than the rest would add the others' values in the wrong places."""
    ddp_model = wrap(Branches())
    state = attach(ddp_model, "randomk", 0.05)
    for step in range(3):
        loss_of(ddp_model, batch(rank, step)).backward()
    saved = state.state_dict()
    if rank == 1:
        for entry in saved["memory"]:
            entry["state"]["calls"] += 1
    state.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"disagree on the draw of the shared indices .* rank 0: \d+, rank 1: \d+"):
        loss_of(ddp_model, batch(rank, 3)).backward()


def test_ranks_that_would_draw_apart_are_noticed(worlds):
    worlds(2).run(check_out_of_step)


def check_seeds(rank, world_size):
    state = SIDCoState(compressor=make_compressor("randomk", ratio=0.05, seed=rank))
    ddp_model = wrap(Branches())
    ddp_model.register_comm_hook(state, sidco_hook)
    with pytest.raises(RuntimeError, match="the ranks disagree on the message and option checksum"):
        loss_of(ddp_model, batch(rank, 0)).backward()
    dist.barrier()


def test_ranks_with_different_seeds_are_noticed(worlds):
    worlds(2).run(check_seeds)


def check_full_message(rank, world_size, options):
    """Twice as many are selected as a message of fixed size has room for."""
    compressor = make_compressor("sidco-e", ratio=0.001, stages=1, bounded=False)
    ddp_model = wrap(nn.Linear(300, 300, bias=False))
    state = attach(ddp_model, compressor, **options)
    (ddp_model(torch.eye(300)) * (torch.rand(300, 300) ** -0.45)).sum().backward()
    total = state.stats()["total"]
    assert total["raw_khat"] > 200, total
    assert total["sent_khat"] == (108 if options else total["raw_khat"])


@pytest.mark.parametrize("options", [{}, {"exchange": "fixed"}])
def test_what_does_not_hold_its_count_is_exchanged_exactly(worlds, options):
    worlds(2).run(check_full_message, options=options)


@pytest.mark.parametrize(
    ("compressor", "exchange"),
    [("topk", "fixed"), ("randomk", "fixed"), ("sidco-e", "fixed"), ("dgc", "exact"), ("redsync", "exact")],
)
def test_the_exchange_suits_the_compressor_unless_it_is_named(compressor, exchange):
    assert SIDCoState(compressor=compressor).exchange == exchange
    for named in ("fixed", "exact"):
        assert SIDCoState(compressor=compressor, exchange=named).exchange == named
