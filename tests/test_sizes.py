"""Sizes at which integers, index operations and shortcuts change their mind, and selections of every size."""

import pytest
import torch
from checks import assert_equal_on_all_ranks, wrap
from test_hook import call
from torch import nn

from sidco_ddp import COMPRESSORS, SIDCoState, attach, indexing, make_compressor, sidco_hook
from sidco_ddp import wire as wire_module
from sidco_ddp.payload import largest, select_above

EDGES = [2**15 - 1, 2**15, 2**15 + 1, 2**16 - 1, 2**16, 2**16 + 1]


def check_edges(rank, world_size):
    for numel in EDGES:
        for compressor in COMPRESSORS:
            state = SIDCoState(compressor=compressor, ratio=0.001, dense_fallback=False)
            gradient = torch.randn(numel)
            gradient[[0, -1]] = torch.tensor([100.0, -200.0])
            found = call(state, gradient.clone())
            if compressor != "randomk":  # which takes any
                assert found[0] == 100.0, (compressor, numel)
                assert found[-1] == -200.0, (compressor, numel)
            if compressor != "none":
                total = found + state.feedback.state_dict()["parameter.0"]
                assert torch.equal(total, gradient), (compressor, numel)


def test_around_powers_of_two(worlds):
    """H2, H43: the first and the last entry arrive, and nothing is lost, around 2^15 and 2^16 elements."""
    worlds(1).run(check_edges)


def test_above_two_to_the_24(monkeypatch):
    """H45: ``torch.quantile`` refuses more than 2^24 elements, and sorts are slow. None of them sees a whole vector."""
    numel = 2**24 + 1
    vector = torch.empty(numel).exponential_()
    vector[-1] = 99.0

    def refuse(*arguments, **options):
        raise AssertionError("not on a whole vector")

    for name in ("quantile", "nanquantile", "sort", "kthvalue", "median", "msort", "argsort"):
        monkeypatch.setattr(torch, name, refuse)
    monkeypatch.setattr(torch.Tensor, "kthvalue", refuse)
    monkeypatch.setattr(torch.Tensor, "quantile", refuse)
    topk = torch.topk
    monkeypatch.setattr(torch, "topk", lambda v, *a, **o: topk(v, *a, **o) if v.numel() < 2**20 else refuse())
    compressor = make_compressor("sidco-e", ratio=0.0001)
    payload, _ = compressor.compress(vector, compressor.init(numel))
    assert abs(payload.count - 1678) <= 0.2 * 1678 + 1
    assert payload.indices[-1] == numel - 1


@pytest.mark.parametrize("piece", [1, 7, 100, 999, 1000, 5000])
def test_index_operations_in_pieces(monkeypatch, piece):
    """H43: CUDA's ``nonzero`` and ``topk`` refuse or fault near 2^31; the limit is lowered instead of the size raised.

    Fails when the pieces' offsets are left out.
    """
    vector = torch.randn(1000)
    vector[[3, 500, 999]] = 2.0
    expected = select_above(vector, 2.0, ties=2), largest(select_above(vector, 0.5), 40)
    compressed = {name: make_compressor(name, ratio=0.05) for name in COMPRESSORS}
    before = {name: one.compress(vector, one.init(1000))[0] for name, one in compressed.items()}
    monkeypatch.setattr(indexing, "PIECE", piece)
    found = select_above(vector, 2.0, ties=2), largest(select_above(vector, 0.5), 40)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.values, other.values)
    for name, one in compressed.items():
        assert torch.equal(one.compress(vector, one.init(1000))[0].indices, before[name].indices), name


def check_wide_indices(rank, world_size):
    """Indices of 64 bits, end to end, in a bucket that is beyond the (lowered) limit of 32 bits."""
    before = wire_module.INT32_LIMIT
    wire_module.INT32_LIMIT = indexing_limit = 500
    try:
        assert indexing_limit < 3000
        state = SIDCoState(ratio=0.01)
        gradient = torch.arange(3000.0)
        found = call(state, gradient.clone())
        assert torch.equal(found + state.feedback.state_dict()["parameter.0"], gradient)
        assert state.stats()["total"]["bytes_sent"] == 32 + 36 * 12
    finally:
        wire_module.INT32_LIMIT = before


def test_two_to_the_31(worlds):
    """H43: from 2^31 elements on, indices travel as int64; the limit is lowered, so that this can be run."""
    worlds(2).run(check_wide_indices)


