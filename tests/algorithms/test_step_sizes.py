"""
How the gradient reaches V_0 through steps that keep no graph.

On a support loss that is linear in the weights a step's gradient is a constant, so that second_order='none' is exact:
it must have what autograd has through the graph of all steps.
"""

import warnings

import pytest
import torch
from torch import nn

from l2l_niw import NIW, BatchedEpisodes
from l2l_niw.inference.curvature import GGN


@pytest.fixture(autouse=True)
def in_double(double):
    pass


OPTIONS = {"temperature": 0.5, "prior_precision": 3.0, "kl_weight": 0.2}


class Sum(nn.Module):
    """Linear in its weights; a second layer only if it is asked for."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, first=True, second=True):
        return sum(layer(x) for layer, wanted in ((self.a, first), (self.b, second)) if wanted)


def make(second_order, seed=0, **options):
    torch.manual_seed(seed)
    niw = NIW(Sum(), lr=0.3, second_order=second_order, **{**OPTIONS, **options})
    with torch.no_grad():
        for v in niw.hyper.log_variance:  # D is not 1, nor P_0 the same for all
            v.add_(0.5 * torch.randn_like(v))
    return niw


def data():
    torch.manual_seed(7)
    return torch.randn(5, 3), torch.randn(5, 2), torch.randn(4, 3)


def gradients(niw, value):
    niw.zero_grad()
    value.backward()
    return [p.grad.clone() for p in niw.parameters()]


def assert_close(got, expected):
    assert len(got) == len(expected)
    for g, e in zip(got, expected):
        assert torch.allclose(g, e, atol=1e-11)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("curvature", ["sgld", GGN("gaussian")])
@pytest.mark.parametrize("inference", ["langevin", "closed_form"])
def test_steps_with_constant_gradients_have_the_gradient_of_their_graph(inference, curvature, learned):
    x, weights, x_query = data()

    def episode(second_order):
        niw = make(second_order, learn_step_sizes=learned, curvature=curvature, inference=inference)
        learner = niw.clone()
        for _ in range(4):
            learner.adapt((weights * learner(x)).mean())
        return gradients(niw, learner.query(x_query).pow(3).mean())

    assert_close(episode("none"), episode("all"))


@pytest.mark.parametrize("learned", [False, True])
def test_the_mean_of_several_iterates_has_the_gradient_of_its_graph(learned):
    x, weights, _ = data()

    def episode(second_order):
        niw = make(second_order, learn_step_sizes=learned, average_iterates=True, burn_in=1)
        learner = niw.clone()
        for _ in range(4):
            learner.adapt((weights * learner(x)).mean())
        niw.zero_grad()
        sum(mean.pow(3).sum() for mean in learner.posterior().mean.values()).backward()
        return [p.grad.clone() for p in (*niw.module.parameters(), *niw.hyper.log_variance)]

    assert_close(episode("none"), episode("all"))


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("inference", ["langevin", "closed_form"])
def test_a_batch_of_episodes_has_the_gradient_of_its_graph(inference, learned):
    def episodes(second_order):
        niw = make(second_order, learn_step_sizes=learned, inference=inference)
        torch.manual_seed(5)
        x, weights = torch.randn(2, 5, 3), torch.randn(2, 5, 2)
        batched = BatchedEpisodes(
            niw, lambda net, x, w: (w * net(x)).mean(), lambda net, x, w: net(x).pow(3).mean(), steps=3
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return gradients(niw, batched((x, weights), (x + 1.0, weights)))

    assert_close(episodes("none"), episodes("all"))


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(
    "firsts",
    [
        [(True, True), (True, False), (True, True)],
        [(True, False), (True, True)],
        [(False, True), (True, True)],
    ],
)
def test_weights_may_be_used_by_some_steps_only(firsts, learned):
    x, weights, x_query = data()

    def episode(second_order):
        niw = make(second_order, learn_step_sizes=learned, allow_unused=True)
        learner = niw.clone()
        for layers in firsts:
            learner.adapt((weights * learner(x, *layers)).mean())
        return gradients(niw, learner(x_query).pow(3).mean())

    assert_close(episode("none"), episode("all"))


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
def test_a_clone_of_an_adapted_learner_has_the_same_gradient(learned, noisy):
    x, weights, x_query = data()

    def episode(cloned):
        niw = make("none", learn_step_sizes=learned, curvature="sgld" if noisy else GGN("gaussian", samples=None))
        learner = niw.clone()
        torch.manual_seed(1)
        for _ in range(2):
            learner.adapt((weights * learner(x)).mean())
        learner = learner.clone() if cloned else learner
        for _ in range(2):
            learner.adapt((weights * learner(x)).mean())
        return gradients(niw, learner(x_query).pow(3).mean())

    assert_close(episode(True), episode(False))


def test_the_elbos_of_a_batch_run_at_once():
    niw = NIW(nn.Linear(3, 1), lr=0.1)
    episodes = BatchedEpisodes(niw, lambda net, x, y: (net(x) - y).square().mean())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        episodes.posterior((torch.randn(2, 5, 3), torch.randn(2, 5, 1)), elbo_steps=2)
