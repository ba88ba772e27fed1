"""A batch of episodes in one call is the loop of clone, adapt and a query loss, for the same random draws."""

import copy
import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from l2l_niw import NIW, BatchedEpisodes, EpisodicModel
from l2l_niw.errors import ArgumentError, LossError
from l2l_niw.heads import CNP, BayesianRidge, NearestCentroid
from l2l_niw.inference.curvature import GGN
from l2l_niw.models import MLP, batch_statistics

STEPS, EPISODES = 4, 3


@pytest.fixture
def same_draws(monkeypatch):
    """Every randn_like gives the same numbers for the same shape, whether of one episode or of all."""

    def fixed(t, **_):
        shape = t.shape[1:] if t.dim() > 1 and t.shape[0] == EPISODES else t.shape
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


def loop(niw, loss, support, query, steps=STEPS):
    """learn2learn's loop, gradients divided by the number of episodes."""
    niw.zero_grad()
    values = []
    for i in range(len(support[0])):
        learner = niw.clone()
        for _ in range(steps):
            learner.adapt(loss(learner, *(t[i] for t in support)))
        value = loss(learner.query, *(t[i] for t in query))
        if not niw.options.add_kl_gradient:
            value = learner.objective(value)
        value.backward()
        values.append(value.item())
    return sum(values) / len(values), [p.grad / len(values) for p in niw.parameters()]


def batched(niw, loss, support, query, steps=STEPS):
    """The same at once; the warning that tells of a loop is an error here."""
    niw.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = BatchedEpisodes(niw, loss, steps=steps)(support, query)
    value.backward()
    return value.item(), [p.grad for p in niw.parameters()]


def assert_equal(got, expected, tolerance=1e-9):
    assert got[0] == pytest.approx(expected[0], rel=tolerance, abs=tolerance)
    assert len(got[1]) == len(expected[1])
    for g, e in zip(got[1], expected[1]):
        assert torch.allclose(g, e, rtol=tolerance, atol=tolerance * max(1.0, e.abs().max().item()))


TEMPERATURES = {
    "zero": {"temperature": 0.0},
    "tiny": {"temperature": 1e-18, "prior_precision": 10.0, "kl_weight": 0.01},
}
ORDERS, WAYS = ("none", "last_layer", "all"), ("langevin", "closed_form")
CASES = list(itertools.product(TEMPERATURES, WAYS, ORDERS, (False, True), (False, True)))


@pytest.mark.parametrize(("temperature", "inference", "second_order", "average_iterates", "learn_step_sizes"), CASES)
def test_without_noise_the_meta_gradient_is_the_loop_s(
    temperature, inference, second_order, average_iterates, learn_step_sizes, double
):
    options = {"inference": inference, "second_order": second_order, "average_iterates": average_iterates}
    niw = NIW(network(), lr=0.1, learn_step_sizes=learn_step_sizes, burn_in=1, **options, **TEMPERATURES[temperature])
    with torch.no_grad():
        for v in niw.hyper.log_variance:
            v.add_(0.3 * torch.randn_like(v))
    support, query = data()
    expected = loop(niw, mse, support, query)
    assert_equal(batched(niw, mse, support, query), expected)
    assert any(g.abs().max() > 1e-6 for g in expected[1])