VECTORS = {
    "zeros": torch.zeros(4000),
    "ones": torch.ones(4000),
    "one element": torch.ones(1),
    "two elements": torch.tensor([0.0, -3.0]),
    "one-hot": torch.eye(1, 4000)[0] * -7,
    "almost all zeros": torch.cat([torch.zeros(3999), torch.ones(1)]),
    "denormals": torch.full((4000,), 1e-42),
    "plus and minus": torch.ones(4000) * torch.tensor([1.0, -1.0]).repeat(2000),
}


def check_shapes_that_break_statistics(rank, world_size, compressor):
    for name, gradient in VECTORS.items():
        state = SIDCoState(compressor=compressor, ratio=0.01, dense_fallback=False)
        residual = torch.zeros_like(gradient)
        for _ in range(3):
            found = call(state, gradient.clone())
            assert found.isfinite().all(), name
            if compressor == "none":
                assert torch.equal(found, gradient)
                continue
            after = state.feedback.state_dict()["parameter.0"]
            torch.testing.assert_close(found + after, gradient + residual, rtol=1e-6, atol=1e-44)
            residual = after


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_constant_and_empty_statistics(worlds, compressor):
    """H8: 0/0 and log(0) in the fit; every case is finite, and sent + residual = gradient + old residual."""
    worlds(2).run(check_shapes_that_break_statistics, compressor=compressor)


def check_padding_row(rank, world_size):
    """The row of a padding index has no gradient, and must never move."""
    model = nn.Sequential(nn.Embedding(50, 8, padding_idx=0), nn.Flatten(), nn.Linear(32, 4))
    ddp_model = wrap(model)
    attach(ddp_model, ratio=0.02)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    for step in range(100):
        optimizer.zero_grad()
        tokens = torch.randint(0, 50, (6, 4), generator=torch.Generator().manual_seed(100 * step + rank))
        ddp_model(tokens).square().mean().backward()
        optimizer.step()
    assert (model[0].weight[0] == 0).all()


def test_padding_rows_stay_zero(worlds):
    """H8: noise of the compression leaked into parameters that should never move."""
    worlds(2).run(check_padding_row)


def check_flat_and_heavy(rank, world_size):
    """All magnitudes equal, and one heavy rank among light ones: never more bytes than the message has room for."""
    numel = 20_000
    generator = torch.Generator().manual_seed(rank)
    flat = torch.randn(numel, generator=generator).sign()
    heavy = torch.randn(numel, generator=generator) ** 9
    for gradient in (flat, heavy if rank == 0 else torch.zeros(numel), heavy if rank == 0 else flat):
        for compressor in ("sidco-e", "sidco-p", "topk"):
            state = SIDCoState(compressor=compressor, ratio=0.01)
            found = call(state, gradient.clone())
            assert found.isfinite().all()
            assert_equal_on_all_ranks({"found": found})
            assert state.stats()["total"]["bytes_sent"] <= 32 + 8 * 1.2 * 200
    state = SIDCoState(ratio=0.6)  # whose message would be larger than the bucket
    call(state, flat.clone())
    assert state.stats()["total"]["dense"]
    assert state.stats()["total"]["bytes_sent"] == 4 * numel


@pytest.mark.parametrize("size", [2, 3])
def test_flat_magnitudes_and_one_heavy_rank(worlds, size):
    """H16: a "sparse" gather was W times a full gradient, and one heavy rank made all allocate for it."""
    worlds(size).run(check_flat_and_heavy)


@pytest.mark.gpu
def test_embedding_above_two_to_the_31_on_cuda(tmp_path):
    """H43 on a GPU: a little more than 2^31 float16 weights, and a little fewer."""
    import torch.distributed as dist

    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for rows in (2**21 + 1, 2**21 - 2**10):
            table = nn.Embedding(rows, 1024, dtype=torch.float16, device="cuda")
            ddp_model = wrap(table)
            ddp_model.register_comm_hook(SIDCoState(ratio=1e-6), sidco_hook)
            ddp_model(torch.tensor([0, rows - 1], device="cuda")).sum().backward()
            moved = table.weight.grad.abs().sum(1).nonzero().flatten().tolist()
            assert moved == [0, rows - 1]
            del ddp_model, table
            torch.cuda.empty_cache()
    finally:
        dist.destroy_process_group()
