"""q_i from a chain, by either way of inference."""

import math

import pytest
import torch
from prior_cases import leaves_of, make_prior, with_leaves

from l2l_niw.inference.chain import Settings, init, iterate_variance, mean_of, step
from l2l_niw.inference.curvature import GGN, SGLD
from l2l_niw.inference.posterior import chain_precision, draw_network, posterior

SHAPES = [(3, 2), (4,)]


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def adapted(prior_in_chain, curvature, steps=4, used=(True, True), **options):
    """A prior, and a chain with arbitrary gradients and, if the strategy looks, an arbitrary curvature."""
    prior = make_prior([torch.randn(s) for s in SHAPES], [torch.randn(s) for s in SHAPES])
    settings = Settings(0.1, 0.5, curvature.noisy, prior_in_chain=prior_in_chain, **options)
    chain = init(prior.m0)
    for _ in range(steps):
        gradients = [torch.randn(s) if u else None for s, u in zip(SHAPES, used)]
        chain = step(chain, gradients, prior, 2, settings)
    if curvature.needs_outputs:
        chain = chain._replace(observed=[torch.rand(s) + 0.5 for s in SHAPES])
    return prior, chain, settings


def variance_of(chain, i, scale=None):
    return iterate_variance(chain, i, scale)


def combined(prior, i, m_bar, a):
    """The product of two Gaussians, by adding their natural parameters."""
    p0 = torch.exp(-prior.log_variance[i])
    return (a * m_bar + p0 * prior.m0[i]) / (a + p0), 1 / (a + p0)


@pytest.mark.parametrize("burn_in", [None, 1])
def test_in_closed_form_the_chain_is_the_likelihood(burn_in):
    prior, chain, settings = adapted(False, SGLD(), burn_in=burn_in)
    means, variances = posterior(chain, prior, SGLD(), settings)
    for i, (mean, variance) in enumerate(zip(means, variances)):
        expected = combined(prior, i, mean_of(chain)[0][i], 1 / variance_of(chain, i))
        assert torch.allclose(mean, expected[0])
        assert torch.allclose(variance, expected[1])


@pytest.mark.parametrize("burn_in", [None, 1])
def test_with_the_prior_in_the_chain_its_moments_are_the_posteriors(burn_in):
    prior, chain, settings = adapted(True, SGLD(), burn_in=burn_in)
    means, variances = posterior(chain, prior, SGLD(), settings)
    for i in range(len(SHAPES)):
        assert torch.equal(means[i], mean_of(chain)[0][i])
        assert torch.allclose(variances[i], variance_of(chain, i))


def test_with_the_prior_in_the_chain_a_likelihoods_curvature_still_gets_the_priors():
    prior, chain, settings = adapted(True, GGN())
    means, variances = posterior(chain, prior, GGN(), settings)
    for i in range(len(SHAPES)):
        a = chain.observed[i] / (chain.steps * settings.temperature)
        assert torch.equal(means[i], chain.theta[i]), "the chain went to the posterior's mean itself"
        assert torch.allclose(variances[i], combined(prior, i, chain.theta[i], a)[1])


@pytest.mark.parametrize("curvature", [SGLD(), GGN()])
@pytest.mark.parametrize("prior_in_chain", [False, True])
def test_a_weight_that_no_loss_used_has_the_prior_for_its_posterior(curvature, prior_in_chain):
    options = {"precision_bounds": (1e-12, math.inf)}
    prior, chain, settings = adapted(prior_in_chain, curvature, used=(True, False), **options)
    means, variances = posterior(chain, prior, curvature, settings)
    assert torch.allclose(means[1], prior.m0[1])
    assert torch.allclose(variances[1], prior.log_variance[1].exp())
    assert not torch.allclose(variances[0], prior.log_variance[0].exp(), rtol=0.01)


def test_the_mean_is_the_function_of_l0_that_it_is_given_as():
    prior, chain, settings = adapted(True, SGLD())
    mean = [m.clone().requires_grad_() for m in mean_of(chain)[0]]
    means, _ = posterior(chain, prior, SGLD(), settings, mean)
    (gradient,) = torch.autograd.grad(means[0].sum(), mean[0])
    assert torch.equal(gradient, torch.ones(SHAPES[0]))


