"""Posteriors with their full covariance on models whose exact answer is known."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.nn import functional as F

from l2l_niw import NIW, BatchedEpisodes

D, NOISE, N = 4, 0.5, 6
MU = torch.tensor([1.0, -2.0, 0.7, 3.0], dtype=torch.float64)


def make(u=None, wishart="factorised", **options):
    """NIW of a linear layer whose tasks are N(MU, diag of u^2) or, of a matrix u, N(MU, u u^T)."""
    rank = 0 if u is None or u.dim() == 1 else u.shape[1]
    options = {"rank": rank} if rank else {"curvature": "full"} | options
    niw = NIW(nn.Linear(D, 1, bias=False), lr=0.1, noise=NOISE, wishart=wishart, n0=9.0, **options)
    with torch.no_grad():
        niw.module.weight.copy_(MU)
        if rank:
            niw.hyper.directions[0].copy_(u.mT.unsqueeze(1))
        else:
            niw.hyper.log_variance[0].copy_(2 * u.log())
    return niw


U = {
    "diagonal": torch.tensor([0.2, 1.0, 0.5, 0.7], dtype=torch.float64),
    "two directions": torch.tensor([[1.0, 0.2], [0.0, -0.5], [0.3, 0.3], [-0.4, 0.1]], dtype=torch.float64),
    "one direction": torch.tensor([[0.3], [-0.6], [0.2], [0.9]], dtype=torch.float64),
}


def matrix(u):
    return torch.diag(u) if u.dim() == 1 else u


def draw_task(u, n=N):
    """Inputs and targets of one task."""
    theta = MU + matrix(u) @ torch.randn(matrix(u).shape[1])
    x = torch.randn(n, D)
    return x, (x @ theta + NOISE * torch.randn(n)).unsqueeze(-1)


def exact(u, x, y):
    """Mean and covariance of z given the data, in the prior's coordinates."""
    features = x @ matrix(u)
    covariance = torch.linalg.inv(torch.eye(features.shape[1]) + features.mT @ features / NOISE**2)
    return covariance @ features.mT @ (y.squeeze(-1) - x @ MU) / NOISE**2, covariance


def adapted(niw, x, y, steps):
    learner = niw.clone()
    for _ in range(steps):
        learner.adapt(F.mse_loss(learner(x), y))
    return learner


@pytest.mark.parametrize("n", [1, 3, 25])
@pytest.mark.parametrize("wishart", ["factorised", "full"])
@pytest.mark.parametrize("u", U.values(), ids=U)
def test_on_a_linear_model_the_posterior_is_the_conjugate_one(u, wishart, n, double):
    niw, (x, y) = make(u, wishart), draw_task(u, n)
    learner = adapted(niw, x, y, steps=4)
    post, (z, covariance), full = learner.posterior(), exact(u, x, y), matrix(u)
    weights = full @ covariance @ full.mT
    assert torch.allclose(post.z, z, atol=1e-8)
    assert torch.allclose(post.covariance, covariance, atol=1e-8)
    assert torch.allclose(post.mean["weight"].flatten(), MU + full @ z, atol=1e-8)
    assert torch.allclose(post.variance["weight"].flatten(), weights.diagonal(), atol=1e-8)
    prior = MultivariateNormal(torch.zeros(len(z)), torch.eye(len(z)))
    kl = kl_divergence(MultivariateNormal(z, covariance), prior)
    d, n0 = len(z), torch.tensor(9.0)
    digammas = torch.digamma((n0 - torch.arange(d)) / 2) if wishart == "full" else torch.digamma(n0 / 2).expand(d)
    assert torch.allclose(learner.kl(), kl + 0.5 * (torch.log(n0 / 2) - digammas).sum(), atol=1e-8)
    x_new = torch.randn(5, D)
    predictive = post.linearised(x_new)
    assert torch.allclose(predictive.mean.squeeze(-1), x_new @ (MU + full @ z), atol=1e-8)
    variance = (x_new @ weights * x_new).sum(-1) + NOISE**2
    assert torch.allclose(predictive.variance.squeeze(-1), variance, atol=1e-8)
    assert torch.allclose(learner.query(x_new).squeeze(-1), predictive.mean.squeeze(-1), atol=1e-12)


@pytest.mark.parametrize("u", U.values(), ids=U)
def test_the_evidence_at_the_fixed_point_is_the_marginal_likelihood(u, double):
    niw, (x, y) = make(u), draw_task(u)
    found = adapted(niw, x, y, steps=4)._progress.solution.evidence
    features = x @ matrix(u)
    marginal = MultivariateNormal(x @ MU, features @ features.mT + NOISE**2 * torch.eye(N))
    assert torch.allclose(found, marginal.log_prob(y.squeeze(-1)), atol=1e-8)


