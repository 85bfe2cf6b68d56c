"""Every baseline is what its paper says, no better and no worse."""

import itertools
import math

import pytest
import torch
from sources import DEGENERATE, DISTRIBUTIONS

from sidco_ddp import make_compressor
from sidco_ddp.compressors import passes
from sidco_ddp.compressors.dgc import DgcState
from sidco_ddp.compressors.draws import draw_subset, generator
from sidco_ddp.compressors.randomk import RandomKState

N = 200_000


def run(compressor, vector, state=None):
    payload, state = compressor.compress(vector, compressor.init(vector.numel()) if state is None else state)
    return payload, state


# --- dgc


def test_dgc_samples_from_a_random_start_of_its_own():
    compressor = make_compressor("dgc", ratio=0.01, seed=3)
    positions = torch.arange(1.0, N + 1)
    samples = [compressor.sample(positions, DgcState(calls=call)) for call in range(20)]
    for sample in samples:
        (stride,) = sample.diff().unique().tolist()
        assert stride % 2 == 1, "an even stride would stay in a few columns of a matrix"
        assert sample[0] <= stride, "the start must be in the first stride, or the head is never sampled"
        assert 0.009 * N <= sample.numel() <= 0.012 * N
    assert len({sample[0].item() for sample in samples}) > 10, "the start must differ from call to call"
    assert torch.equal(samples[4], compressor.sample(positions, DgcState(calls=4)))
    other = make_compressor("dgc", ratio=0.01, seed=4)
    assert any(not torch.equal(other.sample(positions, DgcState(calls=c)), samples[c]) for c in range(5))


def test_dgc_samples_enough_of_a_small_vector():
    """1 % of 2000 entries hold 0.02 of the two largest: the threshold would be that of 20 entries, 5 % of them all."""
    assert make_compressor("dgc", ratio=0.001).sample(torch.randn(2000), DgcState()).numel() == 2000
    assert make_compressor("dgc", ratio=0.001).sample(torch.randn(50_000), DgcState()).numel() >= 10_000
    assert make_compressor("dgc", ratio=0.1, sample_ratio=0.5).sample(torch.randn(N), DgcState()).numel() == N


def test_dgc_threshold_is_the_top_k_of_its_sample():
    compressor = make_compressor("dgc", ratio=0.01)
    vector = DISTRIBUTIONS["student-t3"](N)
    sample = compressor.sample(vector, DgcState())
    expected = sample.sort(descending=True).values[math.ceil(0.01 * sample.numel()) - 1].item()
    for call in range(10):
        payload, state = run(compressor, vector, DgcState(calls=call))
        reached = int((vector.abs() >= state.report.threshold).sum())
        assert state.report.raw_count == reached, "entries equal to the threshold reach it"
        if call == 0:
            assert state.report.threshold == expected
        assert payload.count == (reached if reached <= 4 / 3 * 0.01 * N else 0.01 * N)


def test_dgc_takes_the_exact_top_k_where_too_many_exceed():
    """A spike train that this start and stride never meet: the sample says that everything is small."""
    compressor = make_compressor("dgc", ratio=0.01)
    vector = torch.randn(N)
    sampled = compressor.sample(torch.arange(float(N)), DgcState()).long()
    spikes = torch.ones(N, dtype=torch.bool)
    spikes[sampled] = False
    vector[spikes] *= 10
    payload, state = run(compressor, vector)
    assert state.report.raw_count > 0.1 * N
    assert payload.count == 0.01 * N
    assert payload.values.abs().min() == vector.abs().topk(payload.count).values.min()
    assert state.report.rounds == 3


def test_dgc_is_near_k_on_gradients_like_these():
    compressor = make_compressor("dgc", ratio=0.01)
    for source in ("laplace", "normal", "student-t3", "lognormal-2"):
        state = compressor.init(N)
        counts = []
        for _ in range(20):
            payload, state = run(compressor, DISTRIBUTIONS[source](N), state)
            counts.append(payload.count / (0.01 * N))
        assert max(counts) <= 4 / 3
        assert 0.8 <= sum(counts) / 20 <= 1.2, source
        assert len(set(counts)) > 1


# --- redsync


def test_redsync_ends_inside_its_bounds_where_it_may_search_long_enough():
    compressor = make_compressor("redsync", ratio=0.01, width=1e-6)
    for source in ("laplace", "normal", "student-t3", "lognormal-2", "pareto-0.3"):
        payload, _ = run(compressor, DISTRIBUTIONS[source](N))
        assert 0.49 * 0.01 * N <= payload.count <= 2 * 0.01 * N, source


