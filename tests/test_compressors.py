"""One contract, kept by every compressor in the registry: adding a member adds its tests."""

import dataclasses

import pytest
import torch
from sources import DEGENERATE, DISTRIBUTIONS

from sidco_ddp import COMPRESSORS, make_compressor
from sidco_ddp.checkpoint import from_plain, to_plain
from sidco_ddp.compressors.base import AbstractCompressor

N = 20_000


@pytest.fixture(params=COMPRESSORS)
def name(request):
    return request.param


def test_selects_finite_entries_at_unique_ascending_indices(name):
    for numel in (1, 2, 100, N):
        for source, make in (DISTRIBUTIONS | DEGENERATE).items():
            for ratio in (1.0, 0.1, 0.001):
                compressor = make_compressor(name, ratio=ratio)
                vector = make(numel)
                before = vector.clone()
                payload, _ = compressor.compress(vector, compressor.init(numel))
                assert torch.equal(vector, before), f"{source}: the vector was written to"
                assert payload.numel == numel
                assert payload.indices.dtype == torch.int64
                assert payload.values.dtype == torch.float32
                assert (payload.indices.diff() > 0).all()
                assert torch.equal(payload.values, vector[payload.indices]), source
                assert payload.values.untyped_storage().data_ptr() != vector.untyped_storage().data_ptr()


def test_holds_its_count(name):
    """Those that say so: within 20 % of k, and one entry."""
    compressor = make_compressor(name, ratio=0.01)
    if not compressor.holds_count:
        pytest.skip(f"{name} does not hold its count: it goes through exchange='exact'")
    k = compressor.target_count(N)
    for make in DISTRIBUTIONS.values():
        payload, _ = compressor.compress(make(N), compressor.init(N))
        assert abs(payload.count - k) <= 0.2 * k + 1


def test_ratio_one_selects_every_nonzero(name):
    compressor = make_compressor(name, ratio=1.0)
    for source in ("zeros-90", "laplace"):
        for numel in (3, 100, N):
            vector = DISTRIBUTIONS[source](numel)
            payload, _ = compressor.compress(vector, compressor.init(numel))
            assert set(vector.nonzero().squeeze(1).tolist()) <= set(payload.indices.tolist()), (source, numel)


def test_is_hyper_parameters_only(name):
    compressor = make_compressor(name, ratio=0.01)
    assert isinstance(compressor, AbstractCompressor)
    assert compressor.ratio == 0.01
    with pytest.raises(dataclasses.FrozenInstanceError):
        compressor.ratio = 0.5
    assert compressor == make_compressor(name, ratio=0.01), "two ranks compare them by their repr"


def test_state_is_handed_in_and_back(name):
    """Equal states and vectors give equal results: nothing is kept anywhere else."""
    compressor = make_compressor(name, ratio=0.01)
    vectors = [DISTRIBUTIONS["student-t3"](N) for _ in range(12)]

    def run(state, vectors):
        selections = []
        for vector in vectors:
            payload, state = compressor.compress(vector, state)
            selections.append(payload.indices)
        return selections, state

    whole, _ = run(compressor.init(N), vectors)
    first, state = run(compressor.init(N), vectors[:7])
    plain = to_plain(state)
    second, _ = run(from_plain(compressor.init(N), plain), vectors[7:])
    assert all(torch.equal(a, b) for a, b in zip(whole, first + second, strict=True))
    assert is_plain(plain)


def is_plain(value):
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or type(value) in (int, float, str, bool, torch.Tensor)


def test_bad_ratio_names_the_remedy(name):
    for ratio in (0, -1, 1.5, float("nan"), "abc", None, True):
        with pytest.raises(ValueError, match=r"ratio must be a number in \(0, 1\], got .*; ratio=0.001"):
            make_compressor(name, ratio=ratio)


def test_unknown_names_and_options_list_what_there_is(name):
    with pytest.raises(ValueError, match=f"compressor must be one of .*{name}.*got 'sidco'"):
        make_compressor("sidco")
    with pytest.raises(ValueError, match=f"compressor '{name}' has no option 'ration'; it has ratio"):
        make_compressor(name, ration=0.1)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("stages", 0, "stages must be a whole number >= 1, got 0; None adapts"),
        ("stages", 1.5, "stages must be a whole number >= 1, got 1.5"),
        ("stage_rule", "fixed", "stage_rule must be one of learned, paper; got 'fixed'"),
        ("bounded", 1, "bounded must be True or False, got 1"),
        ("warm_start", None, "warm_start must be True or False, got None"),
        ("tolerance", -0.1, "tolerance must be a finite number >= 0, got -0.1"),
        ("tolerance", 1.0, "tolerance and first_tail must be below 1"),
        ("first_tail", 0.0, "first_tail must be a finite number >= 1e-06, got 0.0"),
        ("adapt_every", 0, "adapt_every must be a whole number >= 1, got 0"),
        ("fits", "weibull", "fits must be one of exponential, pareto, gamma-pareto"),
    ],
)
def test_bad_sidco_options(option, value, message):
    with pytest.raises(ValueError, match=message):
        make_compressor("sidco-e", **{option: value})
