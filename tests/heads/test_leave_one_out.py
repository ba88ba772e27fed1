"""Supports whose examples are predicted from each other, and the distribution functions of predictions."""

import pytest
import torch
from head_cases import FEATURES, INPUTS, episode, run_episode, targets
from scipy import stats
from torch import nn

from l2l_niw import NIW, BatchedEpisodes, EpisodicModel
from l2l_niw.errors import ArgumentError, ModelError
from l2l_niw.heads import ANP, BayesianRidge, LeaveOneOut, MetaQDA, NearestCentroid, Ridge
from l2l_niw.models import MLP
from l2l_niw.heads.predictions import Gaussian, GaussianMixture

HEADS = {
    "ridge-regression": lambda: Ridge("regression", learn_lam=True, learn_noise=True),
    "bayesian-ridge": lambda: BayesianRidge(),
    "anp": lambda: ANP(FEATURES, 2, width=8, heads=2, latent=False),
    "ncc-cosine": lambda: NearestCentroid("cosine", scale=10.0),
    "metaqda-map": lambda: MetaQDA(FEATURES, "map"),
}
heads = pytest.mark.parametrize("name", HEADS)


def build(name):
    return EpisodicModel(MLP(INPUTS, (12, FEATURES), nn.Tanh), LeaveOneOut(HEADS[name]()))


@heads
@pytest.mark.parametrize("lead", [(), (4,), (2, 3)])
def test_each_example_is_predicted_from_all_others(name, lead, double):
    model, (x, y, _, _) = build(name), episode(name, *lead)
    found = model(x, y).log_prob(y).reshape(-1, 7)
    flat_x, flat_y = x.reshape(-1, *x.shape[len(lead) :]), y.reshape(-1, *y.shape[len(lead) :])
    for row, x, y in zip(found, flat_x, flat_y):
        for i in range(7):
            rest = [j for j in range(7) if j != i]
            alone = model(x[rest], y[rest], x[i : i + 1]).log_prob(y[i : i + 1])
            assert torch.allclose(row[i], alone, atol=1e-10)


def test_ridge_leaves_out_as_its_closed_form_does(double):
    """r_i = (K^-1 y)_i / (K^-1)_ii (Rasmussen and Williams, Sec. 5.4.2)."""
    model, (x, y, _, _) = build("ridge-regression"), episode("ridge-regression")
    phi = torch.cat([model.features(x), torch.ones(7, 1)], 1)
    inverse = torch.linalg.inv(phi @ phi.T + 0.1 * torch.eye(7))
    residuals = inverse @ y / inverse.diagonal().unsqueeze(1)
    prediction = model(x, y)
    assert torch.allclose(y - prediction.mean, residuals, atol=1e-10)
    assert torch.equal(prediction.stddev, torch.ones(7, 2))


@heads
@pytest.mark.parametrize("method", ["plain", "maml", "niw", "niw-ggn"])
def test_inner_steps_take_what_is_left_out(name, method):
    data = episode(name)
    prediction, trained = run_episode(method, build(name), data)
    assert prediction.n == 6
    assert all(torch.isfinite(p.grad).all() for p in trained.parameters())


@heads
def test_a_query_is_predicted_as_without(name, double):
    model, data = build(name), episode(name)
    bare = EpisodicModel(model.backbone, model.head.head)
    assert torch.equal(model(*data[:3]).log_prob(data[3]), bare(*data[:3]).log_prob(data[3]))


def test_a_batch_equals_the_loop(double):
    niw = NIW(build("ridge-regression"), lr=0.01, temperature=0.0)  # nothing is drawn
    data = episode("ridge-regression", 3)
    episodes = BatchedEpisodes(
        niw,
        lambda network, x, y: network(x, y).nll(y),
        lambda network, *query: network(*query[:3]).nll(query[3]),
        steps=3,
    )
    together = torch.autograd.grad(episodes(data[:2], data), list(niw.module.parameters()))
    loss = 0.0
    for x, y, x_query, y_query in zip(*data):
        learner = niw.clone()
        for _ in range(3):
            learner.adapt(learner(x, y).nll(y))
        loss = loss + learner(x, y, x_query).nll(y_query) / 3
    for ours, theirs in zip(together, torch.autograd.grad(loss, list(niw.module.parameters()))):
        assert torch.allclose(ours, theirs, atol=1e-10)


def test_samples_probabilities_and_labels_have_the_support_s_shape():
    x, y, _, _ = episode("ncc-cosine")
    prediction = build("ncc-cosine")(x, y)
    assert prediction.probs.shape == (7, 3)
    assert prediction.sample().shape == y.shape
    assert prediction.n == 7
    regression = build("anp")(x, targets("anp", 7))
    assert regression.mean.shape == regression.stddev.shape == regression.sample().shape == (7, 2)


def test_what_cannot_be_left_out():
    with pytest.raises(ArgumentError, match="one example"):
        build("anp")(torch.randn(1, INPUTS), torch.randn(1, 2))
    prediction = build("ncc-cosine")(torch.randn(3, INPUTS), torch.tensor([0, 1, 1]))
    with pytest.raises(ArgumentError, match="label 0 is not among the support's classes"):
        prediction.nll(torch.tensor([0, 1, 1]))
    with pytest.raises(ModelError, match="heads"):
        LeaveOneOut(nn.Linear(2, 2))


def test_distribution_functions_are_scipy_s(double):
    means, scales, y = torch.randn(5, 3, 2), torch.rand(5, 3, 2) + 0.1, torch.randn(5, 2)
    parts = [Gaussian(means[:, k], scales[:, k]) for k in range(3)]
    expected = [torch.tensor(stats.norm(means[:, k], scales[:, k]).cdf(y)) for k in range(3)]
    assert torch.allclose(parts[0].cdf(y), expected[0])
    assert torch.allclose(Gaussian.mix(parts).cdf(y), sum(expected) / 3)
    assert isinstance(Gaussian.mix(parts), GaussianMixture)


def test_a_mixture_s_levels_stay_levels_in_float32():
    weights, far = torch.randn(2000, 1, 7), torch.full((2000, 1, 1), 100.0)
    mixture = GaussianMixture(torch.randn(2000, 1, 7, 1), torch.ones(2000, 1, 7, 1), weights)
    assert (mixture.cdf(far) <= 1).all()
    assert torch.allclose(mixture.cdf(far), torch.ones(()))