def test_redsync_tries_three_thresholds_between_mean_and_maximum():
    """With the published width: halves of [0, 1] until it is no wider than 0.2."""
    compressor = make_compressor("redsync", ratio=0.001)
    vector = torch.cat([torch.rand(N - 1), torch.tensor([1e6])])
    payload, state = run(compressor, vector)
    mean, maximum = vector.abs().double().mean().item(), 1e6
    assert state.report.threshold == pytest.approx(mean + 0.125 * (maximum - mean), rel=1e-6)
    assert payload.count == 1, "far from k: a heavy tail is not searched to its end"
    assert state.report.rounds == 5

    vector = torch.arange(1.0, 1001.0)  # mean 500.5; r = 1/2 leaves 250 entries
    payload, state = run(make_compressor("redsync", ratio=0.2), vector)
    assert (state.report.threshold, payload.count, state.report.rounds) == (750.25, 250, 3)
    payload, state = run(make_compressor("redsync", ratio=0.1), vector)  # 250 > 200: upwards, r = 3/4
    assert (state.report.threshold, payload.count, state.report.rounds) == (875.125, 125, 4)
    payload, state = run(make_compressor("redsync", ratio=0.6), vector)  # 250 < 300: r = 1/4; 375 is not: r = 3/8
    assert state.report.threshold == 500.5 + 0.375 * 499.5


def test_redsync_searches_upwards_between_half_and_all_of_k():
    """As published, though fewer than k are selected."""
    vector = torch.arange(1.0, 1001.0)
    _, state = run(make_compressor("redsync", ratio=0.3), vector)  # 250 is in [150, 300)
    assert state.report.threshold > 750.25


# --- gaussiank


def test_gaussiank_is_right_on_normals():
    for ratio in (0.1, 0.01, 0.001):
        for mean in (0.0, 0.01):
            compressor = make_compressor("gaussiank", ratio=ratio)
            vector = 3e-4 * (torch.randn(10 * N) + mean)
            payload, state = run(compressor, vector)
            assert payload.count == pytest.approx(ratio * 10 * N, rel=0.1)
            expected = -torch.distributions.Normal(0.0, 3e-4).icdf(torch.tensor(ratio / 2)).item() + 3e-4 * mean
            assert state.report.threshold == pytest.approx(expected, rel=0.01)
            assert state.report.rounds == 3, "spread, one count and the selection"


@pytest.mark.parametrize(
    ("corrections", "factors"),
    [(0, ()), (1, (0.5,)), (2, (0.5, 0.5)), (3, (0.5, 0.5, 1.5))],
)
def test_gaussiank_corrects_its_threshold_at_most_so_often(corrections, factors):
    vector = torch.rand(N) - 0.5  # a bounded vector has nothing where a normal has its tail
    vector[0] = 50.0
    compressor = make_compressor("gaussiank", ratio=0.0001, corrections=corrections)
    _, state = run(compressor, vector)
    first = compressor.first_threshold(vector)
    assert state.report.threshold == first * math.prod(factors)
    assert state.report.raw_count == 1


def test_gaussiank_raises_its_threshold_on_heavy_tails():
    vector = DISTRIBUTIONS["student-t3"](N)
    compressor = make_compressor("gaussiank", ratio=0.001)
    payload, state = run(compressor, vector)
    assert state.report.raw_count > 4 / 3 * 0.001 * N
    steps = math.log(state.report.threshold / compressor.first_threshold(vector)) / math.log(1.5)
    assert steps == pytest.approx(round(steps))
    assert 1 <= round(steps) <= 3
    assert payload.count < state.report.raw_count


def test_gaussiank_does_not_mind_signs():
    vector = torch.rand(N) + 0.3
    compressor = make_compressor("gaussiank", ratio=0.01)
    assert torch.equal(run(compressor, vector)[0].indices, run(compressor, -vector)[0].indices)


# --- randomk


