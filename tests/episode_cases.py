"""What the tests of batched episodes share: a task, the loop, and the same thing side by side."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from l2l_niw.episodes import Episodes

STEPS, EPISODES = 4, 3


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
