"""What was computed from an earlier state of a learner has that state's gradients, whatever the learner does then."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from l2l_niw import NIW
from l2l_niw.inference import prior
from l2l_niw.utils import _functional as functional

OPTIONS = [{}, {"first_order": True}, {"second_order": "none"}, {"second_order": "all"}, {"average_iterates": True}]


@pytest.fixture(autouse=True)
def in_double(double):
    pass


@pytest.fixture(autouse=True, params=["small", "large"])
def size(request, monkeypatch):
    """Networks of any size worked on as they are, or as large ones: in blocks, in place, without a copy of L_0."""
    if request.param == "large":
        monkeypatch.setattr(functional, "BLOCK", 7)
        monkeypatch.setattr(prior, "SMALL", 0)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x, whole=True):
        hidden = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.middle(hidden)) if whole else hidden)


def make(**options):
    torch.manual_seed(3)
    niw = NIW(Network(), lr=0.3, temperature=0.05, curvature="ggn", **options)
    niw.options.curvature.samples = None
    return niw, torch.randn(5, 4), torch.randint(3, (5,)), torch.randn(6, 4), torch.randint(3, (6,))


def adapt(learner, x, y, **keywords):
    learner.adapt(F.cross_entropy(learner(x, **keywords), y))


def of_a_clone(learner, x, y):
    return F.cross_entropy(learner.clone()(x), y)


def of_the_module(learner, x, y):
    return F.cross_entropy(learner.module(x), y)


def of_a_layer(learner, x, y):
    return F.cross_entropy(learner.last(torch.tanh(learner.middle(torch.tanh(learner.first(x))))), y)


def of_the_parameters(learner, x, y):
    return sum(p.square().sum() for p in learner.parameters())


def of_a_query(learner, x, y):
    return F.cross_entropy(learner(x), y)


def of_the_kl(learner, x, y):
    return learner.kl()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "early", [of_a_clone, of_the_module, of_a_layer, of_the_parameters, of_a_query, of_the_kl], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("unused", [False, True])
def test_later_steps_do_not_change_an_earlier_state_s_gradient(options, early, unused):
    found = []
    for more in (0, 2):
        niw, x, y, x_query, y_query = make(**options)
        learner = niw.clone(allow_unused=True)
        adapt(learner, x, y)
        loss = early(learner, x_query, y_query)
        for k in range(more):
            adapt(learner, x, y, whole=not unused or k > 0)
        loss.backward()
        found.append([torch.zeros_like(p) if p.grad is None else p.grad for p in niw.parameters()])
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*found))


@pytest.mark.parametrize(
    ("random", "second_order"), [("all", "all"), ("last_layer", "all"), ("last_layer", "last_layer")]
)
@pytest.mark.filterwarnings("error")
def test_the_wrapper_s_own_steps_have_a_clone_s_gradients(random, second_order):
    torch.manual_seed(3)
    options = {"random": random, "second_order": second_order, "temperature": 0.0, "learn_step_sizes": False}
    model, x, y = Network(), torch.randn(5, 4), torch.randint(3, (5,))
    found = []
    for own in (False, True):
        niw = NIW(copy.deepcopy(model), lr=0.3, **options)
        parameters = list(niw.module.parameters())
        learner = niw if own else niw.clone()
        for _ in range(3):
            adapt(learner, x, y)
        F.cross_entropy(learner(x.flip(0)), y).backward()
        found.append([p.grad for p in parameters])
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(*found))


def test_a_prior_s_mode_is_of_the_time_when_it_was_asked_for():
    niw, *_ = make()
    found = niw.prior()
    before = {name: t.clone() for name, t in found.mean.items()}
    with torch.no_grad():
        for p in niw.module.parameters():
            p.add_(1.0)
    assert all(torch.equal(found.mean[name], t) for name, t in before.items())
