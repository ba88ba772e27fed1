"""Adapters: the same network at the start, then W + B A, and tasks that differ by them alone."""

import pytest
import torch
from torch import nn

from l2l_niw import NIW
from l2l_niw.errors import ArgumentError, ModelError
from l2l_niw.models import add_adapters

pytest.importorskip("peft")


def network():
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))


def test_a_network_with_adapters_computes_what_it_did_and_then_w_plus_b_a():
    plain, x = network(), torch.randn(7, 5)
    expected, weights = plain(x).detach(), plain[3].weight.detach().clone()
    own = add_adapters(plain, rank=2)
    assert own is plain
    assert torch.equal(own(x), expected)
    parts = dict(own.named_parameters())
    a, b = parts["3.lora_A.default.weight"], parts["3.lora_B.default.weight"]
    assert a.shape == (2, 4)
    assert b.shape == (3, 2)
    assert not b.any()
    nn.init.normal_(b)
    hidden = own[:3](x)
    torch.testing.assert_close(own(x), nn.functional.linear(hidden, weights + b @ a, parts["3.base_layer.bias"]))


@pytest.mark.parametrize("freeze", [True, False])
def test_own_weights_are_frozen_or_as_they_were(freeze):
    plain = network()
    plain[0].bias.requires_grad_(False)
    learned = {name for name, p in add_adapters(plain, freeze=freeze).named_parameters() if p.requires_grad}
    adapters = {f"{i}.lora_{part}.default.weight" for i in (0, 3) for part in "AB"}
    others = {"0.base_layer.weight", "1.weight", "1.bias", "3.base_layer.weight", "3.base_layer.bias"}
    assert learned == adapters | (set() if freeze else others)


def test_modes_stay_as_they_were():
    for mode in (True, False):
        assert {part.training for part in add_adapters(network().train(mode)).modules()} == {mode}


def test_tasks_differ_by_adapters_alone():
    niw = NIW(add_adapters(network(), rank=2), lr=0.1, random="*lora_*", second_order="none")
    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    learner = niw.clone()
    for _ in range(2):
        learner.adapt(nn.functional.cross_entropy(learner(x), y))
    nn.functional.cross_entropy(learner(x), y).backward()
    post = learner.posterior()
    assert all("lora_" in name for name in post.mean)
    assert sum(t.numel() for t in post.mean.values()) == 2 * (5 + 4) + 2 * (4 + 3)
    assert post.predict(x, samples=3).shape == (3, 6, 3)
    graded = {name for name, p in niw.module.named_parameters() if p.grad is not None}
    assert graded == set(post.mean)


def test_what_has_no_linear_layers_or_adapters_already_is_named():
    with pytest.raises(ModelError, match="Conv2d has no linear layer inside it"):
        add_adapters(nn.Conv2d(3, 4, 3))
    with pytest.raises(ModelError, match="has adapters already"):
        add_adapters(add_adapters(network()))
    with pytest.raises(ArgumentError, match="rank must be"):
        add_adapters(network(), rank=0)
