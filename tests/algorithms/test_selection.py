"""Weights that are random, and those that all tasks share."""

import copy

import learn2learn as l2l
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from l2l_niw import NIW, BatchedEpisodes
from l2l_niw.algorithms.selection import select
from l2l_niw.errors import ArgumentError

LR = 0.3
EXACT = {"temperature": 0.0, "learn_step_sizes": False}


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def task():
    return torch.randn(5, 4), torch.randint(3, (5,)), torch.randn(7, 4), torch.randint(3, (7,))


def episode(niw, steps=3, data=None):
    x, y, x_query, y_query = data or task()
    learner = niw.clone()
    for _ in range(steps):
        learner.adapt(F.cross_entropy(learner(x), y))
    niw.zero_grad()
    F.cross_entropy(learner(x_query), y_query).backward()
    return learner


@pytest.mark.parametrize(
    ("random", "expected"),
    [
        ("all", {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias", "5.weight", "5.bias"}),
        ("last_layer", {"5.weight", "5.bias"}),
        ("norm", {"1.weight", "1.bias"}),
        ("3.weight", {"3.weight"}),
        ("*.bias", {"0.bias", "1.bias", "3.bias", "5.bias"}),
        (["norm", "last_layer"], {"1.weight", "1.bias", "5.weight", "5.bias"}),
        (lambda name, p: p.dim() == 2 and name > "1", {"3.weight", "5.weight"}),
    ],
)
def test_weights_are_chosen_by_name_pattern_preset_or_function(random, expected):
    model = network()
    chosen = select(model, random)
    assert {name for (name, _), own in zip(model.named_parameters(), chosen) if own} == expected


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.GroupNorm, nn.InstanceNorm2d])
def test_every_normalisation_layer_is_a_norm(kind):
    norm = kind(2, 4) if kind is nn.GroupNorm else kind(4, affine=True)
    assert select(nn.Sequential(nn.Conv2d(3, 4, 1), norm), "norm") == [False, False, True, True]


@pytest.mark.parametrize(
    ("random", "message"),
    [
        ("layer4.*", "'layer4.*' means no parameter"),
        (["last_layer", "nothing"], "'nothing' means no parameter"),
        ([], "random must be a name"),
        (3, "random must be a name"),
        ([3], "random must be a name"),
        (lambda name, p: False, "the function chose no parameter"),
    ],
)
def test_a_choice_of_nothing_is_named(random, message):
    with pytest.raises(ArgumentError, match=message.replace("*", r"\*")):
        NIW(network(), lr=LR, random=random)


def test_a_choice_of_frozen_weights_is_named():
    model = network()
    model[5].requires_grad_(False)
    with pytest.raises(ArgumentError, match="frozen"):
        NIW(model, lr=LR, random="last_layer")


@pytest.mark.parametrize("second_order", ["last_layer", "all"])
@pytest.mark.parametrize("steps", [1, 4])
def test_with_a_random_last_layer_it_is_anil(second_order, steps):
    """learn2learn's: features of a body that all tasks share, and MAML on the last layer."""
    model, data = network(), task()
    niw = NIW(copy.deepcopy(model), lr=LR, random="last_layer", second_order=second_order, **EXACT)
    episode(niw, steps, data)
    body, head = model[:5], l2l.algorithms.MAML(model[5], lr=LR)
    x, y, x_query, y_query = data
    features, learner = body(x), head.clone()
    for _ in range(steps):
        learner.adapt(F.cross_entropy(learner(features), y))
    F.cross_entropy(learner(body(x_query)), y_query).backward()
    for p, expected in zip(niw.module.parameters(), model.parameters()):
        assert torch.allclose(p.grad, expected.grad, atol=1e-10)


