import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidco_ddp.distributions import (
    PIECE,
    Moments,
    exponential_quantile,
    gamma_quantile,
    generalized_pareto_quantile,
    moments,
)

N = 400_000
QUANTILES = [exponential_quantile, gamma_quantile, generalized_pareto_quantile]


def test_moments_match_the_definition_across_pieces():
    values = torch.rand(PIECE * 2 + 17) + 0.5
    found = moments(values, 0.25, with_log=True)
    excess = values.double() - 0.25
    assert found.mean == pytest.approx(excess.mean().item(), rel=1e-9)
    assert found.variance == pytest.approx(excess.var(correction=0).item(), rel=1e-7)
    assert found.mean_log == pytest.approx(excess.log().mean().item(), rel=1e-9)
    assert (found.minimum, found.maximum) == (values.min().item(), values.max().item())


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e30, 3e38])
def test_moments_survive_extreme_scales(scale):
    """In float32 the squares of these would underflow to 0 or overflow to infinity."""
    values = torch.full((1000,), scale)
    values[:500] *= 0.5
    found = moments(values)
    assert 0.0 < found.variance < math.inf
    assert found.mean**2 / found.variance == pytest.approx(9.0, rel=1e-2)


@pytest.mark.parametrize("tail", [0.25, 0.01, 0.001])
def test_exponential_quantile_selects_its_tail_of_a_laplace(tail):
    values = torch.distributions.Laplace(0.0, 2.0).sample((N,)).abs()
    share = (values > exponential_quantile(moments(values), tail)).float().mean().item()
    assert share == pytest.approx(tail, rel=0.15)


@pytest.mark.parametrize("shape", [-0.4, -0.2, 0.2, 0.3])
@pytest.mark.parametrize("tail", [0.25, 0.01])
def test_generalized_pareto_quantile_selects_its_tail(shape, tail):
    values = ((torch.rand(N, dtype=torch.float64) ** -shape - 1) / shape).float()
    share = (values > generalized_pareto_quantile(moments(values), tail)).float().mean().item()
    assert share == pytest.approx(tail, rel=0.15)


@pytest.mark.parametrize("shape", [0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("tail", [0.25, 0.01, 0.001])
def test_gamma_quantile_is_the_papers_bound(shape, tail):
    """Corollary 1.2 with the shape's approximate maximum likelihood estimate, from the exact moments of a gamma."""
    mean_log = torch.digamma(torch.tensor(shape, dtype=torch.float64)).item()
    fit = Moments(mean=shape, variance=shape, mean_log=mean_log, minimum=0.0, maximum=99.0)
    assert gamma_quantile(fit, tail) == pytest.approx(-(math.log(tail) + math.lgamma(shape)), rel=0.02, abs=0.02)


def test_gamma_quantile_of_a_sample_errs_on_the_side_of_fewer():
    values = torch.distributions.Gamma(0.6, 1.0).sample((N,))
    share = (values > gamma_quantile(moments(values, with_log=True), 0.01)).float().mean().item()
    assert 0.004 < share < 0.008  # the bound drops a factor x^(shape - 1), about 0.56 at this quantile


def test_generalized_pareto_becomes_the_exponential_as_its_shape_goes_to_zero():
    fit = Moments(mean=2.0, variance=4.0, mean_log=math.nan, minimum=0.0, maximum=9.0)  # mean² = variance: shape 0
    near = fit._replace(variance=4.0 * (1 + 1e-7))
    assert generalized_pareto_quantile(fit, 0.01) == exponential_quantile(fit, 0.01)
    assert generalized_pareto_quantile(near, 0.01) == pytest.approx(exponential_quantile(fit, 0.01), rel=1e-5)


@pytest.mark.parametrize("quantile", QUANTILES)
def test_quantiles_of_constants_are_finite(quantile):
    fit = moments(torch.full((100,), 3.0), with_log=True)
    for tail in (1.0, 0.5, 1e-6):
        assert 0.0 <= quantile(fit, tail) < math.inf


@settings(deadline=None, max_examples=50)
@given(
    mean=st.floats(1e-40, 1e30),
    spread=st.floats(0.0, 50.0),
    gap=st.floats(0.0, 60.0),
    tails=st.tuples(st.floats(1e-9, 1.0), st.floats(1e-9, 1.0)),
)
def test_quantiles_fall_as_the_tail_grows(mean, spread, gap, tails):
    fit = Moments(mean, spread * mean * mean, math.log(mean) - gap, 0.0, math.inf)
    small, large = sorted(tails)
    for quantile in QUANTILES:
        assert math.inf > quantile(fit, small) >= quantile(fit, large) * (1 - 1e-12) >= 0.0
