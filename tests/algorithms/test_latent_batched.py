"""A batch of episodes in the prior's coordinates is the loop of clone, adapt and a query loss."""

import copy
import warnings

import pytest
import torch
from latent_cases import KINDS, SHAPES, Spare, data, make, mse, network
from torch import nn
from torch.nn import functional as F

from l2l_niw import NIW, BatchedEpisodes, EpisodicModel
from l2l_niw.errors import ArgumentError, LossError
from l2l_niw.heads import BayesianRidge, NearestCentroid
from l2l_niw.models import MLP

N, M, STEPS, EPISODES = 5, 4, 3, 3
ORDERS = ("none", "last_step", "all")


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def batch(kind, n):
    return [torch.stack(parts) for parts in zip(*[data(kind, n) for _ in range(EPISODES)])]


def collected(niw):
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in niw.parameters()]


def loop(niw, loss, support, query, query_loss=None):
    """learn2learn's loop, gradients divided by the number of episodes."""
    niw.zero_grad()
    values, query_loss = [], query_loss or loss
    for i in range(EPISODES):
        learner = niw.clone()
        for _ in range(STEPS):
            learner.adapt(loss(learner, *[t[i] for t in support]))
        value = query_loss(learner.query, *[t[i] for t in query])
        if not niw.options.add_kl_gradient:
            value = learner.objective(value)
        value.backward()
        values.append(value.item())
    return sum(values) / EPISODES, [g / EPISODES for g in collected(niw)]


def batched(niw, loss, support, query, query_loss=None):
    """The same at once; the warning that tells of a loop is an error here."""
    niw.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = BatchedEpisodes(niw, loss, query_loss, steps=STEPS)(support, query)
    value.backward()
    return value.item(), collected(niw)


def assert_equal(found, expected, tolerance=1e-10):
    assert found[0] == pytest.approx(expected[0], rel=tolerance, abs=tolerance)
    assert any(g.abs().max() > 1e-6 for g in expected[1])
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * max(1.0, theirs.abs().max().item()))


@pytest.mark.parametrize("second_order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_the_loop_s(kind, second_order):
    niw, loss = make(kind, second_order=second_order)
    support, query = batch(kind, N), batch(kind, M)
    assert_equal(batched(niw, loss, support, query), loop(niw, loss, support, query))


@pytest.mark.parametrize("kind", ["gaussian", "categorical", "normal"])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s != "rank 2"])
def test_so_they_are_whatever_the_directions(kind, shape):
    niw, loss = make(kind, shape)
    support, query = batch(kind, N), batch(kind, M)
    assert_equal(batched(niw, loss, support, query), loop(niw, loss, support, query))


OPTIONS = {
    "first order": {"first_order": True},
    "written out": {"add_kl_gradient": False},
    "written out, last step": {"add_kl_gradient": False, "second_order": "last_step"},
    "no kl": {"kl_weight": 0.0},
    "some kl": {"kl_weight": 0.3},
    "not linearised": {"linearise": "none"},
    "full wishart": {"wishart": "full"},
    "cold": {"temperature": 0.1},
    "short steps": {"radius": 0.2},
    "shared body": {"random": "last_layer"},
    "shared body, last step": {"random": "last_layer", "second_order": "last_step"},
    "shared body, first order": {"random": "last_layer", "first_order": True},
}


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_so_they_are_with_other_options(kind, options):
    niw, loss = make(kind, **options)
    support, query = batch(kind, N), batch(kind, M)
    assert_equal(batched(niw, loss, support, query), loop(niw, loss, support, query))


def test_frozen_weights():
    model = network()
    model[0].requires_grad_(False)
    support, query = batch("gaussian", N), batch("gaussian", M)
    niw = NIW(model, lr=0.1, curvature="full", allow_nograd=True)
    assert_equal(batched(niw, mse, support, query), loop(niw, mse, support, query))
    assert model[0].weight.grad is None
    niw.allow_nograd = False
    with pytest.raises(ArgumentError, match="requires_grad=False"):
        BatchedEpisodes(niw, mse)(support, query)


def test_a_loss_of_two_forwards():
    def halves(net, x, y):
        return (mse(net, x[:2], y[:2]) + mse(net, x[2:4], y[2:4])) / 2

    niw, _ = make()
    support, query = batch("gaussian", N), batch("gaussian", M)
    found = batched(niw, halves, support, query, mse)
    assert_equal(found, loop(niw, halves, support, query, mse))


