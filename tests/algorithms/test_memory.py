"""Of an adapt the graph of the last layer survives and no more, and no tensor survives an episode."""

import gc
import weakref

import pytest
import torch
from torch import nn

from l2l_niw import NIW
from l2l_niw.inference import prior
from l2l_niw.utils import _functional as functional


def live_tensors():
    """Distinct tensors that Python holds."""
    gc.collect()
    return sum(issubclass(type(t), torch.Tensor) for t in gc.get_objects())


def net_bytes(work):
    """Bytes that stay allocated after `work`, those that only autograd holds included, and its result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = work()
    return sum(event.self_device_memory_usage + event.self_cpu_memory_usage for event in profile.key_averages()), result


def graph_nodes(tensor):
    """The number of autograd nodes reachable from a tensor."""
    seen, stack = set(), [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [parent for parent, _ in node.next_functions]
    return len(seen)


def make(curvature="sgld", width=64, **options):
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 3))
    return NIW(model, lr=0.1, curvature=curvature, **options), torch.randn(5, 8), torch.randint(3, (5,))


def adapted(niw, x, y, steps):
    learner = niw.clone()
    for _ in range(steps):
        learner.adapt(nn.functional.cross_entropy(learner(x), y))
    return learner


def growth(niw, x, y):
    """Bytes that an episode of 4 steps leaves, those that each further step does, and the learners."""
    first = adapted(niw, x, y, 4)  # the wrapper keeps its newest episode: held here too, none is freed while we count
    few, learner_few = net_bytes(lambda: adapted(niw, x, y, 4))
    many, learner_many = net_bytes(lambda: adapted(niw, x, y, 24))
    del first
    return few, (many - few) / 20, learner_few, learner_many


INFERENCE = ["langevin", "closed_form"]


@pytest.mark.parametrize("inference", INFERENCE)
@pytest.mark.parametrize("average_iterates", [False, True])
@pytest.mark.parametrize("curvature", ["sgld", "ggn"])
@pytest.mark.parametrize("first_order", [{"first_order": True}, {"second_order": "none"}])
def test_without_second_order_memory_and_graph_do_not_grow_with_the_number_of_steps(
    curvature, first_order, average_iterates, inference
):
    niw, x, y = make(curvature, inference=inference, average_iterates=average_iterates, **first_order)
    few, per_step, learner_few, learner_many = growth(niw, x, y)
    assert few > 0 == per_step
    learners = learner_few, learner_many, adapted(niw, x, y, 1)
    assert len({graph_nodes(learner(x)) for learner in learners}) == 1
    assert len({graph_nodes(learner.query(x)) for learner in learners}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("inference", INFERENCE)
@pytest.mark.parametrize("curvature", ["sgld", "ggn"])
def test_the_last_layers_graph_is_all_that_grows(curvature, inference):
    """Whatever the body's width: the layer's weights, and of each example features and outputs, a few times."""
    found = [growth(*make(curvature, width, inference=inference))[1] for width in (64, 512)]
    assert found[0] == found[1]
    assert 0 < found[0] < 4 * 4 * (3 * 17 + 5 * (16 + 3))


@pytest.mark.parametrize("inference", INFERENCE)
@pytest.mark.parametrize("curvature", ["sgld", "ggn"])
@pytest.mark.parametrize("training", [True, False])
def test_episodes_leave_no_tensors_behind(curvature, training, inference):
    niw, x, y = make(curvature, inference=inference)
    loss = nn.CrossEntropyLoss()

    def episode():
        learner = adapted(niw, x, y, 4)
        if training:
            loss(learner.query(x), y).backward()
        else:
            with torch.no_grad():
                learner.posterior().predict(x, samples=2)
            learner.posterior(lambda network: loss(network(x), y), steps=2)

    for _ in range(3):
        episode()
    before = live_tensors()
    for _ in range(50):
        episode()
    assert live_tensors() == before


def test_a_dropped_wrapper_leaves_no_tensors_behind():
    def use():
        niw, x, y = make()
        nn.functional.cross_entropy(adapted(niw, x, y, 3)(x), y).backward()

    use()
    before = live_tensors()
    use()
    assert live_tensors() == before


@pytest.mark.parametrize("second_order", ["none", "last_layer", "all"])
@pytest.mark.parametrize("inference", INFERENCE)
def test_a_dropped_learner_is_freed_at_once(second_order, inference):
    niw, x, y = make(second_order=second_order, inference=inference)
    gc.disable()
    try:
        learner = adapted(niw, x, y, 3)
        nn.functional.cross_entropy(learner.query(x), y).backward()
        held = [weakref.ref(t) for t in (learner, learner.module, learner.module[0].weight)]
        del learner
        assert [ref() for ref in held] == [None] * 3
    finally:
        gc.enable()


@pytest.fixture(params=["noise-free", "noisy"])
def large(request, monkeypatch):
    """Networks of any size are worked on as large ones are: in blocks, in place, without a copy of L_0."""
    streams = torch.randn(100_000)
    place = [0]

    def draw(tensor):
        place[0] += tensor.numel()
        return streams[place[0] - tensor.numel() : place[0]].view(tensor.shape).clone()

    monkeypatch.setattr("l2l_niw.inference.chain.noise_like", draw)

    def switch():
        monkeypatch.setattr(functional, "BLOCK", 7)
        monkeypatch.setattr(prior, "SMALL", 0)
        place[0] = 0

    return {} if request.param == "noisy" else {"curvature": "ggn"}, switch


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("second_order", ["none", "last_layer", "all"])
@pytest.mark.parametrize("looks", [False, True])
def test_large_networks_have_the_gradients_of_small_ones(double, large, first_order, second_order, looks):
    options, switch = large
    niw, x, y = make(width=12, temperature=0.05, first_order=first_order, second_order=second_order, **options)
    loss, found = nn.functional.cross_entropy, []
    for _ in range(2):
        torch.manual_seed(1)
        learner, aside = niw.clone(), 0.0
        for t in range(3):
            support = loss(learner(x), y)
            learner.adapt(support)
            if looks and t == 1:  # what was asked of an earlier state is that state's
                aside = learner.kl() + loss(learner(x.flip(0)), y)
        niw.zero_grad()
        (loss(learner(x[:2]), y[:2]) + aside).backward()
        found.append([p.grad.clone() for p in niw.parameters()])
        switch()
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(*found))
