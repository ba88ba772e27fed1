"""Sine-Line's baselines with particles, a variational posterior or several members are what their papers say."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch.distributions import Independent, Normal, kl_divergence
from torch.func import functional_call, grad

from l2l_niw.data import SineLine

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from regression.base import Plain
from regression.bmaml import BMAML, svgd
from regression.ensemble import Ensemble
from regression.maml import MAML
from regression.vampire import VAMPIRE


def tasks(count=3):
    return SineLine().sample(count, torch.Generator().manual_seed(0))


def flatten(tensors):
    return torch.cat([t.flatten() for t in tensors])


def predict(method, flat, *data):
    """The prediction of a network with these weights, (D,)."""
    parts = flat.split([p.numel() for p in method.model.parameters()])
    named = {name: part.view_as(p) for part, (name, p) in zip(parts, method.model.named_parameters())}
    return functional_call(method.model, named, data)


def log_likelihood(method, flat, x, y):
    return Normal(predict(method, flat, x, y).mean, 0.3).log_prob(y).sum()


STEP = 0.01 * 2 * 0.3**2 / 5  # of 0.01 on a mean squared error, in units of a log-likelihood of five examples


def svgd_by_loops(particles, gradients):
    """One particle and one pair at a time."""
    pairs = sorted(np.sum((particles[i] - particles[j]) ** 2) for i in range(len(particles)) for j in range(i))
    h = pairs[(len(pairs) - 1) // 2] / np.log(len(particles))
    directions = np.zeros_like(particles)
    for i, to in enumerate(particles):
        for at, gradient in zip(particles, gradients):
            kernel = np.exp(-np.sum((at - to) ** 2) / h)
            kernel_gradient = -2 * (at - to) / h * kernel  # with respect to `at`
            directions[i] += (kernel * gradient + kernel_gradient) / len(particles)
    return directions


@pytest.mark.parametrize("particles", [2, 4, 5])
def test_bmaml_s_step_is_svgd_on_the_log_posterior(particles, double):
    method = BMAML("linear", 1, 0.01, particles, prior_std=0.5, compile=False)
    x, y, x_query, y_query = (t[0] for t in tasks(1))
    before = method.leaves["weights"][0]

    def gradient(particle):
        leaf = particle.clone().requires_grad_()
        log_posterior = log_likelihood(method, leaf, x, y) + Normal(0.0, 0.5).log_prob(leaf).sum()
        return torch.autograd.grad(log_posterior, leaf)[0].numpy()

    direction = svgd_by_loops(before.numpy(), [gradient(particle) for particle in before])
    after = before + STEP * torch.from_numpy(direction)
    assert torch.allclose(method.adapt(before, 1, x, y), after, rtol=0, atol=1e-12)
    densities = [predict(method, particle, x, y, x_query).log_prob(y_query).exp() for particle in after]
    assert method.backward(tasks(1)) == pytest.approx(-(sum(densities) / particles).log().mean().item())
    assert torch.allclose(method.predict(tasks(1)).log_prob(y_query).exp(), sum(densities) / particles)


def test_particles_repel_each_other(double):
    left, _, right = svgd(torch.tensor([[0.0], [1.0], [3.0]]), torch.zeros(3, 1))
    assert left < 0 < right


def test_svgd_finds_the_mean_and_the_variance_of_a_gaussian(double):
    particles = torch.randn(60, 1) - 3.0
    for _ in range(2000):
        particles = particles + 0.5 * svgd(particles, -(particles - 1.5) / 4)
    assert particles.mean().item() == pytest.approx(1.5, abs=0.02)
    assert particles.var().item() == pytest.approx(4.0, rel=0.05)


def test_the_chaser_follows_the_leader_and_the_noise_the_query(double):
    method, batch = BMAML("linear", 0, 0.01, particles=3, leader_steps=2, compile=False), tasks()
    value = method.backward(batch)
    particles, is_noise = method.leaves["weights"][0], method.is_noise
    leaders = [method.adapt(particles, 2, torch.cat([x, xq]), torch.cat([y, yq])) for x, y, xq, yq in zip(*batch)]
    distance = 2 * (particles - sum(leaders) / 3)
    assert torch.allclose(particles.grad[:, ~is_noise], distance[:, ~is_noise], atol=1e-12)
    on_query = BMAML("linear", 0, 0.01, particles=3, compile=False)
    on_query.leaves["weights"][0].copy_(particles)
    assert value == pytest.approx(on_query.backward(batch))
    noise = on_query.leaves["weights"][0].grad + distance
    assert torch.allclose(particles.grad[:, is_noise], noise[:, is_noise])


def test_vampire_s_steps_are_on_the_free_energy(double):
    method = VAMPIRE("linear", 2, 0.01, scale=0.1, samples=3, step_samples=2, compile=False)
    for tensors in method.leaves.values():
        for t in tensors:
            t.data.add_(0.1 * torch.randn_like(t))
    noise, batch = method.noise(1), tasks(1)
    x, y, x_query, y_query = (t[0] for t in batch)
    leaves = [flatten(tensors).requires_grad_() for tensors in method.values().values()]
    prior = Independent(Normal(leaves[0], leaves[1].exp()), 1)
    mean, log_scale = (leaf.clone() for leaf in leaves)
    for step in (noise[0, :2], noise[0, 2:4]):
        q = Independent(Normal(mean, log_scale.exp()), 1)
        expected = sum(log_likelihood(method, mean + log_scale.exp() * e, x, y) for e in step) / 2
        gradients = torch.autograd.grad(kl_divergence(q, prior) - expected, (mean, log_scale), create_graph=True)
        mean, log_scale = mean - STEP * gradients[0], log_scale - STEP * gradients[1]
    weights = [mean + log_scale.exp() * e for e in noise[0, 4:]]
    loss = sum(predict(method, w, x, y, x_query).nll(y_query) for w in weights) / 3
    assert method.objective(method.values(), noise, *batch).item() == pytest.approx(loss.item())
    found = grad(method.objective)(method.values(), noise, *batch)
    for ours, theirs in zip(found.values(), torch.autograd.grad(loss, leaves)):
        assert torch.allclose(flatten(ours), theirs, atol=1e-10)
    method.noise = lambda tasks: noise
    density = sum(predict(method, w, x, y, x_query).log_prob(y_query).exp() for w in weights) / 3
    assert torch.allclose(method.predict(batch).log_prob(y_query).exp(), density)


@pytest.mark.parametrize(
    ("make", "steps", "atol"),
    [
        (lambda: BMAML("linear", 3, 0.01, particles=1, prior_std=np.inf, compile=False), 3, 1e-10),
        (lambda: VAMPIRE("linear", 1, 0.01, scale=1e-6, compile=False), 1, 1e-4),  # a second step would have the KL
    ],
    ids=["one particle without a prior", "a Gaussian without width"],
)
def test_it_is_maml_with(make, steps, atol, double):
    method, maml, batch = make(), MAML("linear", steps, 0.01, compile=False), tasks()
    maml.model.load_state_dict(method.model.state_dict())
    assert method.backward(batch) == pytest.approx(maml.backward(batch))
    ours, theirs = (flatten(t.grad for t in m.groups(0.0)[0]["params"]) for m in (method, maml))
    assert torch.allclose(ours, theirs, atol=atol)
    assert torch.allclose(method.predict(batch).mean, maml.predict(batch).mean, atol=atol)


def test_members_of_an_ensemble_are_trained_by_themselves_and_averaged(double):
    ensemble, batch = Ensemble(lambda: Plain("bayesian-ridge"), 3), tasks()
    value, alone = ensemble.backward(batch), Plain("bayesian-ridge")
    losses = []
    for member, group in zip(ensemble.members, ensemble.groups(0.1)):
        alone.model.load_state_dict(member.model.state_dict())
        alone.model.zero_grad()
        losses.append(alone.backward(batch))
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(group["params"], alone.model.parameters()))
    assert value == pytest.approx(sum(losses) / 3)
    density = sum(member.predict(batch).log_prob(batch.y_query).exp() for member in ensemble.members) / 3
    assert torch.allclose(ensemble.predict(batch).log_prob(batch.y_query).exp(), density)


def test_members_of_an_ensemble_count_by_their_evidence(double):
    ensemble, batch = Ensemble(lambda: Plain("bayesian-ridge"), 3, by_evidence=True), tasks(1)
    evidence, densities = [], []
    for member in ensemble.members:
        features = member.model.features(batch.x[0]).detach().numpy()
        full = np.hstack([features, np.ones((5, 1))])
        covariance = full @ full.T + 0.3**2 * np.eye(5)
        evidence.append(stats.multivariate_normal(np.zeros(5), covariance).pdf(batch.y[0, :, 0].numpy()))
        densities.append(member.predict(batch).log_prob(batch.y_query).exp())
    by_hand = sum(e * d for e, d in zip(evidence, densities)) / sum(evidence)
    assert torch.allclose(ensemble.predict(batch).log_prob(batch.y_query).exp(), by_hand)
