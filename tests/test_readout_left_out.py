"""Where a readout's steps are of first order: as asked, with other models and with other losses."""

import pytest
import torch
import torch.nn.utils.prune
from readout_cases import LR, ByName, Softened, assert_close, first_order_one, network, run, task
from torch import nn
from torch.nn import functional as F

from l2l_niw import NIW
from l2l_niw.errors import LossError
from l2l_niw.readout import OUTPUTS


@pytest.fixture(autouse=True)
def in_double(double):
    pass


@pytest.mark.parametrize("asked", ["wrapper", "clone", "adapt"])
def test_first_order_leaves_it_out(asked):
    model, data = network(), task()

    def adapt(learner, x, y, i):
        learner.adapt(F.cross_entropy(learner(x), y), first_order=True)

    torch.manual_seed(3)
    if asked == "wrapper":
        found = run(NIW(model, LR, first_order=True), data)
    elif asked == "clone":
        found = run(NIW(model, LR), data, first_order=True)
    else:
        found = run(NIW(model, LR), data, adapt)
    assert_close(found, first_order_one(model, data))
    torch.manual_seed(3)
    assert max((a - b).abs().max() for a, b in zip(found, run(NIW(model, LR), data))) > 1e-4


class Tied(nn.Module):
    """Its last layer's weight is the first one's too."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Backwards(nn.Module):
    """The layer that was registered last comes first."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(6, 3), nn.Linear(6, 6)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def hooked():
    model = network()
    model[2].register_forward_hook(lambda module, args, output: 2 * output)
    return model


def hooked_before():
    model = network()
    model[2].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    return model


def reparametrised():
    """The last layer stays an nn.Linear, with another parameter than its weight."""
    model = network()
    torch.nn.utils.prune.l1_unstructured(model[2], "weight", 0.3)
    return model


def wide():
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, OUTPUTS + 1))


@pytest.mark.parametrize(
    "make",
    [
        Softened,
        Tied,
        Backwards,
        hooked,
        hooked_before,
        reparametrised,
        wide,
        ByName,
        lambda: nn.Sequential(network(), nn.BatchNorm1d(3)),
    ],
)
def test_other_models_have_no_readout(make):
    model, data = make(), task()
    torch.manual_seed(3)
    assert_close(run(NIW(model, LR), data), first_order_one(model, data), 1e-12)


def with_penalty(learner, x, y, i):
    learner.adapt(F.cross_entropy(learner(x), y) + 0.01 * sum(p.square().sum() for p in learner.parameters()))


def on_other_data(learner, x, y, i):
    learner.adapt(F.cross_entropy(learner(x + 0.1 * i), y))


def on_halves(learner, x, y, i):
    learner.adapt((F.cross_entropy(learner(x[:4]), y[:4]) + F.cross_entropy(learner(x[4:]), y[4:])) / 2)


def pooled(learner, x, y, i):
    learner.adapt(F.cross_entropy(learner(x.unflatten(0, (3, 3))).mean(1), y[:3]))


def centred(learner, x, y, i):
    outputs = learner(x)
    learner.adapt((outputs - outputs.mean(0)).square().mean())


def written_over(learner, x, y, i):
    outputs = learner(x)
    outputs *= 3.0
    learner.adapt(F.cross_entropy(outputs, y))


@pytest.mark.parametrize("adapt", [with_penalty, on_halves, pooled, centred, written_over])
def test_losses_of_something_else_than_the_outputs_are_of_first_order(adapt):
    model, data = network(), task()
    torch.manual_seed(3)
    assert_close(run(NIW(model, LR), data, adapt), first_order_one(model, data, adapt), 1e-12)


@pytest.mark.parametrize(
    "mixed", [on_other_data, lambda learner, *rest: (with_penalty if rest[-1] % 2 else on_other_data)(learner, *rest)]
)
def test_steps_of_both_kinds_can_follow_each_other(mixed):
    model, data = network(), task()
    torch.manual_seed(3)
    found = run(NIW(model, LR), data, mixed)
    assert max((a - b).abs().max() for a, b in zip(found, first_order_one(model, data, mixed))) > 1e-5


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 2 * g


def test_a_loss_without_second_derivatives_names_first_order():
    niw, (x, y, *_) = NIW(network(), LR), task()
    learner = niw.clone()
    with pytest.raises(LossError, match="first_order=True"):
        learner.adapt(F.cross_entropy(Once.apply(learner(x)).square(), y))
    learner = niw.clone(first_order=True)
    learner.adapt(F.cross_entropy(Once.apply(learner(x)).square(), y))


class ErrorScale(torch.autograd.Function):
    """Its name is not all there is to say of it."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


def test_a_loss_may_be_called_an_error():
    learner, (x, y, *_) = NIW(network(), LR).clone(), task()
    learner.adapt(F.cross_entropy(ErrorScale.apply(learner(x)), y))
    assert learner._readout.steps[0].hessian.abs().max() > 0


def test_a_loss_whose_graph_was_freed_is_told():
    learner, (x, y, *_) = NIW(network(), LR).clone(), task()
    loss = F.cross_entropy(learner(x), y)
    loss.backward()
    with pytest.raises(LossError, match="freed"):
        learner.adapt(loss)