def test_features_with_a_graph_get_their_gradient():
    niw, body = NIW(nn.Linear(2, 1), lr=0.1, rank=2), nn.Linear(2, 2)
    support, query = batch("gaussian", N), batch("gaussian", M)

    def run(way):
        body.zero_grad()
        found = way(niw, mse, (body(support[0]), support[1]), (body(query[0]), query[1]))
        return found[0], [*found[1], body.weight.grad.clone()]

    found = run(batched)
    niw.zero_grad()
    body.zero_grad()
    for i in range(EPISODES):
        learner, features = niw.clone(), body(support[0][i])
        for _ in range(STEPS):
            learner.adapt(mse(learner, features, support[1][i]))
        mse(learner.query, body(query[0][i]), query[1][i]).backward()
    for ours, p in zip(found[1], (*niw.parameters(), body.weight), strict=True):
        assert torch.allclose(ours, p.grad / EPISODES, atol=1e-10)


@pytest.mark.parametrize("targets", [1, 2])
def test_the_evidence_of_a_head(targets):
    model = EpisodicModel(MLP(2, (4, 4), nn.Tanh), BayesianRidge(noise=0.5))
    niw = NIW(model, lr=0.1, rank=2, random="backbone.*", prior_std=0.5)
    support, query = batch("gaussian", N), batch("gaussian", M)
    support[1], query[1] = (
        t.expand(-1, -1, targets) + 0.1 * torch.randn(EPISODES, 1, targets) for t in (support[1], query[1])
    )

    def explain(net, x, y):
        return net(x, y).nll(y)

    def predict(net, x, y, x_query, y_query):
        return net(x, y, x_query).nll(y_query)

    query = [*support, *query]
    assert_equal(batched(niw, explain, support, query, predict), loop(niw, explain, support, query, predict))


def test_a_head_s_classes():
    model = EpisodicModel(MLP(2, (4, 4), nn.Tanh), NearestCentroid("euclidean"))
    niw = NIW(model, lr=0.1, rank=2, prior_std=0.5)
    x, x_query = torch.randn(EPISODES, 6, 2), torch.randn(EPISODES, 4, 2)
    y = torch.tensor([[3, 3, 9, 9, 9, 5], [0, 1, 2, 0, 1, 2], [7, 7, 8, 8, 4, 4]])
    y_query = torch.tensor([[3, 5, 9, 9], [0, 0, 1, 2], [4, 7, 8, 8]])

    def explain(net, x, y):
        return net(x, y, ways=3).nll(y)

    def predict(net, x, y, x_query, y_query):
        return net(x, y, x_query, ways=3).nll(y_query)

    support, query = (x, y), (x, y, x_query, y_query)
    assert_equal(batched(niw, explain, support, query, predict), loop(niw, explain, support, query, predict))


@pytest.mark.parametrize("second_order", ORDERS)
@pytest.mark.parametrize("kind", ["gaussian", "categorical", "normal"])
def test_posteriors_and_their_predictions_are_the_loop_s(kind, second_order):
    niw, loss = make(kind, second_order=second_order)
    support, (x, _) = batch(kind, N), batch(kind, M)
    post = BatchedEpisodes(niw, loss, steps=STEPS).posterior(support)
    linearised = None if kind == "normal" else post.linearised(x)
    for i in range(EPISODES):
        learner = niw.clone()
        for _ in range(STEPS):
            learner.adapt(loss(learner, *[t[i] for t in support]))
        alone = learner.posterior()
        assert torch.allclose(post.z[i], alone.z, atol=1e-10)
        assert torch.allclose(post.covariance[i], alone.covariance, atol=1e-10)
        for name in alone.mean:
            assert torch.allclose(post.mean[name][i], alone.mean[name], atol=1e-10)
            assert torch.allclose(post.variance[name][i], alone.variance[name], atol=1e-10)
        if linearised is not None:
            for name in ("mean", "stddev") if kind == "gaussian" else ("probs",):
                expected = getattr(alone.linearised(x[i]), name)
                assert torch.allclose(getattr(linearised, name)[i], expected, atol=1e-10)


