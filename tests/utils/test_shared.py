"""What sampled networks have in common is computed once, and is what each would have computed."""

import pytest
import torch
from torch import nn

from l2l_niw import NIW
from l2l_niw.utils._shared import Once, shared_modules

CALLS = []


class Counted(nn.Linear):
    """A linear layer that notes its calls."""

    def forward(self, x):
        CALLS.append(tuple(x.shape))
        return super().forward(x)


class WritesToFeatures(nn.Sequential):
    """A residual sum that is written into the shared layer's output."""

    def forward(self, x):
        features = self[0](x)
        features += self[1](x)
        return features


def posterior(kind=nn.Sequential, random="1.*", training=False):
    model = kind(Counted(3, 4), nn.Linear(3 if kind is WritesToFeatures else 4, 4))
    niw = NIW(model.train(training), lr=0.1, random=random, prior_precision=1.0)
    x = torch.randn(5, 3)
    learner = niw.clone()
    learner.adapt(learner(x).square().mean())
    return learner.posterior()


def predicted(post, x, monkeypatch=None, **options):
    torch.manual_seed(1)
    CALLS.clear()
    return post.predict(x, samples=4, vectorize=False, **options)


@pytest.mark.parametrize("kind", [nn.Sequential, WritesToFeatures])
def test_predictions_are_those_of_networks_that_compute_everything(kind, monkeypatch):
    post, x = posterior(kind), torch.randn(6, 3)
    found, calls = predicted(post, x), len(CALLS)
    monkeypatch.setattr("l2l_niw.inference.gaussian.compute_once", lambda *_: None)
    assert torch.equal(found, predicted(post, x))
    assert len(CALLS) == 4
    assert calls == (1 if kind is nn.Sequential else 4)  # what has been written to is computed anew
    assert len({tuple(own.flatten().tolist()) for own in found}) == 4


@pytest.mark.parametrize(("random", "training"), [("1.*", True), ("all", False)])
def test_layers_in_training_mode_or_with_random_weights_are_computed_by_every_network(random, training):
    post = posterior(random=random, training=training)
    predicted(post, torch.randn(6, 3))
    assert len(CALLS) == 4


def test_another_call_computes_anew():
    post = posterior()
    one, other = (predicted(post, torch.randn(6, 3)) for _ in range(2))
    assert len(CALLS) == 1
    assert not torch.equal(one, other)


def test_gradients_reach_the_inputs_of_what_is_computed_once():
    post, x = posterior(), torch.randn(6, 3, requires_grad=True)
    found = predicted(post, x)
    gradient = torch.autograd.grad(found.sum(), x)[0]
    torch.manual_seed(1)
    drawn = [post.rsample()["1.weight"] for _ in range(4)]
    expected = sum(w.sum(0) for w in drawn) @ post._module[0].weight
    torch.testing.assert_close(gradient, expected.expand(6, 3))


def test_the_largest_shared_modules_are_found():
    model = nn.ModuleDict(
        {"a": nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "b": nn.Sequential(nn.Linear(2, 2), nn.Tanh())}
    )
    assert [name for name, _ in shared_modules(model.eval(), ["b.0.weight"])] == ["a", "b.1"]
    model["a"][1].train()
    assert [name for name, _ in shared_modules(model, ["b.0.weight"])] == ["a.0", "b.1"]


def test_inputs_that_were_written_to_are_other_inputs():
    calls, x = [], torch.zeros(2)
    once = Once(lambda t: calls.append(0) or t + 1, [])
    assert once(x) is once(x)
    x.add_(1)
    assert once(x).tolist() == [2.0, 2.0]
    assert len(calls) == 2
    assert once(x.clone()) is not once(x)
    with torch.inference_mode():
        assert once(x) is not once(x)
