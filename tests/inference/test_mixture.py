"""Responsibilities, the mixture's objective, and a posterior of several modes."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Independent, MixtureSameFamily, Normal

from l2l_niw.errors import ArgumentError
from l2l_niw.heads.labels import encode
from l2l_niw.heads.predictions import Classes, Gaussian, GaussianMixture
from l2l_niw.inference.gaussian import GaussianWeights
from l2l_niw.inference.mixture import Energies, MixtureWeights, entropy, log_responsibilities, mixture_objective

B, K, QUERIES = 4, 3, 7


def energies(kl=False, noise=None):
    """Of K components, drawn at random."""
    found = []
    for _ in range(K):
        support, query, own = 3 * torch.randn(B), 3 * torch.rand(B), torch.rand(B) if kl else torch.zeros(B)
        constant = torch.zeros(B) if noise is None else torch.full((B,), QUERIES * math.log(noise))
        unit = torch.full((B,), 1.0 / QUERIES)
        found.append(Energies(support, query, own, constant, unit))
    return found


def test_responsibilities_are_bayes_rule(double):
    weights, free = torch.tensor([0.2, 0.5, 0.3]), torch.randn(B, K)
    joint = weights * torch.exp(-free)
    found = log_responsibilities(weights.log(), free).exp()
    assert torch.allclose(found, joint / joint.sum(-1, keepdim=True))


def test_responsibilities_are_safe_where_exponentials_are_not():
    free = torch.tensor([1e6, 1e6 + 1.0, 3e6])
    found = log_responsibilities(torch.zeros(K), free)
    assert torch.isfinite(found[:2]).all()
    assert torch.allclose(found.exp(), torch.tensor([1.0, math.exp(-1), 0.0]) / (1 + math.exp(-1)))


def test_with_evidence_of_weight_one_the_objective_is_the_marginal_likelihood(double):
    weights, parts = torch.tensor([0.2, 0.5, 0.3]), energies()
    found = mixture_objective(weights.log(), parts, 1.0)
    joint = sum(w * torch.exp(-part.support - part.query) for w, part in zip(weights, parts))
    assert torch.allclose(QUERIES * (found.loss + found.rest), -joint.log())
    predictive = joint / sum(w * torch.exp(-part.support) for w, part in zip(weights, parts))
    assert torch.allclose(QUERIES * found.loss, -predictive.log())


def test_a_chains_kl_is_added_to_its_query(double):
    weights, parts = torch.tensor([0.2, 0.5, 0.3]), energies(kl=True)
    found = mixture_objective(weights.log(), parts, 0.0)
    shares = log_responsibilities(weights.log(), torch.stack([part.support for part in parts], -1)).exp()
    costs = torch.stack([torch.exp(-part.query - part.kl) for part in parts], -1)
    assert torch.allclose(QUERIES * (found.loss + found.rest), -(shares * costs).sum(-1).log())


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("kl", [True, False])
def test_components_that_are_the_same_count_as_one(kl, uniform, double):
    first, weight = energies(kl, noise=0.3)[0], 0.0 if kl else 0.7
    several, one = (mixture_objective(torch.randn(k), [first] * k, weight, uniform) for k in (K, 1))
    assert torch.allclose(one.loss, first.query / QUERIES)
    assert torch.allclose(one.rest, (first.kl + weight * first.support) / QUERIES)
    assert torch.allclose(several.loss, one.loss)
    assert torch.allclose(several.rest, one.rest)


def test_the_order_of_components_does_not_matter(double):
    weights, parts, order = torch.randn(K), energies(), [2, 0, 1]
    found, other = (mixture_objective(weights[own], [parts[k] for k in own], 1.0) for own in (list(range(K)), order))
    assert torch.allclose(found.loss, other.loss)
    assert torch.allclose(found.log_responsibilities[:, order], other.log_responsibilities)


def test_a_squared_error_counts_with_the_components_own_noise(double):
    """Two components with the same errors: the query's likelihood decides by their noise."""
    noises, squares = (0.3, 1.0), torch.full((B,), 0.2 * QUERIES)
    parts = []
    for noise in noises:
        constant = torch.full((B,), QUERIES * (math.log(noise) + 0.5 * math.log(2 * math.pi)))
        unit = torch.full((B,), 2 * noise**2 / QUERIES)
        parts.append(Energies(torch.zeros(B), squares / (2 * noise**2), torch.zeros(B), constant, unit))
    logits = torch.zeros(2, requires_grad=True)
    mixture_objective(logits, parts, 1.0).loss.sum().backward()
    y = math.sqrt(0.2) * torch.ones(QUERIES)
    likelihood = torch.stack([Normal(0.0, noise).log_prob(y).sum() for noise in noises]).softmax(0)
    share = logits.grad / logits.grad[1]
    assert torch.allclose(share, (likelihood - 0.5) / (likelihood - 0.5)[1])


