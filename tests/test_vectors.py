"""Large vectors in blocks and in memory that is used again: the same numbers, and no vector written over."""

import gc
import warnings

import pytest
import torch
from torch import nn

from l2l_niw import NIW, vectors
from l2l_niw.episodes import Episodes


@pytest.fixture
def small_blocks(monkeypatch):
    """Every vector of more than 32 weights is large."""
    monkeypatch.setattr(vectors, "LARGE", 32)
    monkeypatch.setattr(vectors, "BLOCK", 16)
    monkeypatch.setattr(vectors, "_memory", [])


def episode(options):
    """Everything that an episode gives, for one seed."""
    torch.manual_seed(1)
    niw = NIW(nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 4)), lr=0.1, temperature=0.01, **options)
    x, x_query, y = torch.randn(5, 3), torch.randn(6, 3), torch.tensor([0, 1, 2, 3, 0])
    learner = niw.clone()
    for _ in range(4):
        learner.adapt(nn.functional.cross_entropy(learner(x), y))
    outputs = learner(x_query)
    outputs.square().mean().backward()
    post = learner.posterior()
    kl = learner.kl()
    grads = torch.autograd.grad(kl + post._mean.square().sum() + post._variance.sum(), list(niw.parameters()))
    found = [outputs, kl, post._mean, post._variance, *grads, *(p.grad for p in niw.parameters())]
    return [t.detach().clone() for t in found]


@pytest.mark.parametrize(
    "options", [{}, {"curvature": "ggn"}, {"trace": "none", "precondition": False}, {"wishart": "full"}]
)
def test_blocks_make_no_difference(options, request):
    expected = episode(options)
    request.getfixturevalue("small_blocks")
    for _ in range(3):  # in fresh memory, and in memory used before
        for ours, whole in zip(episode(options), expected):
            assert torch.allclose(ours, whole, rtol=1e-5, atol=1e-7)
    assert vectors._memory


def test_random_numbers_are_the_same_in_blocks(small_blocks):
    noise = vectors.blockwise(torch.randn_like)
    torch.manual_seed(0)
    expected = torch.randn(100)
    torch.manual_seed(0)
    with torch.no_grad():
        assert torch.equal(noise(torch.empty(100)), expected)


def test_memory_is_used_again_once_nothing_refers_to_it(small_blocks):
    first = vectors.empty_vector(100, torch.float32)
    view, place = first[3:7], first.data_ptr()
    del first
    second = vectors.empty_vector(100, torch.float32)
    assert second.data_ptr() != place  # a view still refers to the first
    del view
    third = vectors.empty_vector(100, torch.float32)
    assert third.data_ptr() == place
    assert len(vectors._memory) == 2


def test_a_new_wrapper_gives_back_what_the_last_one_has_left(small_blocks):
    kept = vectors.empty_vector(100, torch.float32).fill_(1.0)
    niw = NIW(nn.Linear(10, 10), lr=0.1)
    learner, x = niw.clone(), torch.randn(4, 10)
    learner.adapt(learner(x).square().mean())
    assert len(vectors._memory) > 1
    del learner, niw
    gc.collect()
    NIW(nn.Linear(2, 2), lr=0.1)
    assert len(vectors._memory) == 1
    assert (kept == 1.0).all()


@pytest.mark.parametrize("auto_kl", [True, False])
def test_episodes_run_side_by_side_whatever_their_size(small_blocks, auto_kl):
    niw = NIW(nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 4)), lr=0.1, auto_kl=auto_kl)
    x, y = torch.randn(3, 5, 3), torch.randn(3, 5, 4)
    episodes = Episodes(niw, lambda network, x, y: nn.functional.mse_loss(network(x), y), steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        episodes((x, y), (x, y)).backward()
        assert episodes.posterior((x, y)).predict(x, samples=2).shape == (2, 3, 5, 4)


def test_a_graph_of_all_steps_takes_no_blocks(request):
    def gradient():
        torch.manual_seed(0)
        niw = NIW(nn.Linear(20, 3), lr=0.1, trace="full", temperature=0.0, precondition=False)
        learner, x = niw.clone(), torch.randn(4, 20)
        for _ in range(2):
            learner.adapt(learner(x).square().mean())
        learner(torch.randn(5, 20)).square().mean().backward()
        return niw.module.weight.grad

    expected = gradient()
    request.getfixturevalue("small_blocks")
    assert torch.allclose(gradient(), expected)


def test_a_graph_keeps_its_saved_memory(small_blocks):
    saved = vectors.empty_vector(100, torch.float32).fill_(3.0).requires_grad_()
    value = saved.square().sum()
    place = saved.data_ptr()
    del saved
    assert vectors.empty_vector(100, torch.float32).data_ptr() != place
    value.backward()
