"""Meta-test inference against the closed form of a linear-Gaussian model."""

import pytest
import torch
from torch import nn

from l2l_niw import NIW, BatchedEpisodes
from l2l_niw.errors import ArgumentError, LossError
from l2l_niw.inference.elbo import minimise_elbo, proximal_step
from l2l_niw.inference.wishart import WISHARTS

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
        gradients = (hessian @ mean - moment) / n, hessian.diagonal() * std / n
        mean, std = proximal_step(mean, std, *gradients, prior_mean, prior_variance, lr=0.05, weight=kl_weight / n)
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
    post = niw.clone().posterior(nll, steps=250, samples=64)
    expected_mean, expected_variance = mean_field_optimum(
        hessian, moment, prior.mean["weight"].flatten().detach(), prior.variance["weight"].flatten()
    )
    assert torch.allclose(post.mean["weight"].flatten(), expected_mean, atol=0.03)
    assert torch.allclose(post.variance["weight"].flatten(), expected_variance, rtol=0.1)


def test_the_elbo_of_several_weights_is_that_of_each():
    """A separable loss: two tensors in one call have the optimum of each by itself."""
    hessian, centre = [torch.rand(3) + 0.5, torch.rand(2, 2) + 0.5], [torch.randn(3), torch.randn(2, 2)]
    prior_mean, prior_variance = [torch.zeros(3), torch.ones(2, 2)], [torch.ones(3), 0.3 * torch.ones(2, 2)]

    def gradient_at(weights):
        return [h * (w - c) / 5 for h, w, c in zip(hessian, weights, centre)], 5

    mean, variance = minimise_elbo(gradient_at, prior_mean, prior_variance, 0.1, steps=600, samples=16, kl_weight=1.0)
    for i in range(2):
        precision = hessian[i] + 1 / prior_variance[i]
        expected = (hessian[i] * centre[i] + prior_mean[i] / prior_variance[i]) / precision
        assert torch.allclose(mean[i], expected, atol=0.05)
        assert torch.allclose(variance[i], 1 / precision, rtol=0.1)


def test_no_step_gives_the_mode():
    niw = NIW(nn.Linear(3, 1), lr=0.1)
    post, prior = niw.clone().posterior(lambda network: network(torch.ones(2, 3)).mean(), steps=0), niw.prior()
    for name in prior.mean:
        assert torch.equal(post.mean[name], prior.mean[name])
        assert torch.allclose(post.variance[name], prior.variance[name])


def test_the_number_of_examples_is_seen_or_given():
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


# at temperature 0 there is one network


def tempered_to_zero():
    torch.manual_seed(1)
    return NIW(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), lr=0.1, temperature=0.0)


def descended(niw, x, y, steps):
    """Gradient descent on the support, written out."""
    weights = {name: p.detach().clone().requires_grad_() for name, p in niw.module.named_parameters()}
    for _ in range(steps):
        loss = (torch.func.functional_call(niw.module, weights, x) - y).square().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        weights = {k: (w - 0.1 * g).detach().requires_grad_() for (k, w), g in zip(weights.items(), gradients)}
    return weights


def test_at_temperature_zero_meta_test_inference_is_gradient_descent():
    niw, x, y = tempered_to_zero(), torch.randn(6, 3), torch.randn(6, 1)
    post = niw.clone().posterior(lambda network: (network(x) - y).square().mean(), steps=7, samples=2)
    for name, expected in descended(niw, x, y, 7).items():
        assert torch.allclose(post.mean[name], expected, atol=1e-12)
        assert not post.variance[name].any()
    outputs = post.predict(x, samples=5)
    assert all(torch.equal(out, outputs[0]) for out in outputs)


def test_at_temperature_zero_a_batch_of_tasks_has_one_network_each():
    niw, x, y = tempered_to_zero(), torch.randn(2, 6, 3), torch.randn(2, 6, 1)
    episodes = BatchedEpisodes(niw, lambda network, x, y: (network(x) - y).square().mean(), steps=3)
    for post in (episodes.posterior((x, y), elbo_steps=3), episodes.posterior((x, y))):
        for i in range(2):
            for name, expected in descended(niw, x[i], y[i], 3).items():
                assert torch.allclose(post.mean[name][i], expected, atol=1e-12)
        outputs = post.predict(x, samples=3)
        assert all(torch.equal(out, outputs[0]) for out in outputs)


@pytest.mark.parametrize("inference", ["langevin", "closed_form"])
def test_at_temperature_zero_a_chains_posterior_has_one_network(inference):
    niw, x, y = tempered_to_zero(), torch.randn(6, 3), torch.randn(6, 1)
    niw.options.inference = inference
    learner = niw.clone()
    for _ in range(3):
        learner.adapt((learner(x) - y).square().mean())
    outputs = learner.posterior().predict(x, samples=5)
    assert torch.equal(outputs, outputs[:1].expand_as(outputs))
    assert torch.allclose(outputs[0], learner.query(x), atol=1e-12)
