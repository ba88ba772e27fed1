"""Episodes side by side are the loop of clone, adapt and posterior, for the same random draws."""

import copy
import shutil
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from l2l_niw import NIW, EpisodicModel, side_by_side
from l2l_niw.curvature import GGN
from l2l_niw.episodes import Episodes
from l2l_niw.errors import ArgumentError, LossError
from l2l_niw.heads import CNP, BayesianRidge, NearestCentroid
from l2l_niw.models import MLP, batch_statistics

STEPS, EPISODES = 4, 3


@pytest.fixture
def same_draws(monkeypatch):
    """Every randn_like gives the same numbers for the same last dimensions, by no random operation that vmap sees."""

    def fixed(t, **_):
        shape = t.shape[-1:] if t.shape[-1] > 20 else t.shape
        noise = torch.as_tensor(np.random.default_rng(sum(shape)).standard_normal(shape))
        return noise.to(t.dtype).expand(t.shape)

    monkeypatch.setattr(torch, "randn_like", fixed)


def network():
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1))


def data(queries=7):
    x, x_query = torch.randn(EPISODES, 5, 2), torch.randn(EPISODES, queries, 2)
    return (x, x.sum(-1, keepdim=True).sin()), (x_query, x_query.sum(-1, keepdim=True).sin())


def mse(net, x, y):
    return F.mse_loss(net(x), y)


def loop(niw, loss, support, query):
    """learn2learn's loop, gradients divided by the number of episodes."""
    niw.zero_grad()
    values = []
    for i in range(len(support[0])):
        learner = niw.clone()
        for _ in range(STEPS):
            learner.adapt(loss(learner, *(t[i] for t in support)))
        value = loss(learner, *(t[i] for t in query))
        if not niw.options.auto_kl:
            value = learner.objective(value)
        value.backward()
        values.append(value.item())
    return sum(values) / len(values), [p.grad / len(values) for p in niw.parameters()]


def together(niw, loss, support, query, **options):
    """The same side by side; the warning that tells of a loop is an error here."""
    niw.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = Episodes(niw, loss, steps=STEPS, **options)(support, query)
    value.backward()
    return value.item(), [p.grad for p in niw.parameters()]


def assert_equal(got, expected, tolerance):
    assert got[0] == pytest.approx(expected[0], rel=tolerance, abs=tolerance)
    for g, e in zip(got[1], expected[1]):
        assert torch.allclose(g, e, rtol=tolerance, atol=tolerance * max(1.0, e.abs().max().item()))


OPTIONS = {
    "default": {},
    "paper": {"trace": "none", "precondition": False},
    "hot": {"temperature": 0.1, "kl_weight": 1.0, "burn_in": 0},
    "full wishart": {"wishart": "full"},
    "written out": {"auto_kl": False},
    "no kl": {"kl_weight": 0.0},
    "ggn": {"curvature": GGN("gaussian", noise=0.3, samples=2)},
    "point estimate": {"temperature": 0.0},
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
    monkeypatch.setattr(side_by_side, "objective", lambda *a: sizes.append(len(a[-1][0])) or original(*a))
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
    for g, h in zip(gradients, half_gradients):
        assert h.dtype == torch.float32
        assert (g - h).norm() <= 0.1 * g.norm() + 1e-6
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


class TestFallback:
    """Models that cannot be vmapped run in a loop, and one warning says why."""

    def models(self):
        class Branching(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 1)

            def forward(self, x):
                out = self.layer(x)
                return out if out.sum() > 0 else -out

        return {
            "batch norm": nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)),
            "branch": Branching(),
        }

    @pytest.mark.parametrize("name", ["batch norm", "branch"])
    def test_the_numbers_are_the_loops(self, name, same_draws, double):
        model, (support, query) = self.models()[name], data()
        niw, twin = NIW(model, lr=0.1), NIW(copy.deepcopy(model), lr=0.1)
        episodes = Episodes(niw, mse, steps=STEPS)
        with pytest.warns(UserWarning, match="one after another instead of side by side") as caught:
            value = episodes(support, query)
        assert len(caught) == 1
        value.backward()
        assert_equal((value.item(), [p.grad for p in niw.parameters()]), loop(twin, mse, support, query), 1e-12)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it has been said
            episodes(support, query)
            assert episodes.posterior(support).predict(query[0], samples=2).shape == (2, EPISODES, 7, 1)
            episodes.posterior(support, elbo_steps=2)

    def test_the_reason_is_given(self):
        niw, (support, query) = NIW(self.models()["batch norm"], lr=0.1), data()
        with pytest.warns(UserWarning, match="BatchNorm writes running statistics"):
            Episodes(niw, mse)(support, query)

    def test_without_running_statistics_batch_norm_runs_side_by_side(self, same_draws, double):
        niw, (support, query) = NIW(batch_statistics(self.models()["batch norm"]), lr=0.1), data()
        assert_equal(together(niw, mse, support, query), loop(niw, mse, support, query), 1e-10)

    def test_a_traced_chain_runs_in_a_loop(self, double):
        niw = NIW(network(), lr=0.1, temperature=0.0, trace="full", precondition=False)
        support, query = data()
        with pytest.warns(UserWarning, match="trace='full'"):
            value = Episodes(niw, mse, steps=STEPS)(support, query)
        value.backward()
        gradients = [p.grad.clone() for p in niw.parameters()]
        assert_equal((value.item(), gradients), loop(niw, mse, support, query), 1e-12)

    def test_what_cannot_be_compiled_runs_side_by_side(self, monkeypatch, same_draws, double):
        def refuse(*_, **__):
            raise RuntimeError("no compiler here")

        niw, (support, query) = NIW(network(), lr=0.1), data()
        monkeypatch.setattr(torch, "compile", lambda *_, **__: refuse)
        episodes = Episodes(niw, mse, steps=STEPS, compile=True)
        with pytest.warns(UserWarning, match="not compiled: no compiler here"):
            value = episodes(support, query)
        value.backward()
        gradients = [p.grad.clone() for p in niw.parameters()]
        assert_equal((value.item(), gradients), loop(niw, mse, support, query), 1e-12)
        assert not episodes._one_by_one

    def test_running_statistics_are_the_loops(self, same_draws, double):
        model, (support, query) = self.models()["batch norm"], data()
        niw, twin = NIW(model, lr=0.1), NIW(copy.deepcopy(model), lr=0.1)
        with pytest.warns(UserWarning, match="BatchNorm"):
            Episodes(niw, mse, steps=STEPS)(support, query)
        loop(twin, mse, support, query)
        assert torch.allclose(niw.module[1].running_mean, twin.module[1].running_mean)
        assert niw.module[1].num_batches_tracked == twin.module[1].num_batches_tracked

    def test_an_error_of_the_users_is_raised(self):
        niw, (support, query) = NIW(network(), lr=0.1), data()
        episodes = Episodes(niw, lambda net, x, y: mse(net, x[..., :1], y))
        with pytest.warns(UserWarning, match="side by side"), pytest.raises(RuntimeError, match="cannot be multiplied"):
            episodes(support, query)