@pytest.mark.parametrize("u", U.values(), ids=U)
def test_so_do_posteriors_of_several_tasks_at_once(u, double):
    niw = make(u)
    tasks = [draw_task(u) for _ in range(3)]
    support = [torch.stack(part) for part in zip(*tasks)]
    post = BatchedEpisodes(niw, lambda net, x, y: F.mse_loss(net(x), y), steps=4).posterior(support)
    x_new = torch.randn(3, 5, D)
    predictive = post.linearised(x_new)
    for i, (x, y) in enumerate(tasks):
        z, covariance = exact(u, x, y)
        assert torch.allclose(post.z[i], z, atol=1e-8)
        assert torch.allclose(post.covariance[i], covariance, atol=1e-8)
        weights = matrix(u) @ covariance @ matrix(u).mT
        variance = (x_new[i] @ weights * x_new[i]).sum(-1) + NOISE**2
        assert torch.allclose(predictive.mean[i].squeeze(-1), x_new[i] @ (MU + matrix(u) @ z), atol=1e-8)
        assert torch.allclose(predictive.variance[i].squeeze(-1), variance, atol=1e-8)


@pytest.mark.parametrize("wishart", ["factorised", "full"])
@pytest.mark.parametrize("u", U.values(), ids=U)
def test_meta_test_inference_starts_from_the_mode(u, wishart, double):
    """The mode's covariance is V_0 / (n_0 + d + 2), d = 1 for factorised."""
    niw, (x, y) = make(u, wishart), draw_task(u)
    d = matrix(u).shape[1] if wishart == "full" else 1
    mode = u * math.sqrt(9.0 / (9.0 + d + 2))
    prior = niw.prior()
    assert torch.allclose(prior.mean["weight"].flatten(), MU)
    assert torch.allclose(prior.variance["weight"].flatten(), matrix(mode).square().sum(1))
    post = niw.clone().posterior(lambda network: F.mse_loss(network(x), y), steps=4)
    z, covariance = exact(mode, x, y)
    assert torch.allclose(post.mean["weight"].flatten(), MU + matrix(mode) @ z, atol=1e-8)
    assert torch.allclose(post.covariance, covariance, atol=1e-8)
    weights = matrix(mode) @ covariance @ matrix(mode).mT
    assert torch.allclose(post.variance["weight"].flatten(), weights.diagonal(), atol=1e-8)
    batched = BatchedEpisodes(niw, lambda net, x, y: F.mse_loss(net(x), y)).posterior((x[None], y[None]), elbo_steps=4)
    assert torch.allclose(batched.z[0], z, atol=1e-8)
    assert torch.allclose(batched.covariance[0], covariance, atol=1e-8)


@pytest.mark.parametrize("u", U.values(), ids=U)
def test_drawn_networks_have_the_posterior_s_covariance(u, double):
    niw, (x, y) = make(u), draw_task(u, 2)
    post = adapted(niw, x, y, steps=4).posterior()
    z, covariance = exact(u, x, y)
    x_new = torch.randn(3, D)
    with torch.no_grad():
        outputs = post.predict(x_new, samples=20_000).squeeze(-1)
    spread = x_new @ matrix(u) @ covariance @ matrix(u).mT @ x_new.mT
    scale = spread.diagonal().outer(spread.diagonal()).sqrt()
    assert ((outputs.mT.cov() - spread).abs() < 5 * 1.5 * scale / 20_000**0.5).all()


@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_a_temperature_is_a_power_of_the_likelihood(temperature, double):
    """exp(-l / T) of Gaussian noise is that of a variance T times as large."""
    niw, (x, y) = make(U["diagonal"]), draw_task(U["diagonal"])
    niw.options.temperature = temperature
    post = adapted(niw, x, y, steps=4).posterior()
    features = x @ matrix(U["diagonal"])
    covariance = torch.linalg.inv(torch.eye(D) + features.mT @ features / NOISE**2 / temperature)
    assert torch.allclose(post.covariance, covariance, atol=1e-8)
    z = covariance @ features.mT @ (y.squeeze(-1) - x @ MU) / NOISE**2 / temperature
    assert torch.allclose(post.z, z, atol=1e-8)


def negative_log_likelihood(binary):
    return F.binary_cross_entropy_with_logits if binary else F.cross_entropy


@pytest.fixture(params=[True, False], ids=["binary", "three classes"])
def logistic(request, double):
    """A logistic regression in two directions, adapted, and the posterior of z on a fine grid."""
    binary = request.param
    niw = NIW(nn.Linear(3, 1 if binary else 3), lr=0.1, rank=2, prior_std=1.5, linearise="all")
    x = torch.randn(12, 3)
    y = (x[:, :1] + 0.7 * torch.randn(12, 1) > 0).double() if binary else torch.randint(3, (12,))
    loss = negative_log_likelihood(binary)
    learner = niw.clone()
    for _ in range(12):
        learner.adapt(loss(learner(x), y))
    m, u = list(niw.module.parameters()), list(niw.hyper.directions)

    def outputs(z, x):
        weight, bias = (p + torch.tensordot(z, d, 1) for p, d in zip(m, u))
        return x @ weight.mT + bias.unsqueeze(-2)

    def energy(z):
        f = outputs(z, x)
        targets = y.expand(f.shape) if binary else y.expand(f.shape[:-1])
        f = f if binary else f.movedim(-1, 1) if f.dim() == 3 else f
        each = loss(f, targets, reduction="none")
        return each.flatten(1 if z.dim() > 1 else 0).sum(-1) + 0.5 * z.square().sum(-1)

    axis = torch.linspace(-6, 6, 601)
    grid = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        energies = torch.cat([energy(part) for part in grid.split(20_000)])
    return learner, outputs, energy, grid, energies


