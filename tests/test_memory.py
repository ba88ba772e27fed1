"""No graph survives `adapt`, but that of the first step's features, and no tensor survives an episode."""

import gc
import weakref

import pytest
import torch
from torch import nn

from l2l_niw import NIW


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


def make(curvature, **options):
    niw = NIW(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3)), lr=0.1, curvature=curvature, **options)
    return niw, torch.randn(5, 8), torch.randint(3, (5,))


@pytest.mark.parametrize("curvature", ["sgld", "ggn"])
@pytest.mark.parametrize("first_order", [True, False])
def test_memory_and_graph_do_not_grow_with_the_number_of_steps(curvature, first_order):
    """But for a readout's own small part: its weights, and of each datum features, gradient and Hessian."""
    niw, x, y = make(curvature, first_order=first_order)
    loss = nn.CrossEntropyLoss()

    def adapted(steps):
        learner = niw.clone()
        for _ in range(steps):
            learner.adapt(loss(learner(x), y))
        return learner

    first = adapted(4)  # the wrapper keeps its newest episode: held here too, none is freed while we count
    few, learner_few = net_bytes(lambda: adapted(4))
    many, learner_many = net_bytes(lambda: adapted(50))
    numbers = 0 if first_order else 3 * 65 + 5 * (65 + 3 + 3 * 3)
    assert 0 < few == many - 46 * numbers * x.element_size()
    del first
    assert graph_nodes(learner_few(x)) == graph_nodes(learner_many(x)) == graph_nodes(adapted(1)(x))


@pytest.mark.parametrize("curvature", ["sgld", "ggn"])
@pytest.mark.parametrize("training", [True, False])
def test_episodes_leave_no_tensors_behind(curvature, training):
    niw, x, y = make(curvature)
    loss = nn.CrossEntropyLoss()

    def episode():
        learner = niw.clone()
        for _ in range(4):
            learner.adapt(loss(learner(x), y))
        if training:
            loss(learner(x), y).backward()
        else:
            with torch.no_grad():
                learner.posterior().predict(x, samples=2)
            learner.posterior(lambda network: loss(network(x), y), steps=2)

    for _ in range(3):
        episode()
    before = live_tensors()
    for _ in range(200):
        episode()
    assert live_tensors() == before


def test_a_dropped_learner_is_freed_at_once():
    niw, x, y = make("sgld")
    loss = nn.CrossEntropyLoss()
    gc.disable()
    try:
        learner = niw.clone()
        for _ in range(3):
            learner.adapt(loss(learner(x), y))
        loss(learner(x), y).backward()
        held = [weakref.ref(t) for t in (learner, learner.module, learner.module[0].weight)]
        del learner
        assert [ref() for ref in held] == [None] * 3
    finally:
        gc.enable()