OPTIONS = {
    "default": {},
    "averaged": {"average_iterates": True, "burn_in": 1},
    "paper": {"inference": "closed_form", "average_iterates": True, "burn_in": 2, "learn_step_sizes": False},
    "hot": {"temperature": 0.1, "kl_weight": 1.0, "average_iterates": True},
    "hot, in closed form": {"temperature": 0.1, "kl_weight": 1.0, "inference": "closed_form", "second_order": "none"},
    "full wishart": {"wishart": "full"},
    "written out": {"add_kl_gradient": False},
    "no kl": {"kl_weight": 0.0},
    "ggn": {"curvature": GGN("gaussian", noise=0.3, samples=2), "second_order": "none"},
    "ggn, all": {"curvature": GGN("gaussian", noise=0.3, samples=2), "second_order": "all"},
    "ggn, in closed form": {"curvature": GGN("gaussian", noise=0.3), "inference": "closed_form", "second_order": "all"},
    "first order": {"first_order": True},
    "all": {"second_order": "all", "temperature": 0.1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["64", "32"])
def test_with_noise_the_meta_gradient_is_the_loop_s(options, dtype, tolerance, same_draws):
    niw = NIW(network().to(dtype), lr=0.1, **options)
    support, query = ([t.to(dtype) for t in part] for part in data())
    expected = loop(niw, mse, support, query)
    assert_equal(batched(niw, mse, support, query), expected, tolerance)
    assert any(g.abs().max() > 0 for g in expected[1])


@pytest.mark.parametrize("inference", WAYS)
def test_with_ggn_the_last_layer_s_meta_gradient_is_the_loop_s(inference, same_draws, double):
    niw = NIW(network(), lr=0.1, curvature=GGN("gaussian", noise=0.3, samples=2), inference=inference)
    support, query = data()
    assert_equal(batched(niw, mse, support, query), loop(niw, mse, support, query))


def centred(net, x, y):
    outputs = net(x)
    return (outputs - outputs.mean(0) - y).square().mean()


def halves(net, x, y):
    return (mse(net, x[:2], y[:2]) + mse(net, x[2:], y[2:])) / 2


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Linear(1, 4), nn.Linear(4, 1)

    def forward(self, x):
        state = torch.zeros(len(x), 4, dtype=x.dtype)
        for part in x.unbind(-1):
            state = torch.tanh(self.body(part.unsqueeze(-1)) + state)
        return self.last(state)


class ByName(nn.Module):
    """The last layer is called with a keyword, and its outputs are not the model's."""

    def __init__(self):
        super().__init__()
        self.last, self.body = nn.Linear(6, 1), nn.Linear(2, 6)

    def forward(self, x):
        return self.last(torch.tanh(self.body(x))).sin()


class Skip(nn.Module):
    """Its body reaches the outputs past the features."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return (self.last(torch.tanh(self.second(hidden))) * hidden + hidden.square()).sum(-1, keepdim=True)


class Reused(nn.Module):
    """The features themselves are used once more behind the last layer."""

    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, x):
        features = torch.tanh(self.body(x))
        return (self.last(features) * features).sum(-1, keepdim=True)


class TwoCalls(nn.Module):
    """Its last layer is called on two sets of features."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.last = nn.Linear(2, 4), nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.left(x))) - self.last(torch.sin(self.right(x)))


MODELS = {
    "two calls": TwoCalls,
    "plain": network,
    "loop over inputs": Recurrent,
    "sine": ByName,
    "relu in place": lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1), nn.ReLU(inplace=True)),
    "linear": lambda: nn.Linear(2, 1),
}


@pytest.mark.parametrize("loss", [mse, centred, halves], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_for_models_and_losses_the_meta_gradient_is_the_loop_s(name, loss, double):
    niw, (support, query) = NIW(MODELS[name](), lr=0.1, temperature=0.0), data()
    assert_equal(batched(niw, loss, support, query), loop(niw, loss, support, query))


@pytest.mark.parametrize("second_order", ORDERS)
@pytest.mark.parametrize("model", [Skip, Reused])
def test_so_it_is_where_the_body_reaches_the_loss_past_the_last_layer(model, second_order, double):
    niw, (support, query) = NIW(model(), lr=0.1, temperature=0.0, second_order=second_order), data()
    expected = loop(niw, mse, support, query)  # which says, once, that whole graphs are kept
    assert_equal(batched(niw, mse, support, query), expected)


def test_the_support_may_be_the_query(same_draws, double):
    niw, (support, _) = NIW(network(), lr=0.1, inference="closed_form", temperature=0.1), data()
    assert_equal(batched(niw, mse, support, support), loop(niw, mse, support, support))


def test_a_batch_in_parts_has_the_same_gradient(double):
    niw, (support, query) = NIW(network(), lr=0.1, temperature=0.0), data()
    expected = batched(niw, mse, support, query)[1]
    expected = [g.clone() for g in expected]
    niw.zero_grad()
    for i in range(EPISODES):
        part = [[t[i : i + 1] for t in own] for own in (support, query)]
        (BatchedEpisodes(niw, mse, steps=STEPS)(*part) / EPISODES).backward()
    for p, g in zip(niw.parameters(), expected):
        assert torch.allclose(p.grad, g, atol=1e-12)


def test_steps_on_the_elbo_run_at_once():
    niw, (support, _) = NIW(network(), lr=0.1), data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BatchedEpisodes(niw, mse).posterior(support, elbo_steps=2)


@pytest.mark.parametrize("inference", WAYS)
@pytest.mark.parametrize("elbo_steps", [None, 3])
def test_posteriors_and_predictions_are_the_loop_s(elbo_steps, inference, same_draws, double):
    niw, (support, query) = NIW(network(), lr=0.1, temperature=0.1, inference=inference), data()
    post = BatchedEpisodes(niw, mse, steps=STEPS).posterior(support, elbo_steps, samples=2)
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


@pytest.mark.parametrize("inference", WAYS)
def test_a_posterior_s_gradient_is_the_loop_s(inference, double):
    niw, (support, _) = NIW(network(), lr=0.1, temperature=1e-18, prior_precision=10.0, inference=inference), data()

    def gradient(posts):
        return torch.autograd.grad(
            sum(m.square().sum() for post in posts for m in post.mean.values()), list(niw.module.parameters())
        )

    found = gradient([BatchedEpisodes(niw, mse, steps=STEPS).posterior(support)])
    posts = []
    for i in range(EPISODES):
        learner = niw.clone()
        for _ in range(STEPS):
            learner.adapt(mse(learner, support[0][i], support[1][i]))
        posts.append(learner.posterior())
    for ours, theirs in zip(found, gradient(posts)):
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-8)


