"""L_0 as an episode sees it: a snapshot with a graph to the parameters."""

import math

import pytest
import torch
from prior_cases import leaves_of, make_prior, with_leaves

from l2l_niw.inference import prior as priors
from l2l_niw.inference.wishart import WISHARTS, mode_ratio, to_raw

SHAPES = [(3, 2), (4,), ()]


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def l0(initial=-1.5, wishart="factorised"):
    m0, log_variance = [torch.randn(s) for s in SHAPES], [0.5 * torch.randn(s) + initial for s in SHAPES]
    return make_prior(m0, log_variance, initial=initial, wishart=wishart)


@pytest.mark.parametrize("wishart", WISHARTS)
def test_a_prior_has_the_values_that_it_is_made_of(wishart):
    prior = l0(wishart=wishart)
    assert prior.d == 11
    assert prior.n0.item() == pytest.approx(12.5 if wishart == "full" else 2.5)
    assert prior.start == pytest.approx(math.exp(1.5))
    for i, log_variance in enumerate(prior.log_variance):
        assert torch.allclose(prior.precision(i), torch.exp(-log_variance))
        assert torch.allclose(prior.scale(i), torch.exp(log_variance + 1.5))


@pytest.mark.parametrize("wishart", WISHARTS)
def test_the_modes_variance_is_v0_over_n0_less_what_its_ratio_takes(wishart):
    prior = l0(wishart=wishart)
    means, variances = with_leaves(prior, leaves_of(prior)).mode()
    ratio = mode_ratio(prior.n0.item(), wishart, prior.d)
    for i in range(len(SHAPES)):
        assert torch.equal(means[i], prior.m0[i])
        assert torch.allclose(variances[i], ratio * prior.log_variance[i].exp())
        assert not means[i].requires_grad
        assert not variances[i].requires_grad


def functions_of(prior):
    """Values of everything that an episode takes from its prior."""
    every = range(len(prior.m0))
    return [*prior.m0, *map(prior.scale, every), *map(prior.precision, every), prior.n0]


@pytest.mark.parametrize("wishart", WISHARTS)
def test_what_is_written_to_the_parameters_later_changes_nothing(wishart):
    before = l0(wishart=wishart)
    leaves = leaves_of(before)
    prior = with_leaves(before, leaves)
    with torch.no_grad():
        for leaf in leaves:
            leaf.add_(1.0)
    for got, expected in zip(functions_of(prior), functions_of(before)):
        assert torch.allclose(got, expected)
    for got, expected in zip(prior.mode(), before.mode()):
        assert all(torch.allclose(a, b) for a, b in zip(got, expected))


@pytest.mark.parametrize("wishart", WISHARTS)
def test_gradients_are_those_of_the_time_and_reach_the_parameters(wishart):
    start = l0(wishart=wishart)
    upstream = [torch.randn_like(t) for t in functions_of(start)]
    found = []
    for written in (False, True):
        leaves = leaves_of(start)
        values = functions_of(with_leaves(start, leaves))
        if written:
            with torch.no_grad():
                for leaf in leaves:
                    leaf.mul_(3.0)
        found.append(torch.autograd.grad(values, leaves, upstream))
    count = len(SHAPES)
    for i, log_variance in enumerate(start.log_variance):
        in_scale, in_precision = upstream[count + i], upstream[2 * count + i]
        expected = in_scale * torch.exp(log_variance + 1.5) - in_precision * torch.exp(-log_variance)
        for gradients in found:
            assert torch.equal(gradients[i], upstream[i])
            assert torch.allclose(gradients[count + i], expected)
    for gradients in found:
        assert torch.allclose(gradients[-1], upstream[-1] * start.raw_n0.exp())


def test_large_networks_are_not_held_twice(monkeypatch):
    monkeypatch.setattr(priors, "SMALL", 10)
    prior = l0()
    leaves = leaves_of(prior)
    found = with_leaves(prior, leaves)
    assert all(a is b for a, b in zip((*found.m0, *found.log_variance), leaves))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_log_variances_of_half_models_stay_float32(dtype):
    m0, log_variance = [torch.randn(5).to(dtype)], [torch.randn(5, dtype=torch.float32).requires_grad_()]
    raw = torch.tensor(to_raw(2.5, "factorised", 5), dtype=torch.float32)
    prior = priors.init(["w"], m0, log_variance, raw, -1.0, "factorised")
    assert prior.m0[0].dtype == dtype
    assert prior.scale(0).dtype == prior.precision(0).dtype == torch.float32
    (mean,), (variance,) = prior.mode()
    assert (mean.dtype, variance.dtype) == (dtype, torch.float32)
    prior.scale(0).sum().backward()
    assert log_variance[0].grad.dtype == torch.float32