@pytest.mark.parametrize("given", [False, True])
def test_in_closed_form_the_chains_mean_has_the_graph_that_it_is_given(given):
    prior, chain, settings = adapted(False, SGLD())
    leaves = leaves_of(prior)
    prior, mean = with_leaves(prior, leaves), [m.clone().requires_grad_() for m in mean_of(chain)[0]]
    means, _ = posterior(chain._replace(theta=mean), prior, SGLD(), settings, mean if given else None)
    found = torch.autograd.grad(means[0].sum(), [leaves[0], mean[0]], allow_unused=True)
    p0, a = torch.exp(-prior.log_variance[0]), 1 / variance_of(chain, 0)
    assert torch.allclose(found[0], p0 / (a + p0))
    assert torch.allclose(found[1], a / (a + p0)) if given else found[1] is None


@pytest.mark.parametrize("prior_in_chain", [False, True])
def test_the_chains_precision_stays_within_its_bounds(prior_in_chain):
    prior, chain, settings = adapted(prior_in_chain, SGLD(), burn_in=0)
    raw = 1 / variance_of(chain, 0)
    low, high = raw.quantile(0.3).item(), raw.quantile(0.7).item()
    settings = settings._replace(precision_bounds=(low, high))
    a, before = (chain_precision(chain, 0, prior, SGLD(), settings, bounded) for bounded in (True, False))
    assert torch.allclose(before, raw)
    assert torch.allclose(a, raw.clamp(low, high))
    _, variances = posterior(chain, prior, SGLD(), settings)
    expected = 1 / a if prior_in_chain else 1 / (a + torch.exp(-prior.log_variance[0]))
    assert torch.allclose(variances[0], expected)


@pytest.mark.parametrize("curvature", [SGLD(), GGN()])
@pytest.mark.parametrize("learned", [False, True])
def test_the_precision_of_a_weight_that_no_loss_used_is_nothing(curvature, learned):
    options = {"burn_in": 1, "learn_step_sizes": learned, "precision_bounds": (1e-12, 40.0)}
    prior, chain, settings = adapted(False, curvature, used=(True, False), **options)
    for bounded in (False, True):
        every = [chain_precision(chain, i, prior, curvature, settings, bounded) for i in range(2)]
        scale = prior.scale(0) if learned else None
        raw = 1 / variance_of(chain, 0, scale) if curvature.noisy else chain.observed[0] / (4 * 0.5)
        assert torch.allclose(every[0], raw.clamp(1e-12, 40.0) if bounded else raw)
        assert torch.equal(every[1], torch.full(SHAPES[1], 1e-12 if bounded else 0.0)), "no loss said anything of it"
        assert not any(a.requires_grad for a in every)


def test_the_noise_of_scaled_steps_is_scaled():
    prior, chain, settings = adapted(True, SGLD(), learn_step_sizes=True)
    _, variances = posterior(chain, prior, SGLD(), settings)
    assert torch.allclose(variances[0], 2 * 0.1 * 0.5 / 2 * prior.log_variance[0].exp())


@pytest.mark.parametrize("curvature", [SGLD(), GGN()])
def test_networks_drawn_in_closed_form_have_the_posteriors_moments(curvature):
    """Many weights of one kind, so that one network is a sample."""
    size = 100_000
    prior = make_prior([torch.full((size,), 2.0)], [torch.full((size,), -1.0)])
    settings = Settings(0.1, 0.5, curvature.noisy, burn_in=0)
    chain = init(prior.m0)
    for _ in range(2):
        chain = step(chain, [torch.full((size,), 3.0)], prior, 2, settings)
    if curvature.needs_outputs:
        chain = chain._replace(observed=[torch.full((size,), 4.0)])
        a = torch.tensor(4.0 / (2 * 0.5))
        mean, variance = combined(prior, 0, mean_of(chain)[0][0], a)
        (drawn,) = draw_network(chain, mean_of(chain)[0], prior, curvature, settings)
        assert drawn.mean().item() == pytest.approx(mean.mean().item(), abs=0.01)
        assert drawn.var().item() == pytest.approx(variance.mean().item(), rel=0.02)
    else:  # the chain's own deviation, weight by weight
        a = 1 / variance_of(chain, 0)
        mean, variance = combined(prior, 0, mean_of(chain)[0][0], a)
        (drawn,) = draw_network(chain, mean_of(chain)[0], prior, curvature, settings)
        standardised = (chain.theta[0] - mean_of(chain)[0][0]) * a.sqrt()
        assert torch.allclose(drawn, mean + variance.sqrt() * standardised)