@pytest.mark.parametrize("random", ["norm", ["3.*", "last_layer"], "0.weight"])
def test_second_derivatives_are_autograds(random):
    model, data = network(), task()
    niw = NIW(copy.deepcopy(model), lr=LR, random=random, second_order="all", **EXACT)
    episode(niw, 3, data)
    x, y, x_query, y_query = data
    chosen = {name for (name, _), own in zip(model.named_parameters(), select(model, random)) if own}
    weights = dict(model.named_parameters())
    for _ in range(3):
        loss = F.cross_entropy(torch.func.functional_call(model, weights, x), y)
        names = sorted(chosen)
        found = torch.autograd.grad(loss, [weights[name] for name in names], create_graph=True)
        weights = {**weights, **{name: weights[name] - LR * g for name, g in zip(names, found)}}
    F.cross_entropy(torch.func.functional_call(model, weights, x_query), y_query).backward()
    for p, expected in zip(niw.module.parameters(), model.parameters()):
        assert torch.allclose(p.grad, expected.grad, atol=1e-10)


def test_a_random_body_with_a_shared_last_layer_keeps_no_graph_and_says_so():
    niw = NIW(network(), lr=LR, random="norm", **EXACT)
    with pytest.warns(UserWarning, match="ends in a linear layer that is adapted"):
        episode(niw)
    assert niw.diagnostics()["second_order"] == "none"


@pytest.mark.parametrize("random", ["last_layer", ["norm", "last_layer"]])
def test_shared_weights_are_the_models_and_cost_no_variance(random):
    niw = NIW(network(), lr=LR, random=random, wishart="full", temperature=0.01)
    learner = episode(niw)
    chosen = select(niw.module, random)
    for p, own, mine in zip(niw.module.parameters(), chosen, learner.parameters()):
        assert (mine is p) == (not own)
    d = sum(p.numel() for p, own in zip(niw.module.parameters(), chosen) if own)
    assert niw._prior().n0.item() == pytest.approx(d + 1)
    assert sum(v.numel() for v in niw.hyper.log_variance) == d
    assert all(p.grad is not None for p in niw.parameters()), "loops divide every gradient by the number of tasks"
    post = learner.posterior()
    assert set(post.mean) == {name for (name, _), own in zip(niw.module.named_parameters(), chosen) if own}
    assert post.predict(torch.randn(2, 4), samples=3).shape == (3, 2, 3)
    assert set(niw.diagnostics()["layers"]) == set(post.mean)


def test_a_frozen_shared_weight_needs_no_permission():
    model = network()
    model[0].requires_grad_(False)
    niw = NIW(model, lr=LR, random="last_layer")
    episode(niw)
    assert model[0].weight.grad is None
    assert model[3].weight.grad is not None


def test_states_are_of_their_choice():
    niw = NIW(network(), lr=LR, random="last_layer")
    other = NIW(network(), lr=LR, random="last_layer")
    other.load_state_dict(niw.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(niw.parameters(), other.parameters()))
    with pytest.raises(Exception, match="is not a state dict of this NIW"):
        NIW(network(), lr=LR).load_state_dict(niw.state_dict())


@pytest.mark.parametrize("random", ["last_layer", ["norm", "last_layer"], "3.*"])
@pytest.mark.parametrize("second_order", ["none", "last_layer", "all"])
@pytest.mark.filterwarnings("ignore:NIW. second_order")
def test_a_batch_has_the_loop_s_gradients(random, second_order):
    niw = NIW(network(), lr=LR, random=random, second_order=second_order, temperature=0.01, curvature="ggn")
    niw.options.curvature.samples = None
    tasks = [task() for _ in range(3)]
    found = []
    for batched in (False, True):
        niw.zero_grad()
        if batched:
            episodes = BatchedEpisodes(niw, lambda net, x, y: F.cross_entropy(net(x), y), steps=3)
            x, y, x_query, y_query = (torch.stack(column) for column in zip(*tasks))
            episodes((x, y), (x_query, y_query)).backward()
            found.append([p.grad for p in niw.parameters()])
        else:
            total = []
            for data in tasks:
                episode(niw, 3, data)
                total.append([p.grad.clone() for p in niw.parameters()])
            found.append([sum(own) / 3 for own in zip(*total)])
    for a, b in zip(*found):
        assert torch.allclose(a, b, atol=1e-9)