def test_randomk_draws_differ_by_call_seed_and_length_only():
    compressor = make_compressor("randomk", ratio=0.01)
    global_state = torch.get_rng_state()
    draws = [run(compressor, torch.randn(N), RandomKState(calls=call))[0].indices for call in range(5)]
    torch.manual_seed(7)
    again = [run(compressor, torch.zeros(N), RandomKState(calls=call))[0].indices for call in range(5)]
    assert all(torch.equal(a, b) for a, b in zip(draws, again, strict=True)), "the vector must not matter"
    for a, b in itertools.combinations(draws, 2):
        assert len(set(a.tolist()) & set(b.tolist())) < 100, "20 in common are expected of two draws of 2000"
    other = run(make_compressor("randomk", ratio=0.01, seed=1), torch.zeros(N), RandomKState())[0].indices
    assert not torch.equal(draws[0], other)
    assert not torch.equal(draws[0], run(compressor, torch.zeros(N + 1), RandomKState())[0].indices)
    twice = run(compressor, torch.zeros(2 * N), RandomKState())[0].indices % N
    assert len(set(twice.tolist()) & set(draws[0].tolist())) < 200, "40 in common are expected, all of one stream"
    torch.set_rng_state(global_state)
    expected = torch.rand(3)
    torch.set_rng_state(global_state)
    run(compressor, torch.zeros(N))
    run(make_compressor("dgc"), torch.zeros(N))
    assert torch.equal(torch.rand(3), expected), "the global generator was touched"


@pytest.mark.parametrize(("numel", "count"), [(1, 1), (2, 1), (1024, 3), (1025, 1), (1500, 750), (1500, 751)])
@pytest.mark.parametrize("rest", [0, 0.3, 1])
def test_subsets_have_their_size(numel, count, rest):
    count = count + round(rest * (numel - count))
    for call in range(50):
        subset = draw_subset(generator(0, call, numel), numel, count)
        assert subset.numel() == count
        assert (subset.diff() > 0).all()
        assert subset[0] >= 0
        assert subset[-1] < numel
    assert draw_subset(generator(0, 0, 5000), 5000, 0).numel() == 0


@pytest.mark.parametrize(("numel", "count"), [(20, 5), (2000, 60), (2000, 800), (2000, 1700)])
def test_subsets_are_uniform(numel, count):
    """Every entry, and every pair of neighbours, as often as any other: chi-square per degree of freedom near 1."""
    calls = 2000
    hits, pairs = torch.zeros(numel), torch.zeros(numel - 1)
    for call in range(calls):
        mask = torch.zeros(numel)
        mask[draw_subset(generator(5, call, numel), numel, count)] = 1
        hits += mask
        pairs += mask[1:] * mask[:-1]
    share = count / numel
    chi = ((hits - calls * share) ** 2).sum() / (calls * share * (1 - share)) / (numel - 1)
    assert chi == pytest.approx(1.0, abs=6 * math.sqrt(2 / numel))
    both = share * (count - 1) / (numel - 1)
    assert pairs.mean() / calls == pytest.approx(both, rel=0.05)


# --- options


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("dgc", "sample_ratio", 0, r"sample_ratio must be a number in \(0, 1\], got 0"),
        ("dgc", "seed", -1, "seed must be a whole number >= 0, got -1"),
        ("redsync", "width", 2, r"width must be a number in \(0, 1\], got 2"),
        ("gaussiank", "corrections", -1, "corrections must be a whole number >= 0, got -1; 3 is the paper's"),
        ("randomk", "seed", 0.5, "seed must be a whole number >= 0, got 0.5"),
    ],
)
def test_bad_options(name, option, value, message):
    with pytest.raises(ValueError, match=message):
        make_compressor(name, **{option: value})


# --- the passes under them


@pytest.mark.parametrize("piece", [7, 1 << 18])
def test_passes_equal_their_definitions(monkeypatch, piece):
    """Also where float32 sums or squares overflow, vanish, or cancel."""
    monkeypatch.setattr(passes, "CPU_PIECE", piece)
    sources = DISTRIBUTIONS | {name: DEGENERATE[name] for name in ("huge", "denormals", "constant", "all-scales")}
    sources["all-huge"] = lambda n: torch.full((n,), 3e38)
    for name, make in sources.items():
        vector = make(3000)
        wide = vector.double()
        mean, maximum = passes.magnitude_scale(vector)
        assert mean == pytest.approx(wide.abs().mean().item(), rel=1e-5), name
        assert maximum == vector.abs().max().item()
        spread = passes.signed_spread(vector)
        size = wide.square().mean().sqrt().item()
        assert spread.mean == pytest.approx(wide.mean().item(), abs=1e-5 * size), name
        assert spread.deviation == pytest.approx(wide.std(correction=0).item(), abs=1e-5 * size), name
        threshold = vector.abs().median().item()
        assert passes.count_above(vector, threshold) == int((vector.abs() > threshold).sum())


def test_spread_survives_a_large_mean():
    """In float32 the squares of 1000 ± 0.1 are known to 0.06: far more than the variance sought."""
    vector = 1000 + 0.1 * torch.randn(N)
    assert passes.signed_spread(vector).deviation == pytest.approx(vector.double().std().item(), rel=1e-4)