def test_draws_differ_between_episodes_steps_and_samples():
    """The same data in every episode: what differs is the noise."""
    niw = NIW(network(), lr=0.1, temperature=1.0)
    (x, y), (x_query, _) = data()
    support = (x[:1].expand(EPISODES, -1, -1), y[:1].expand(EPISODES, -1, -1))
    post = BatchedEpisodes(niw, mse, steps=STEPS).posterior(support)
    mean = post.mean["0.weight"]
    assert not torch.allclose(mean[0], mean[1])
    outputs = post.predict(x_query, samples=2)
    assert not torch.allclose(outputs[0], outputs[1])


def test_noise_has_the_chain_s_variance_in_every_episode():
    """One step from zero gradient: what is left is the noise, of variance 2 lr T / n."""
    niw = NIW(nn.Linear(50, 20), lr=0.1, temperature=0.5, prior_precision=1e-12)
    x = torch.randn(EPISODES, 4, 50)
    post = BatchedEpisodes(niw, lambda net, x: 0.0 * net(x).mean(), steps=1).posterior((x,))
    moved = post.mean["weight"] - niw.module.weight
    for own in moved:
        assert own.var().item() == pytest.approx(2 * 0.1 * 0.5 / 4, rel=0.2)
        assert abs(own.mean().item()) < 0.02


@pytest.mark.parametrize("at_once", [False, True])
def test_bfloat16_forwards_agree_with_float32(at_once, same_draws):
    """Autocast takes the forwards to bfloat16; weights, moments and closed form stay in float32."""
    niw, (support, query) = NIW(network(), lr=0.1), data()
    run = batched if at_once else loop
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


class TestEpisodicModels:
    @pytest.mark.filterwarnings("ignore:NIW. second_order='last_layer' needs")
    def test_classes(self, double):
        model = EpisodicModel(MLP(2, (8, 4), nn.Tanh), NearestCentroid("cosine", 10.0, learn_scale=True))
        niw = NIW(model, lr=0.1, temperature=0.0)
        x, x_query = torch.randn(EPISODES, 6, 2), torch.randn(EPISODES, 4, 2)
        y = torch.tensor([[3, 3, 9, 9, 9, 5], [0, 1, 2, 0, 1, 2], [7, 7, 8, 8, 4, 4]])
        y_query = torch.tensor([[3, 5, 9, 9], [0, 0, 1, 2], [4, 7, 8, 8]])

        def support_loss(net, x, y):
            return net(x, y, ways=3).nll(y)

        def query_loss(net, x, y, x_query, y_query):
            return net(x, y, x_query, y_query, ways=3).loss(y_query)

        episodes = BatchedEpisodes(niw, support_loss, query_loss, steps=STEPS)
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

    @pytest.mark.filterwarnings("ignore:NIW. second_order='last_layer' needs")
    @pytest.mark.parametrize("curvature", ["sgld", "ggn"])
    @pytest.mark.parametrize("head", ["bayesian ridge", "cnp"])
    def test_regressions(self, head, curvature):
        head = BayesianRidge() if head == "bayesian ridge" else CNP(4, width=8, latent=True)
        niw = NIW(EpisodicModel(MLP(2, (8, 4), nn.Tanh), head), lr=0.01, curvature=curvature)
        (x, y), (x_query, y_query) = data()
        episodes = BatchedEpisodes(
            niw, lambda net, x, y: net(x, y).nll(y), lambda net, *q: net(*q).loss(q[-1]), steps=2
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="BatchedEpisodes run")
            episodes((x, y), (x, y, x_query, y_query)).backward()
        assert all(p.grad.abs().max() > 0 for p in niw.parameters())
        prediction = episodes.posterior((x, y)).predict(x, y, x_query, samples=5)
        assert prediction.mean.shape == (EPISODES, 7, 1)
        assert prediction.nll(y_query).isfinite()