def test_the_mode_of_a_logistic_regression(logistic):
    learner, _, energy, grid, energies = logistic
    z = learner.posterior().z.detach()
    assert (grid[energies.argmin()] - z).abs().max() < 0.011  # half a cell, and as much for the valley's slope
    assert energy(z) <= energies.min()
    hessian = torch.autograd.functional.hessian(energy, z)
    assert torch.allclose(learner.posterior().covariance, torch.linalg.inv(hessian), atol=1e-6)


def test_its_linearised_predictive_is_nearly_the_average(logistic):
    learner, outputs, _, grid, energies = logistic
    x_new = 1.5 * torch.randn(40, 3)
    weights = (energies.min() - energies).exp()
    weights = weights / weights.sum()
    post = learner.posterior()
    with torch.no_grad():
        found = post.linearised(x_new).probs
        point = outputs(post.z, x_new)
        link = torch.sigmoid if found.shape[-1] == 1 else (lambda f: f.softmax(-1))
        parts = zip(weights.split(20_000), grid.split(20_000))
        average = sum(torch.einsum("g,gnk->nk", w, link(outputs(z, x_new))) for w, z in parts)
        again = link(learner.query(x_new))
    assert (found - average).abs().mean() < 0.03
    assert (found - average).abs().mean() < (link(point) - average).abs().mean()
    assert torch.allclose(again, found, atol=1e-12)


RANK, WIDTH, OWN_NOISE = 2, 6, 0.3


@pytest.fixture(scope="module")
def trained():
    """Tasks N(m, U U^T) of rank 2 in 6 dimensions, of supports of 1 to 25 examples, and an NIW trained on them."""
    torch.manual_seed(0)
    m, u = torch.randn(WIDTH), torch.linalg.qr(torch.randn(WIDTH, RANK)).Q * torch.tensor([1.0, 0.6])

    def tasks(n, batch=()):
        theta = m + torch.randn(*batch, RANK) @ u.mT
        x = torch.randn(*batch, n, WIDTH)
        return x, x @ theta.unsqueeze(-1) + OWN_NOISE * torch.randn(*batch, n, 1)

    niw = NIW(nn.Linear(WIDTH, 1, bias=False), lr=0.1, rank=RANK)
    episodes = BatchedEpisodes(niw, lambda net, x, y: F.mse_loss(net(x), y), steps=3)
    opt = torch.optim.Adam(niw.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 2000)
    for _ in range(2000):
        n = int(torch.randint(1, 26, ()))
        x, y = tasks(n + 10, (128,))
        opt.zero_grad()
        episodes((x[:, :n], y[:, :n]), (x[:, n:], y[:, n:])).backward()
        opt.step()
        schedule.step()
    return niw, m, u, tasks


@pytest.mark.slow
def test_meta_training_finds_the_mean_the_directions_and_the_noise(trained):
    niw, m, u, _ = trained
    found = niw.hyper.directions[0].detach().flatten(1).mT
    cosines = torch.linalg.svdvals(torch.linalg.qr(found).Q.mT @ torch.linalg.qr(u).Q)
    assert (niw.module.weight.flatten() - m).norm() < 0.05
    assert cosines.min() > 0.999
    assert torch.allclose(torch.linalg.svdvals(found), torch.linalg.svdvals(u), rtol=0.05)
    assert niw.hyper.log_noise.exp().item() == pytest.approx(OWN_NOISE, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 5, 25])
def test_then_posteriors_and_predictions_are_the_exact_ones(trained, n):
    """Means within a tenth of the exact posterior's standard deviation; covariances within a tenth."""
    niw, m, u, tasks = trained
    directions = niw.hyper.directions[0].detach().flatten(1).mT
    for _ in range(10):
        x, y = tasks(n)
        post = adapted(niw, x, y, steps=5).posterior()
        features = x @ u
        covariance = torch.linalg.inv(torch.eye(RANK) + features.mT @ features / OWN_NOISE**2)
        mean = m + u @ covariance @ features.mT @ (y.squeeze(-1) - x @ m) / OWN_NOISE**2
        covariance = u @ covariance @ u.mT
        found = directions @ post.covariance.detach() @ directions.mT
        assert (post.mean["weight"].flatten() - mean).norm() < 0.1 * covariance.trace().sqrt()
        assert (found - covariance).norm() < 0.1 * covariance.norm()
        x_new = torch.randn(20, WIDTH)
        predictive = post.linearised(x_new)
        std = ((x_new @ covariance * x_new).sum(-1) + OWN_NOISE**2).sqrt()
        assert torch.allclose(predictive.stddev.squeeze(-1), std, rtol=0.05)
        assert ((predictive.mean.squeeze(-1) - x_new @ mean).abs() < 0.1 * std).all()