class TestErrors:
    @pytest.fixture
    def niw(self):
        return NIW(network(), lr=0.1)

    def test_data_that_are_no_batch(self, niw):
        support, query = data()
        with pytest.raises(ArgumentError, match="support must be a tuple of tensors"):
            Episodes(niw, mse)(support[0], query)
        with pytest.raises(ArgumentError, match="same number of episodes"):
            Episodes(niw, mse)([t[:2] for t in support], query)
        with pytest.raises(ArgumentError, match="one at least"):
            Episodes(niw, mse)([t[:0] for t in support], [t[:0] for t in query])

    def test_losses_that_cannot_be_used(self, niw):
        support, query = data()
        for loss, message in (
            (lambda net, x, y: (net(x) - y).square(), "must be a scalar"),
            (lambda net, x, y: y.mean(), "does not depend on its network"),
            (lambda net, x, y: net(x).detach().mean(), "does not depend on its network"),
            (lambda net, x, y: mse(net, x, y) / 0.0, "support loss of episode 0 is inf"),
        ):
            with pytest.raises(LossError, match=message):
                Episodes(niw, loss)(support, query)
        with pytest.raises(LossError, match="query loss of episode 0 is inf"):
            Episodes(niw, mse, lambda net, x, y: mse(net, x, y) / 0.0)(support, query)

    def test_unused_and_frozen_parameters(self, niw, double):
        class Spare(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.spare = nn.Linear(2, 1), nn.Linear(2, 1)

            def forward(self, x):
                return self.used(x)

        support, query = data()
        model = Spare()
        with pytest.raises(LossError, match="'spare.weight'"):
            Episodes(NIW(model, lr=0.1), mse)(support, query)
        generous = NIW(model, lr=0.1, allow_unused=True)
        post = Episodes(generous, mse).posterior(support)
        assert torch.equal(post.mean["spare.weight"][1], model.spare.weight)
        model.spare.requires_grad_(False)
        with pytest.raises(ArgumentError, match="requires_grad=False"):
            Episodes(NIW(model, lr=0.1), mse)(support, query)
        Episodes(NIW(model, lr=0.1, allow_nograd=True), mse)(support, query).backward()
        assert model.spare.weight.grad is None

    def test_options_out_of_their_domain(self, niw):
        for options, name in (({"steps": 0}, "steps"), ({"memory": 0}, "memory")):
            with pytest.raises(ArgumentError, match=name):
                Episodes(niw, mse, **options)
        with pytest.raises(ArgumentError, match="elbo_steps"):
            Episodes(niw, mse).posterior(data()[0], elbo_steps=-1)


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