@pytest.mark.parametrize("second_order", ORDERS)
def test_a_posterior_s_gradient_is_the_loop_s(second_order):
    niw, loss = make(second_order=second_order)
    support, options = batch("gaussian", N), {"allow_unused": True, "materialize_grads": True}

    def gradient(posts):
        value = sum(v.sum() for post in posts for own in (post.mean, post.variance) for v in own.values())
        return torch.autograd.grad(value, list(niw.parameters()), **options)

    posts = []
    for i in range(EPISODES):
        learner = niw.clone()
        for _ in range(STEPS):
            learner.adapt(loss(learner, *[t[i] for t in support]))
        posts.append(learner.posterior())
    together = gradient([BatchedEpisodes(niw, loss, steps=STEPS).posterior(support)])
    for ours, theirs in zip(together, gradient(posts), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-10)


def test_meta_test_inference_is_the_loop_s():
    niw, loss = make("categorical")
    support = batch("categorical", N)
    post = BatchedEpisodes(niw, loss).posterior(support, elbo_steps=4)
    for i in range(EPISODES):
        episode = [t[i] for t in support]
        alone = niw.clone().posterior(lambda net, e=episode: loss(net, *e), 4)
        assert torch.allclose(post.z[i], alone.z, atol=1e-10)
        assert torch.allclose(post.covariance[i], alone.covariance, atol=1e-10)
    start = BatchedEpisodes(niw, loss).posterior(support, elbo_steps=0)
    for name, variance in niw.prior().variance.items():
        assert torch.allclose(start.variance[name][1], variance)


def batch_norm():
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


@pytest.mark.parametrize("add_kl_gradient", [True, False])
@pytest.mark.parametrize("second_order", ORDERS)
def test_a_model_that_cannot_be_vmapped_runs_in_a_loop(second_order, add_kl_gradient):
    model, support, query = batch_norm(), batch("gaussian", N), batch("gaussian", M)
    options = {"lr": 0.1, "rank": 2, "second_order": second_order, "add_kl_gradient": add_kl_gradient}
    torch.manual_seed(1)
    niw = NIW(model, **options)
    twin = copy.deepcopy(niw)
    episodes = BatchedEpisodes(niw, mse, steps=STEPS)
    with pytest.warns(UserWarning, match="one after another instead of at once"):
        value = episodes(support, query)
    value.backward()
    assert_equal((value.item(), collected(niw)), loop(twin, mse, support, query))
    post = episodes.posterior(support)
    assert post.linearised(query[0]).mean.shape == (EPISODES, M, 1)
    assert post.predict(query[0], samples=2).shape == (2, EPISODES, M, 1)
    assert episodes.posterior(support, elbo_steps=2).z.shape == (EPISODES, 2)


def test_losses_that_cannot_be_used():
    niw, _ = make()
    support, query = batch("gaussian", N), batch("gaussian", M)
    for loss, message in (
        (lambda net, x, y: (net(x) - y).square(), "must be a scalar"),
        (lambda net, x, y: y.mean(), "does not depend on its network"),
        (lambda net, x, y: F.l1_loss(net(x), y), "not a negative log-likelihood"),
        (lambda net, x, y: mse(net, x, y) / 0.0, "support loss of episode 0 is inf"),
    ):
        with pytest.raises(LossError, match=message):
            BatchedEpisodes(niw, loss, steps=1)(support, query)


def test_weights_that_the_loss_does_not_depend_on():
    support, query = batch("gaussian", N), batch("gaussian", M)
    with pytest.raises(LossError, match="'spare.weight'"):
        BatchedEpisodes(NIW(Spare(), lr=0.1, rank=2), mse)(support, query)
    niw = NIW(Spare(), lr=0.1, curvature="full", allow_unused=True)
    assert_equal(batched(niw, mse, support, query), loop(niw, mse, support, query))


def test_diagnostics_are_means_over_episodes():
    niw, loss = make()
    support = batch("gaussian", N)
    BatchedEpisodes(niw, loss, steps=STEPS).posterior(support)
    found, each = niw.diagnostics(), []
    for i in range(EPISODES):
        learner = niw.clone()
        for _ in range(STEPS):
            learner.adapt(loss(learner, *[t[i] for t in support]))
        each.append(niw.diagnostics())
    for name in ("share", "length", "evidence", "noise", "n0"):
        assert found[name] == pytest.approx(sum(own[name] for own in each) / EPISODES)