def test_training_at_once_learns():
    niw = NIW(network(), lr=0.05)
    episodes = BatchedEpisodes(niw, mse, steps=3)
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


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("second_order", ORDERS)
@pytest.mark.parametrize("inference", WAYS)
def test_features_of_a_shared_network_get_their_gradient(inference, second_order, looped, double):
    """Those of the support too, where steps keep their graph, as in the loop."""
    options = {"inference": inference, "second_order": second_order}
    niw = NIW(network(), lr=0.1, temperature=0.0, **options)
    body, (support, query) = nn.Linear(2, 2), data()
    episodes = BatchedEpisodes(niw, mse, steps=STEPS)
    episodes._looped = looped
    episodes((body(support[0]), support[1]), (body(query[0]), query[1])).backward()
    found = [p.grad for p in (*niw.parameters(), *body.parameters())]
    niw.zero_grad()
    body.zero_grad()
    for x, y, x_query, y_query in zip(*support, *query):
        learner, features = niw.clone(), body(x)
        for _ in range(STEPS):
            learner.adapt(mse(learner, features, y))
        mse(learner.query, body(x_query), y_query).backward()
    for ours, p in zip(found, (*niw.parameters(), *body.parameters())):
        assert torch.allclose(ours, p.grad / EPISODES, atol=1e-12)
    assert body.weight.grad.abs().max() > 0


def test_without_gradients_the_query_s_data_are_left_alone():
    niw, (support, query) = NIW(network(), lr=0.1), data()
    query[0].requires_grad_()
    with torch.no_grad():
        BatchedEpisodes(niw, mse, steps=STEPS)(support, query)
    assert query[0].requires_grad
    assert query[0].grad is None


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        out = self.layer(x)
        return out if out.sum() > 0 else -out


def batch_norm():
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


UNMAPPABLE = {"batch norm": batch_norm, "branch": Branching}


class TestFallback:
    """Models that cannot be vmapped run in a loop, and one warning says why."""

    @pytest.mark.parametrize(
        ("inference", "add_kl_gradient"),
        list(itertools.product(WAYS, [True, False])),
    )
    @pytest.mark.parametrize("name", UNMAPPABLE)
    def test_the_numbers_are_the_loop_s(self, name, inference, add_kl_gradient, same_draws, double):
        model, (support, query) = UNMAPPABLE[name](), data()
        options = {"lr": 0.1, "inference": inference, "add_kl_gradient": add_kl_gradient, "kl_weight": 0.3}
        niw, twin = NIW(model, **options), NIW(copy.deepcopy(model), **options)
        episodes = BatchedEpisodes(niw, mse, steps=STEPS)
        with pytest.warns(UserWarning, match="one after another instead of at once") as caught:
            value = episodes(support, query)
        assert len(caught) == 1
        value.backward()
        assert_equal((value.item(), [p.grad for p in niw.parameters()]), loop(twin, mse, support, query), 1e-10)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it has been said
            episodes(support, query)
            assert episodes.posterior(support).predict(query[0], samples=2).shape == (2, EPISODES, 7, 1)
            episodes.posterior(support, elbo_steps=2)

    def test_the_reason_is_given(self):
        niw, (support, query) = NIW(batch_norm(), lr=0.1), data()
        with pytest.warns(UserWarning, match="BatchNorm writes running statistics"):
            BatchedEpisodes(niw, mse)(support, query)

    def test_without_running_statistics_batch_norm_runs_at_once(self, same_draws, double):
        niw, (support, query) = NIW(batch_statistics(batch_norm()), lr=0.1), data()
        assert_equal(batched(niw, mse, support, query), loop(niw, mse, support, query))

    @pytest.mark.parametrize("second_order", ORDERS)
    def test_running_statistics_are_the_loop_s(self, second_order, same_draws, double):
        model, (support, query) = batch_norm(), data()
        niw, twin = (NIW(m, lr=0.1, second_order=second_order) for m in (model, copy.deepcopy(model)))
        with pytest.warns(UserWarning, match="BatchNorm"):
            BatchedEpisodes(niw, mse, steps=STEPS)(support, query)
        loop(twin, mse, support, query)
        assert torch.allclose(niw.module[1].running_mean, twin.module[1].running_mean)
        assert niw.module[1].num_batches_tracked == twin.module[1].num_batches_tracked

    def test_an_error_of_the_user_s_is_raised_and_is_no_reason_to_loop(self):
        niw, (support, query) = NIW(network(), lr=0.1), data()
        episodes = BatchedEpisodes(niw, lambda net, x, y: mse(net, x[..., :1], y))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                episodes(support, query)

    BAD = {
        "shape": lambda support, query: (([support[0][..., :1], support[1]]), query),
        "query's shape": lambda support, query: (support, (query[0][..., :1], query[1])),
        "nan": lambda support, query: ((support[0] * float("nan"), support[1]), query),
        "dtype": lambda support, query: ((support[0].long(), support[1]), query),
        "episodes": lambda support, query: ((support[0][:2], support[1]), query),
    }

    @pytest.mark.parametrize("name", BAD)
    @pytest.mark.parametrize("call", ["loss", "posterior"])
    def test_one_bad_batch_does_not_make_it_loop_for_ever_after(self, name, call, double):
        niw, (support, query) = NIW(network(), lr=0.1, temperature=0.0), data()
        bad_support, bad_query = self.BAD[name](support, query)
        forwards = []
        niw.module.register_forward_hook(lambda *_: forwards.append(1))
        episodes = BatchedEpisodes(niw, mse, steps=STEPS)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if call == "loss" or name != "query's shape":
                with pytest.raises((RuntimeError, ValueError)):
                    episodes(bad_support, bad_query) if call == "loss" else episodes.posterior(bad_support)
            forwards.clear()
            value = episodes(support, query)
        assert len(forwards) <= STEPS + 2  # one each, whatever the number of episodes, and a look at the last layer
        expected = loop(niw, mse, support, query)
        value.backward()
        assert value.item() == pytest.approx(expected[0])


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x):
        return self.used(x)