def test_the_objective_by_gradcheck(double):
    leaves = [torch.randn(K, requires_grad=True)]
    leaves += [torch.rand(B, requires_grad=True) for _ in range(3 * K)]

    def total(weights, *columns):
        constant, unit = torch.zeros(B), torch.full((B,), 0.2)
        parts = [Energies(*columns[3 * k : 3 * k + 3], constant, unit) for k in range(K)]
        found = mixture_objective(weights, parts, 0.6)
        return (found.loss + found.rest).sum()

    assert torch.autograd.gradcheck(total, leaves)


def test_entropy():
    assert entropy(torch.tensor([0.5, 0.5]).log()).item() == pytest.approx(math.log(2))
    assert entropy(torch.tensor([1.0, 0.0]).log()).item() == 0.0


class Fixed(GaussianWeights):
    """A posterior whose networks say what it is told."""

    def __init__(self, said):
        self.said = said

    def predict(self, *args, samples=10, vectorize=None):
        return torch.stack([self.said] * samples) if isinstance(self.said, torch.Tensor) else self.said

    def linearised(self, *args):
        return self.said


SHARES = torch.tensor([0.7, 0.2, 0.1])
TASKS = torch.tensor([[0.7, 0.2, 0.1], [0.0, 0.5, 0.5]])


def test_networks_are_drawn_by_the_responsibilities():
    torch.manual_seed(0)
    post = MixtureWeights([Fixed(torch.full((2,), float(k))) for k in range(K)], SHARES.log())
    drawn = torch.stack([post.predict(samples=3)[:, 0] for _ in range(4000)])
    assert drawn.shape == (4000, 3)
    rates = torch.stack([(drawn == k).float().mean() for k in range(K)])
    assert torch.allclose(rates, SHARES, atol=0.01)
    assert (post.counts(10) - 10 * SHARES).abs().max() < 1 + 1e-5  # each has its number, or the next


def test_so_they_are_of_every_task():
    torch.manual_seed(0)
    post = MixtureWeights([Fixed(torch.full((2, 5), float(k))) for k in range(K)], TASKS.log())
    drawn = torch.stack([post.predict(samples=4) for _ in range(3000)])
    assert drawn.shape == (3000, 4, 2, 5)
    for task, shares in enumerate(TASKS):
        rates = torch.stack([(drawn[:, :, task, 0] == k).float().mean() for k in range(K)])
        assert torch.allclose(rates, shares, atol=0.01)


@pytest.mark.parametrize("shares", [SHARES, TASKS])
@pytest.mark.parametrize("kind", ["gaussian", "mixture", "normal", "independent", "categorical", "bernoulli"])
def test_linearised_predictions_are_weighed(kind, shares):
    torch.manual_seed(0)
    lead = shares.shape[:-1]
    y = torch.randn(*lead, 6, 2)
    make = {
        "gaussian": lambda: Gaussian(torch.randn(*lead, 6, 2), torch.rand(*lead, 6, 2) + 0.1),
        "mixture": lambda: GaussianMixture(torch.randn(*lead, 6, 4, 2), torch.rand(*lead, 6, 4, 2) + 0.1),
        "normal": lambda: Normal(torch.randn(*lead, 6, 2), torch.rand(*lead, 6, 2) + 0.1),
        "independent": lambda: Independent(Normal(torch.randn(*lead, 6, 2), torch.rand(*lead, 6, 2) + 0.1), 1),
        "categorical": lambda: Categorical(logits=torch.randn(*lead, 6, 5)),
        "bernoulli": lambda: Bernoulli(logits=torch.randn(*lead, 6, 2)),
    }[kind]
    y = {"categorical": torch.randint(5, (*lead, 6)), "bernoulli": (y > 0).float()}.get(kind, y)
    parts = [make() for _ in range(K)]
    found = MixtureWeights([Fixed(part) for part in parts], shares.log()).linearised()
    densities = torch.stack([part.log_prob(y).exp() for part in parts], -1)
    weights = shares.reshape(*lead, *[1] * (densities.dim() - len(lead) - 1), K)
    assert torch.allclose(found.log_prob(y).exp(), (weights * densities).sum(-1), atol=1e-6)
    if kind in ("normal", "independent"):
        assert isinstance(found, MixtureSameFamily)


@pytest.mark.parametrize("shares", [SHARES, TASKS])
def test_class_probabilities_are_weighed(shares):
    lead = shares.shape[:-1]
    labels = encode(torch.arange(5).expand(*lead, 5))
    parts = [Classes(torch.randn(*lead, 6, 5), labels) for _ in range(K)]
    found = MixtureWeights([Fixed(part) for part in parts], shares.log()).predict(samples=2)
    weights = shares.movedim(-1, 0).reshape(K, *lead, 1, 1)
    assert torch.allclose(found.probs, sum(w * part.probs for w, part in zip(weights, parts)), atol=1e-6)


def test_a_chains_posterior_is_not_linearised():
    chain = GaussianWeights(nn.Linear(1, 1), [], [], [])
    with pytest.raises(ArgumentError, match="predict"):
        MixtureWeights([chain], torch.zeros(1)).linearised(torch.zeros(1))
