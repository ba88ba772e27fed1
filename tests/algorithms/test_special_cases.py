import copy

import learn2learn as l2l
import pytest
import torch
from torch import nn

from l2l_niw import NIW, EpisodicModel
from l2l_niw.algorithms.special_cases import maml, reptile, reptile_objective
from l2l_niw.heads import NearestCentroid


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def network():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Softplus(), nn.Linear(12, 3))


def task():
    return torch.randn(9, 6), torch.arange(9) % 3, torch.randn(15, 6), torch.arange(15) % 3


def meta_gradient(wrapper, data, steps):
    x, y, x_query, y_query = data
    loss = nn.CrossEntropyLoss()
    learner = wrapper.clone()
    for _ in range(steps):
        learner.adapt(loss(learner(x), y))
    value = loss(learner(x_query), y_query)
    value.backward()
    return value.item(), [p.grad.clone() for p in wrapper.module.parameters()]


@pytest.mark.parametrize("first_order", [True, False])
@pytest.mark.parametrize("steps", [1, 5])
def test_mamls_meta_gradient_is_learn2learns(first_order, steps):
    model, data = network(), task()
    reference = l2l.algorithms.MAML(copy.deepcopy(model), lr=0.4, first_order=first_order)
    value, expected = meta_gradient(reference, data, steps)
    got, gradients = meta_gradient(maml(model, lr=0.4, first_order=first_order), data, steps)
    assert got == pytest.approx(value, abs=1e-12)
    for g, e in zip(gradients, expected):
        assert (g - e).abs().max() < 1e-10


INFERENCE = ["langevin", "closed_form"]


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("inference", INFERENCE)
@pytest.mark.parametrize("first_order", [{"first_order": True}, {"second_order": "none"}])
def test_at_temperature_zero_niw_of_first_order_is_first_order_maml(first_order, inference, steps):
    model, data = network(), task()
    _, expected = meta_gradient(l2l.algorithms.MAML(copy.deepcopy(model), lr=0.4, first_order=True), data, steps)
    niw = NIW(model, lr=0.4, temperature=0.0, learn_step_sizes=False, inference=inference, **first_order)
    _, gradients = meta_gradient(niw, data, steps)
    for g, e in zip(gradients, expected):
        assert (g - e).abs().max() < 1e-10


@pytest.mark.parametrize("inference", INFERENCE)
def test_at_temperature_zero_niw_is_maml_with_the_graph_of_all_steps_and_neither_by_default(inference):
    model, data = network(), task()
    exact, first = (
        meta_gradient(l2l.algorithms.MAML(copy.deepcopy(model), lr=0.4, first_order=order), data, 5)[1]
        for order in (False, True)
    )

    def distance(expected, **options):
        _, found = meta_gradient(NIW(copy.deepcopy(model), lr=0.4, temperature=0.0, **options), data, 5)
        return max((a - b).abs().max().item() for a, b in zip(found, expected))

    constant = {"learn_step_sizes": False, "inference": inference}
    assert distance(exact, second_order="all", **constant) < 1e-10
    assert min(distance(exact, **constant), distance(first, **constant)) > 1e-4  # second_order='last_layer'


@pytest.mark.parametrize("inference", INFERENCE)
def test_at_temperature_zero_step_sizes_are_learned_as_metasgds(inference):
    """With learn_step_sizes, log V_0 gets the gradient of the log of learn2learn's learning rates."""
    model, data = network(), task()
    meta_sgd = l2l.algorithms.MetaSGD(copy.deepcopy(model), lr=0.4)
    value, expected = meta_gradient(meta_sgd, data, 3)
    niw = NIW(model, lr=0.4, temperature=0.0, second_order="all", inference=inference)
    got, gradients = meta_gradient(niw, data, 3)
    assert got == pytest.approx(value, abs=1e-12)
    for g, e in zip(gradients, expected):
        assert (g - e).abs().max() < 1e-10
    for log_variance, rate in zip(niw.hyper.log_variance, meta_sgd.lrs):
        assert (log_variance.grad - 0.4 * rate.grad).abs().max() < 1e-10


def test_first_and_second_order_maml_differ():
    model, data = network(), task()
    _, first = meta_gradient(maml(copy.deepcopy(model), lr=0.4, first_order=True), data, 5)
    _, second = meta_gradient(maml(copy.deepcopy(model), lr=0.4, first_order=False), data, 5)
    assert max((a - b).abs().max() for a, b in zip(first, second)) > 1e-4


def test_protonets_gradient_is_that_of_learn2learns_classifier():
    model, (x, y, x_query, y_query) = network(), task()
    shuffle = torch.randperm(9)
    x, y = x[shuffle], y[shuffle]
    loss = nn.CrossEntropyLoss()
    loss(l2l.nn.PrototypicalClassifier(model(x), y)(model(x_query)), y_query).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    learner = NIW(EpisodicModel(model, NearestCentroid()), lr=0.1).clone()
    learner(x, y, x_query).nll(y_query).backward()
    for p, e in zip(model.parameters(), expected):
        assert (p.grad - e).abs().max() < 1e-10


@pytest.mark.parametrize("steps", [1, 5])
def test_reptiles_outer_update_is_reptiles(steps):
    model, (x, y, _, _) = network(), task()
    loss, epsilon = nn.CrossEntropyLoss(), 0.3
    twin = copy.deepcopy(model)
    inner = torch.optim.SGD(twin.parameters(), lr=0.4)
    for _ in range(steps):
        inner.zero_grad()
        loss(twin(x), y).backward()
        inner.step()
    expected = [p + epsilon * (t - p) for p, t in zip(model.parameters(), twin.parameters())]

    wrapper = reptile(model, lr=0.4)
    outer = torch.optim.SGD(wrapper.module.parameters(), lr=epsilon)
    learner = wrapper.clone()
    for _ in range(steps):
        learner.adapt(loss(learner(x), y))
    reptile_objective(learner).backward()
    outer.step()
    for p, e in zip(model.parameters(), expected):
        assert (p - e).abs().max() < 1e-12