class TestErrors:
    @pytest.fixture
    def niw(self):
        return NIW(network(), lr=0.1)

    def test_data_that_are_no_batch(self, niw):
        support, query = data()
        with pytest.raises(ArgumentError, match="support must be a tuple of tensors"):
            BatchedEpisodes(niw, mse)(support[0], query)
        with pytest.raises(ArgumentError, match="same number of episodes"):
            BatchedEpisodes(niw, mse)([t[:2] for t in support], query)
        with pytest.raises(ArgumentError, match="one at least"):
            BatchedEpisodes(niw, mse)([t[:0] for t in support], [t[:0] for t in query])

    def test_losses_that_cannot_be_used(self, niw):
        support, query = data()
        for loss, message in (
            (lambda net, x, y: (net(x) - y).square(), "must be a scalar"),
            (lambda net, x, y: y.mean(), "does not depend on its network"),
            (lambda net, x, y: net(x).detach().mean(), "does not depend on its network"),
            (lambda net, x, y: mse(net, x, y) / 0.0, "support loss of episode 0 is inf"),
        ):
            with pytest.raises(LossError, match=message):
                BatchedEpisodes(niw, loss, steps=1)(support, query)
        with pytest.raises(LossError, match="query loss of episode 0 is inf"):
            BatchedEpisodes(niw, mse, lambda net, x, y: mse(net, x, y) / 0.0)(support, query)

    def test_the_episode_that_failed_is_named(self, niw):
        (x, y), query = data()
        x[2] = float("nan")
        with pytest.raises(LossError, match="support loss of episode 2 is nan"):
            BatchedEpisodes(niw, mse)((x, y), query)

    def test_unused_and_frozen_parameters(self, double):
        support, query = data()
        model = Spare()
        with pytest.raises(LossError, match="'spare.weight'"):
            BatchedEpisodes(NIW(model, lr=0.1), mse)(support, query)
        generous = NIW(model, lr=0.1, allow_unused=True, prior_precision=50.0)
        post = BatchedEpisodes(generous, mse).posterior(support)
        assert torch.equal(post.mean["spare.weight"][1], model.spare.weight)
        assert torch.allclose(post.variance["spare.weight"], torch.tensor(1 / 50.0), rtol=1e-4)
        model.spare.requires_grad_(False)
        with pytest.raises(ArgumentError, match="requires_grad=False"):
            BatchedEpisodes(NIW(model, lr=0.1), mse)(support, query)
        BatchedEpisodes(NIW(model, lr=0.1, allow_nograd=True), mse)(support, query).backward()
        assert model.spare.weight.grad is None

    def test_options_out_of_their_domain(self, niw):
        with pytest.raises(ArgumentError, match="steps"):
            BatchedEpisodes(niw, mse, steps=0)
        for options in ({"elbo_steps": -1}, {"lr": 0.0}, {"samples": 0}):
            with pytest.raises(ArgumentError, match=next(iter(options))):
                BatchedEpisodes(niw, mse).posterior(data()[0], **options)
