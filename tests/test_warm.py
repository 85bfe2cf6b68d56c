"""The warm start: one read of the vector a call, and the same promise as without it, whatever comes next."""

import math

import pytest
import torch
from sources import DEGENERATE, DISTRIBUTIONS
from test_hook import call
from test_threshold import SCHEMES, assert_promise

from sidco_ddp import SIDCoState, make_compressor
from sidco_ddp.compressors.warm import AIM, WarmStart
from sidco_ddp.feedback import ErrorFeedback
from sidco_ddp.layout import BucketLayout

N = 50_000


def error_fed(steps, numel=N, drift=True):
    """Gradients of a run that learns: scales that differ by parameter, a common direction, noise, slow decay."""
    scales = torch.rand(numel).add(1e-3).pow(-0.4)
    direction = torch.randn(numel)
    for step in range(steps):
        if drift:
            direction = 0.95 * direction + 0.3 * torch.randn(numel)
        yield (direction + 2 * torch.randn(numel)) * scales * 0.99**step


@pytest.mark.parametrize("kernels", ["torch", "numba"])
@pytest.mark.parametrize("ratio", [0.01, 0.001])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_error_fed_run_reads_each_vector_once(scheme, ratio, kernels):
    if kernels != "torch":
        pytest.importorskip(kernels)
    layout, feedback = BucketLayout(("w",), (N,)), ErrorFeedback(kernels=kernels)
    compressor = make_compressor(scheme, ratio=ratio)
    state, k = compressor.init(N), compressor.target_count(N)
    cold, touched = 0, []
    for step, gradient in enumerate(error_fed(200)):
        residual = feedback.state_dict().get("w", torch.zeros(N))
        target = gradient + residual
        payload, state = compressor.select(feedback.target(layout, gradient), state)
        assert_promise(target, payload, k)
        feedback.record(layout, payload)
        report = state.report
        assert report.rounds >= 1
        assert (report.touched < 2 * N) == report.warm, "a warm call reads the vector once, a cold one more often"
        if step >= 10:
            cold += not report.warm
            touched.append(report.touched / N)
    assert cold <= 0.05 * 190
    assert sorted(touched)[95] < 1 + 40 * ratio, "after the one read only a few k elements are touched"


def check_stats(rank, world_size):
    """The same through the hook's statistics."""
    state = SIDCoState(ratio=0.01)
    reads = []
    for gradient in error_fed(200, 20_000):
        call(state, gradient)
        total = state.stats()["total"]
        (bucket,) = state.stats()["buckets"]
        assert bucket["warm"] == total["warm"]
        assert bucket["rounds"] == total["rounds"] >= 1
        assert abs(total["sent_khat"] - 200) <= 41
        reads.append(total["touched"] // 20_000)
    assert sum(read != 1 for read in reads[10:]) <= 0.05 * 190


def test_stats_show_one_read_a_call(worlds):
    worlds(1).run(check_stats)


REGIMES = {
    "larger": lambda vector: vector * 1e6,
    "smaller": lambda vector: vector * 1e-6,
    "flipped": torch.neg,
    "same": torch.clone,
    "shuffled": lambda vector: vector[torch.randperm(len(vector))],
    "half silent": lambda vector: vector * (torch.arange(len(vector)) < len(vector) // 2),
}


@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001, 0.0001])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_change_of_regime_is_survived_in_the_same_call(scheme, ratio):
    """Each vector against the state that every other one left behind, and its changes of scale straight after it."""
    compressor = make_compressor(scheme, ratio=ratio)
    state, k = compressor.init(N), compressor.target_count(N)
    sources = list((DISTRIBUTIONS | DEGENERATE).items())
    for index in torch.randperm(len(sources)).tolist() * 2:
        vector = sources[index][1](N)
        for change in (torch.clone, *REGIMES.values()):
            changed = change(vector).clamp(-3e38, 3e38)
            payload, state = compressor.compress(changed, state)
            assert_promise(changed, payload, k)


@pytest.mark.parametrize("regime", REGIMES)
def test_the_call_after_a_change_is_warm_again(regime):
    compressor = make_compressor("sidco-e", ratio=0.001)
    state = compressor.init(N)
    vector = DISTRIBUTIONS["student-t3"](N)
    for _ in range(3):
        _, state = compressor.compress(vector, state)
    assert state.report.warm
    for _ in range(2):
        _, state = compressor.compress(REGIMES[regime](vector), state)
    assert state.report.warm


def test_buckets_with_fewer_non_zeros_than_k_are_read_once():
    """Rows of an embedding that no batch used: every non-zero is sent, with the threshold 0."""
    compressor = make_compressor("sidco-e", ratio=0.01)
    state = compressor.init(N)
    for _ in range(3):
        vector = torch.zeros(N)
        vector[torch.randperm(N)[:100]] = torch.randn(100)
        payload, state = compressor.compress(vector, state)
        assert payload.count == 100
    assert state.report.warm
    assert state.report.touched == N
    dense = torch.randn(N)
    payload, state = compressor.compress(dense, state)
    assert_promise(dense, payload, 500)


def test_margin_follows_what_it_lets_through():
    warm = WarmStart(1.0, 0.9)
    assert warm.follow(round(AIM * 1000), 1000).margin == pytest.approx(0.9)
    assert warm.follow(10_000, 1000).margin > 0.9 > warm.follow(1000, 1000).margin
    for count in (0, 10**9):
        for _ in range(50):
            warm = warm.follow(count, 1000)
        assert warm.margin == (0.3 if count == 0 else 0.98)


@pytest.mark.parametrize("options", [{"warm_start": False}, {"stage_rule": "paper"}, {"bounded": False}])
def test_reproduction_never_starts_warm(options):
    compressor = make_compressor("sidco-e", ratio=0.001, **options)
    state = compressor.init(N)
    for _ in range(4):
        vector = DISTRIBUTIONS["laplace"](N)
        payload, state = compressor.compress(vector, state)
        fresh, _ = compressor.compress(vector, compressor.init(N)._replace(stages=state.stages))
        assert not state.report.warm
        assert torch.equal(payload.indices, fresh.indices), "the call before must not matter"


def test_not_finite_is_remembered_nowhere():
    compressor = make_compressor("sidco-e", ratio=0.001)
    state = compressor.init(N)
    for _ in range(2):
        for bad in (math.nan, math.inf):
            vector = torch.randn(N)
            vector[777] = bad
            payload, after = compressor.compress(vector, state)
            assert payload.count == 0
            assert after == state
        _, state = compressor.compress(torch.randn(N), state)
