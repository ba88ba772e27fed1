"""Small networks, tasks and episodes for the tests of a readout's steps."""

import torch
from torch import nn
from torch.nn import functional as F

from l2l_niw import NIW

STEPS, LR = 5, 0.4


def network(bias=True):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3, bias=bias))


def task():
    return torch.randn(9, 6), torch.arange(9) % 3, torch.randn(15, 6), torch.arange(15) % 3


def run(wrapper, data, adapt=None, steps=STEPS, **clone):
    """The gradients of a wrapper's module, and of its V_0 and n_0 if it has one, after an episode."""
    x, y, x_query, y_query = data
    wrapper.zero_grad()
    learner = wrapper.clone(**clone)
    for i in range(steps):
        if adapt is None:
            learner.adapt(F.cross_entropy(learner(x), y))
        else:
            adapt(learner, x, y, i)
    F.cross_entropy(learner(x_query), y_query).backward()
    return gradients(wrapper)


def gradients(wrapper):
    rest = [*wrapper.log_variance, wrapper.raw_n0] if isinstance(wrapper, NIW) else []
    return [p.grad.clone() for p in (*wrapper.module.parameters(), *rest)]


def assert_close(found, expected, tolerance=1e-10):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert (a - b).abs().max() < tolerance


def first_order_one(model, data, adapt=None):
    torch.manual_seed(3)
    return run(NIW(model, LR, trace="first"), data, adapt)


class Softened(nn.Module):
    """A model whose outputs are not its last layer's."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, x):
        return self.layers(x).log_softmax(-1)


class ByName(nn.Module):
    """Its last layer is called with a keyword."""

    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(input=torch.tanh(self.body(x)))
