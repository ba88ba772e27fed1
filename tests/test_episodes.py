"""Episodes side by side are the loop of clone, adapt and posterior, for the same random draws."""

import shutil
import warnings

import pytest
import torch
from episode_cases import EPISODES, STEPS, assert_equal, data, loop, mse, network, together
from torch import nn

from l2l_niw import NIW, EpisodicModel, side_by_side
from l2l_niw.curvature import GGN
from l2l_niw.episodes import Episodes
from l2l_niw.errors import ArgumentError
from l2l_niw.heads import CNP, BayesianRidge, NearestCentroid
from l2l_niw.models import MLP


OPTIONS = {
    "default": {},
    "paper": {"trace": "none", "precondition": False},
    "hot": {"temperature": 0.1, "kl_weight": 1.0, "burn_in": 0},
    "full wishart": {"wishart": "full"},
    "written out": {"auto_kl": False},
    "no kl": {"kl_weight": 0.0},
    "ggn": {"curvature": GGN("gaussian", noise=0.3, samples=2)},
    "point estimate": {"temperature": 0.0},
    "first order": {"first_order": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_the_meta_gradient_is_the_loops(options, dtype, tolerance, same_draws):
    niw = NIW(network().to(dtype), lr=0.1, **options)
    support, query = ([t.to(dtype) for t in part] for part in data())
    expected = loop(niw, mse, support, query)
    assert_equal(together(niw, mse, support, query), expected, tolerance)
    assert any(g.abs().max() > 0 for g in expected[1])


@pytest.mark.parametrize("memory", [1, 40_000, 2**30])
def test_chunks_make_no_difference(memory, same_draws, double):
    niw, (support, query) = NIW(network(), lr=0.1), data()
    assert_equal(together(niw, mse, support, query, memory=memory), loop(niw, mse, support, query), 1e-12)


def test_memory_decides_how_many_run_side_by_side(monkeypatch):
    niw, (support, query) = NIW(network(), lr=0.1), data()
    sizes, original = [], side_by_side.objective
    episodes = Episodes(niw, mse, steps=1)
    episodes(support, query)
    d = sum(p.numel() for p in niw.module.parameters())
    one = max(facts.bytes for facts in episodes._facts.values()) + 40 * d
    one += sum(facts.readout for facts in episodes._facts.values())
    monkeypatch.setattr(side_by_side, "objective", lambda *a: sizes.append(len(a[-2][0])) or original(*a))
    for memory, expected in ((one, [1, 1, 1]), (2 * one, [2, 1]), (3 * one, [3])):
        sizes.clear()
        Episodes(niw, mse, steps=1, memory=memory)(support, query)
        assert sizes == expected


@pytest.mark.parametrize("elbo_steps", [None, 3])
def test_posteriors_and_predictions_are_the_loops(elbo_steps, same_draws, double):
    niw, (support, query) = NIW(network(), lr=0.1, temperature=0.1), data()
    post = Episodes(niw, mse, steps=STEPS).posterior(support, elbo_steps, samples=2)
    outputs = post.predict(query[0], samples=2)
    assert outputs.shape == (2, EPISODES, 7, 1)
    for i in range(EPISODES):
        learner, episode = niw.clone(), [t[i] for t in support]
        if elbo_steps is None:
            for _ in range(STEPS):
                learner.adapt(mse(learner, *episode))
            alone = learner.posterior()
        else:
            alone = learner.posterior(lambda net, e=episode: mse(net, *e), elbo_steps, samples=2)
        for name in alone.mean:
            assert torch.allclose(post.mean[name][i], alone.mean[name], atol=1e-12)
            assert torch.allclose(post.variance[name][i], alone.variance[name], rtol=1e-10)
        assert torch.allclose(outputs[:, i], alone.predict(query[0][i], samples=2), atol=1e-10)


def test_draws_differ_between_episodes_steps_and_samples():
    """The same data in every episode: what differs is the noise."""
    niw = NIW(network(), lr=0.1, temperature=1.0)
    (x, y), (x_query, _) = data()
    support = (x[:1].expand(EPISODES, -1, -1), y[:1].expand(EPISODES, -1, -1))
    post = Episodes(niw, mse, steps=STEPS).posterior(support)
    mean = post.mean["0.weight"]
    assert not torch.allclose(mean[0], mean[1])
    outputs = post.predict(x_query, samples=2)
    assert not torch.allclose(outputs[0], outputs[1])


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_episodes_are_the_same(same_draws):
    niw, (support, query) = NIW(network(), lr=0.1, temperature=0.1), data()
    expected = together(niw, mse, support, query)
    episodes = Episodes(niw, mse, steps=STEPS, compile=True)
    for _ in range(2):
        niw.zero_grad()
        value = episodes(support, query)
        value.backward()
        assert_equal((value.item(), [p.grad for p in niw.parameters()]), expected, 1e-5)


@pytest.mark.parametrize("side_by_side", [False, True])
def test_bfloat16_forwards_agree_with_float32(side_by_side, same_draws):
    """Autocast takes the forwards to bfloat16; weights, moments and closed form stay in float32."""
    niw, (support, query) = NIW(network(), lr=0.1), data()
    run = together if side_by_side else loop
    value, gradients = run(niw, mse, support, query)
    gradients = [g.clone() for g in gradients]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half_value, half_gradients = run(niw, mse, support, query)
    assert half_value == pytest.approx(value, rel=0.02)
    assert half_value != value
    total = torch.cat([g.flatten() for g in gradients]).norm()
    for g, h in zip(gradients, half_gradients):
        assert h.dtype == torch.float32
        assert (g - h).norm() <= 0.1 * g.norm() + 0.01 * total
    assert niw._newest.chain.theta.dtype == niw._newest.a.dtype == torch.float32


class TestEpisodicModels:
    def test_classes(self, same_draws, double):
        model = EpisodicModel(MLP(2, (8, 4), nn.Tanh), NearestCentroid("cosine", 10.0, learn_scale=True))
        niw = NIW(model, lr=0.1)
        x, x_query = torch.randn(EPISODES, 6, 2), torch.randn(EPISODES, 4, 2)
        y = torch.tensor([[3, 3, 9, 9, 9, 5], [0, 1, 2, 0, 1, 2], [7, 7, 8, 8, 4, 4]])
        y_query = torch.tensor([[3, 5, 9, 9], [0, 0, 1, 2], [4, 7, 8, 8]])

        def support_loss(net, x, y):
            return net(x, y, ways=3).nll(y)

        def query_loss(net, x, y, x_query, y_query):
            return net(x, y, x_query, y_query, ways=3).loss(y_query)

        episodes = Episodes(niw, support_loss, query_loss, steps=STEPS)
        episodes((x, y), (x, y, x_query, y_query)).backward()
        gradients = [p.grad.clone() for p in niw.parameters()]
        niw.zero_grad()
        for i in range(EPISODES):
            learner = niw.clone()
            for _ in range(STEPS):
                learner.adapt(learner(x[i], y[i]).nll(y[i]))
            learner(x[i], y[i], x_query[i], y_query[i]).loss(y_query[i]).backward()
        for g, p in zip(gradients, niw.parameters()):
            assert torch.allclose(g, p.grad / EPISODES, atol=1e-10)
        prediction = episodes.posterior((x, y)).predict(x, y, x_query, ways=3, samples=5)
        assert prediction.probs.shape == (EPISODES, 4, 3)
        assert torch.equal(prediction.labels.classes, torch.tensor([[3, 5, 9], [0, 1, 2], [4, 7, 8]]))
        assert prediction.nll(y_query).isfinite()
        with pytest.raises(ArgumentError, match="label 6 is not among"):
            prediction.nll(y_query.clone().fill_(6))

    @pytest.mark.parametrize("curvature", ["sgld", "ggn"])
    @pytest.mark.parametrize("head", ["bayesian ridge", "cnp"])
    def test_regressions(self, head, curvature):
        head = BayesianRidge() if head == "bayesian ridge" else CNP(4, width=8, latent=True)
        niw = NIW(EpisodicModel(MLP(2, (8, 4), nn.Tanh), head), lr=0.01, curvature=curvature)
        (x, y), (x_query, y_query) = data()
        episodes = Episodes(niw, lambda net, x, y: net(x, y).nll(y), lambda net, *q: net(*q).loss(q[-1]), steps=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            episodes((x, y), (x, y, x_query, y_query)).backward()
        assert all(p.grad.abs().max() > 0 for p in niw.parameters())
        prediction = episodes.posterior((x, y)).predict(x, y, x_query, samples=5)
        assert prediction.mean.shape == (EPISODES, 7, 1)
        assert prediction.nll(y_query).isfinite()


def test_training_side_by_side_learns():
    niw = NIW(network(), lr=0.05)
    episodes = Episodes(niw, mse, steps=3)
    optimiser, losses = torch.optim.Adam(niw.parameters(), 0.01), []
    for _ in range(150):
        support, query = data()
        optimiser.zero_grad()
        loss = episodes(support, query)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    assert niw.diagnostics()["n0"] > 0


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("memory", [1, 2**30])
def test_features_of_a_shared_network_get_their_gradient(one_by_one, memory, same_draws, double):
    niw, body, (support, query) = NIW(network(), lr=0.1), nn.Linear(2, 2), data()
    episodes = Episodes(niw, mse, steps=STEPS, memory=memory)
    episodes._one_by_one = one_by_one
    episodes((body(support[0]), support[1]), (body(query[0]), query[1])).backward()
    found = [p.grad for p in (*niw.parameters(), *body.parameters())]
    niw.zero_grad()
    body.zero_grad()
    for x, y, x_query, y_query in zip(*support, *query):
        learner = niw.clone()
        for _ in range(STEPS):
            learner.adapt(mse(learner, body(x).detach(), y))
        mse(learner, body(x_query), y_query).backward()
    for ours, p in zip(found, (*niw.parameters(), *body.parameters())):
        assert torch.allclose(ours, p.grad / EPISODES, atol=1e-12)
    assert body.weight.grad.abs().max() > 0


def test_without_gradients_the_query_s_data_are_left_alone():
    niw, (support, query) = NIW(network(), lr=0.1), data()
    query[0].requires_grad_()
    with torch.no_grad():
        value = Episodes(niw, mse, steps=STEPS)(support, query)
    assert not value.requires_grad
    assert query[0].requires_grad
