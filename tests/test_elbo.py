"""Meta-test inference against the closed form of a linear-Gaussian model."""

import pytest
import torch
from torch import nn

from l2l_niw import NIW
from l2l_niw.elbo import proximal_step
from l2l_niw.errors import ArgumentError, LossError
from l2l_niw.wishart import WISHARTS

NOISE = 0.5


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def linear_gaussian(d=3, n=8):
    x, y = torch.randn(n, d), torch.randn(n)
    return x, y, x.T @ x / NOISE**2, x.T @ y / NOISE**2


def mean_field_optimum(hessian, moment, prior_mean, prior_variance, kl_weight=1.0):
    """The minimiser of E[l] + kl_weight * KL over factorised Gaussians."""
    precision = hessian + torch.diag(kl_weight / prior_variance)
    mean = torch.linalg.solve(precision, moment + kl_weight * prior_mean / prior_variance)
    return mean, kl_weight / precision.diagonal()


@pytest.mark.parametrize("kl_weight", [1.0, 0.1])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_proximal_steps_with_exact_gradients_reach_the_optimum(kl_weight, scale):
    x, y, hessian, moment = linear_gaussian()
    n = len(y)
    prior_mean, prior_variance = torch.randn(3), scale * (torch.rand(3) + 0.5)
    mean, std = prior_mean.clone(), prior_variance.sqrt()
    for _ in range(20_000):
        mean, std = proximal_step(
            mean, std, (hessian @ mean - moment) / n, hessian.diagonal() * std / n,
            prior_mean, prior_variance, lr=0.05, weight=kl_weight / n,
        )
    expected_mean, expected_variance = mean_field_optimum(hessian, moment, prior_mean, prior_variance, kl_weight)
    assert torch.allclose(mean, expected_mean, atol=1e-8)
    assert torch.allclose(std.square(), expected_variance, rtol=1e-7)


@pytest.mark.parametrize("wishart", WISHARTS)
def test_posterior_from_the_support_matches_the_closed_form(wishart):
    x, y, hessian, moment = linear_gaussian()
    niw = NIW(nn.Linear(3, 1, bias=False), lr=0.01, prior_precision=2.0, wishart=wishart, kl_weight=1.0)

    def nll(network):
        return 0.5 * ((network(x).squeeze(-1) - y) / NOISE).square().mean()

    prior = niw.prior()
    post = niw.clone().posterior(nll, steps=500, samples=64)
    expected_mean, expected_variance = mean_field_optimum(
        hessian, moment, prior.mean["weight"].flatten().detach(), prior.variance["weight"].flatten()
    )
    assert torch.allclose(post.mean["weight"].flatten(), expected_mean, atol=0.03)
    assert torch.allclose(post.variance["weight"].flatten(), expected_variance, rtol=0.1)


def test_no_step_gives_the_mode():
    niw = NIW(nn.Linear(3, 1), lr=0.1)
    post, prior = niw.clone().posterior(lambda network: network(torch.ones(2, 3)).mean(), steps=0), niw.prior()
    for name in prior.mean:
        assert torch.equal(post.mean[name], prior.mean[name])
        assert torch.allclose(post.variance[name], prior.variance[name])


def test_the_number_of_data_is_seen_or_given():
    niw = NIW(nn.Linear(3, 1), lr=0.1, kl_weight=1.0, prior_precision=1.0)
    x = torch.randn(8, 3)

    def spread(**options):
        torch.manual_seed(3)
        post = niw.clone().posterior(lambda network: network(x).square().mean(), steps=30, **options)
        return torch.cat([v.flatten() for v in post.variance.values()])

    assert torch.equal(spread(), spread(n=8))
    assert (spread(n=800) < spread()).all()


def test_bad_test_time_arguments_are_named():
    learner, x = NIW(nn.Linear(3, 1), lr=0.1).clone(), torch.randn(2, 3)
    with pytest.raises(ArgumentError, match="steps must be a whole number"):
        learner.posterior(lambda network: network(x).mean(), steps=-1)
    with pytest.raises(LossError, match="nll"):
        learner.posterior(lambda network: network(x))
    with pytest.raises(LossError, match="nll.*nan"):
        learner.posterior(lambda network: network(x[:0]).mean())
    with pytest.raises(LossError, match="must call the network that it is given"):
        learner.posterior(lambda network: learner(x).mean())
