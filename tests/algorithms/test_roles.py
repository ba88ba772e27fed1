"""How a learner tells support from query and counts examples, whatever the loop does between steps."""

import collections
import copy
import dataclasses
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from l2l_niw import NIW
from l2l_niw.errors import ArgumentError, LossError
from l2l_niw.inference.curvature import GGN


@pytest.fixture(autouse=True)
def in_double(double):
    pass


class Net(nn.Module):
    """Takes its inputs by position, by name, or packed in whatever `unpack` knows of."""

    def __init__(self, unpack=lambda x: x):
        super().__init__()
        self.body, self.head, self.unpack = nn.Linear(3, 5), nn.Linear(5, 2), unpack

    def forward(self, x=None, batch=None):
        return self.head(torch.tanh(self.body(batch["x"] if x is None else self.unpack(x))))


def loss(outputs):
    return (outputs - 1.0).square().mean()


def adapted(call=lambda learner, x: learner(x), steps=3, model=None, **options):
    options = {"temperature": 0.01, "prior_precision": 1e3, "inference": "closed_form", **options}
    niw = NIW(model or Net(), lr=0.3, **options)
    learner, x, x_query = niw.clone(), torch.randn(4, 3), torch.randn(7, 3)
    for _ in range(steps):
        learner.adapt(loss(call(learner, x)))
    return niw, learner, x, x_query


def at_chain(learner, x):
    """The outputs of the chain's state."""
    state = {name: p.detach() for name, p in learner.module.named_parameters()}
    plain = Net()
    return torch.func.functional_call(plain, state, (x,))


def runs_at_chain(learner, outputs, x):
    return torch.allclose(outputs, at_chain(learner, x))


CALLS = {
    "position": lambda learner, x: learner(x),
    "keyword": lambda learner, x: learner(x=x),
    "dict": lambda learner, x: learner(batch={"x": x}),
    "copy": lambda learner, x: learner(x.clone()),
    "alias": lambda learner, x: learner(x.view(-1).view(-1, 3)),
}


@pytest.mark.parametrize("call", list(CALLS.values()), ids=list(CALLS))
def test_support_runs_at_the_chain_and_query_at_a_draw(call):
    _, learner, x, x_query = adapted(call)
    assert runs_at_chain(learner, call(learner, x), x)
    assert not runs_at_chain(learner, call(learner, x_query), x_query)
    assert runs_at_chain(learner, learner.module(x_query), x_query)
    assert runs_at_chain(learner, call(learner, x), x)


@pytest.mark.parametrize("call", list(CALLS.values()), ids=list(CALLS))
def test_with_the_prior_in_the_chain_no_role_is_told_apart(call):
    _, learner, x, x_query = adapted(call, inference="langevin")
    for inputs in (x, x_query):
        assert runs_at_chain(learner, call(learner, inputs), inputs)
        assert runs_at_chain(learner, learner.query(inputs), inputs)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    name: str = "batch"


class Loader:
    """A batch object of a library that nobody knows."""

    def __init__(self, x):
        self.x = x


def nested_tensor(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
        return torch.nested.nested_tensor([row[None] for row in x], dtype=x.dtype)


PACKED = {
    "numpy": (lambda x: x.numpy().copy(), torch.tensor),
    "dataclass": (Batch, lambda batch: batch.x),
    "UserDict": (lambda x: collections.UserDict(x=x), lambda batch: batch["x"]),
    "object": (Loader, lambda batch: batch.x),
    "list": (lambda x: [list(row) for row in x], lambda rows: torch.stack([torch.stack(r) for r in rows])),
    "numbers": (lambda x: x.tolist(), torch.tensor),
    "sparse": (lambda x: x.to_sparse(), lambda x: x.to_dense()),
    "sparse rows": (lambda x: x.to_sparse_csr(), lambda x: x.to_dense()),
    "nested": (nested_tensor, lambda x: x.to_padded_tensor(0.0)[:, 0]),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", PACKED)
def test_inputs_of_any_kind_have_their_role(kind):
    pack, unpack = PACKED[kind]
    _, learner, x, x_query = adapted(lambda learner, x: learner(pack(x)), model=Net(unpack))
    assert runs_at_chain(learner, learner(pack(x)), x)
    assert not runs_at_chain(learner, learner(pack(x_query)), x_query)
    assert not runs_at_chain(learner, learner(pack(x_query[:4])), x_query[:4])
    assert runs_at_chain(learner, learner(pack(x)), x)


WRITES = {
    "copy_": lambda x, new: x.copy_(new),
    "data.copy_": lambda x, new: x.data.copy_(new),
    "numpy": lambda x, new: np.copyto(x.numpy(), new.numpy()),
    "alias": lambda x, new: x.view(-1).copy_(new.view(-1)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_buffer_that_was_written_to_is_another_input(write):
    _, learner, x, x_query = adapted()
    before = x.clone()
    write(x, x_query[:4])
    assert not runs_at_chain(learner, learner(x), x)
    assert not runs_at_chain(learner, learner(x.clone()), x)
    assert runs_at_chain(learner, learner(before), before)  # the support's values, whatever holds them
    write(x, before)
    assert runs_at_chain(learner, learner(x), x)


def test_a_numpy_buffer_that_is_used_again_is_another_input():
    buffer, x, x_query = np.empty((4, 3)), torch.randn(4, 3), torch.randn(4, 3)

    def fill(new):
        buffer[:] = new.numpy()
        return buffer

    _, learner, _, _ = adapted(steps=0, model=Net(torch.tensor))
    for _ in range(2):
        learner.adapt(loss(learner(fill(x))))
    assert not runs_at_chain(learner, learner(fill(x_query)), x_query)
    assert runs_at_chain(learner, learner(fill(x)), x)


def test_inputs_of_another_dtype_are_others():
    class Cast(Net):
        def forward(self, x):
            return super().forward(x.to(torch.float64))

    _, learner, _, _ = adapted(steps=0, model=Cast())
    x = torch.arange(12).reshape(4, 3)
    learner.adapt(loss(learner(x)))
    assert runs_at_chain(learner, learner(x), x.double())
    assert not runs_at_chain(learner, learner(x.to(torch.float32)), x.double())
    assert not runs_at_chain(learner, learner(x.to(torch.int32)), x.double())


class Opaque:
    """Has no attributes to look at."""

    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


def test_what_cannot_be_compared_is_a_query_and_one_warning_says_so():
    niw, learner, _, _ = adapted(steps=0, model=Net(lambda batch: batch.x))
    batch = Opaque(torch.randn(4, 3))
    learner.adapt(loss(learner(batch)))
    with pytest.warns(UserWarning, match="cannot be compared.*query") as caught:
        outputs = learner(batch)
    assert len(caught) == 1
    assert not runs_at_chain(learner, outputs, batch.x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(learner(batch), outputs)
        other = niw.clone()
        other.adapt(loss(other(batch)))
        assert not runs_at_chain(other, other(batch), batch.x)


def test_a_forward_without_inputs_is_a_query():
    class Fixed(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("inputs", torch.randn(4, 3))

        def forward(self):
            return super().forward(self.inputs)

    niw, learner, _, _ = adapted(steps=0, model=Fixed())
    learner.adapt(loss(learner()))
    plain = {name: p for name, p in learner.module.named_parameters()}
    with pytest.warns(UserWarning, match="cannot be compared.*query"):
        outputs = learner()
    assert not torch.allclose(outputs, torch.func.functional_call(niw.module, plain, ()))
    assert torch.equal(outputs, learner.query())


def test_queries_between_steps_stay_queries():
    _, learner, x, x_query = adapted()
    for _ in range(3):
        assert not runs_at_chain(learner, learner(x_query), x_query)
        learner.adapt(loss(learner(x)))
    assert not runs_at_chain(learner, learner(x_query), x_query)


def test_one_draw_serves_all_queries_until_the_next_step():
    _, learner, x, x_query = adapted(average_iterates=True, curvature=GGN("gaussian"))
    outputs = learner(x_query)
    assert torch.equal(outputs, learner(x_query))
    assert torch.allclose(outputs[:3], learner(x_query[:3]))
    learner.adapt(loss(learner(x)))
    assert not torch.allclose(outputs, learner(x_query))


def test_a_failed_step_does_not_make_its_inputs_support():
    _, learner, x, x_query = adapted()
    with pytest.raises(LossError):
        learner.adapt(loss(learner(x_query)) * float("nan"))
    learner.adapt(loss(learner(x)))
    assert not runs_at_chain(learner, learner(x_query), x_query)


@pytest.mark.parametrize("inference", ["langevin", "closed_form"])
def test_evaluation_without_gradients_changes_nothing_for_what_follows(inference):
    _, learner, x, x_query = adapted(inference=inference)
    with torch.no_grad():
        before = learner(x_query)
    outputs = learner(x_query)
    assert torch.equal(outputs, before)
    assert outputs.requires_grad
    with torch.no_grad():
        learner(x_query)
    learner.adapt(loss(learner(x)))
    with torch.inference_mode():
        assert learner(x_query).shape == (7, 2)
    learner.adapt(loss(learner(x)))


@pytest.mark.parametrize("inference", ["langevin", "closed_form"])
def test_the_support_can_be_the_query(inference):
    niw, learner, x, _ = adapted(inference=inference)
    assert runs_at_chain(learner, learner(x), x)
    outputs = learner.query(x)
    assert runs_at_chain(learner, outputs, x) == (inference == "langevin")
    weights = learner.posterior().mean  # of one iterate, a draw is at the mean
    assert torch.allclose(outputs, torch.func.functional_call(niw.module, weights, (x,)))
    loss(outputs).backward()
    found = [p.grad.clone() for p in niw.parameters()]
    torch.manual_seed(0)
    twin, other, x, _ = adapted(inference=inference)
    copied = x.clone()
    copied[0, 0] += 1e-13  # another input, and so a query
    loss(other(copied)).backward()
    for a, (name, p) in zip(found, twin.named_parameters()):
        assert torch.allclose(a, p.grad, rtol=1e-8, atol=1e-8), name
    learner = niw.clone()
    learner.adapt(loss(learner(x)))
    learner.query(x)
    learner.adapt(loss(learner(x)))
    assert runs_at_chain(learner, learner(x), x)


def noise_of_a_step(make_loss):
    """The Langevin noise that one step added, at temperature 1. The prior is too wide to play a part."""
    torch.manual_seed(3)
    model = Net()
    learner = NIW(model, lr=0.3, temperature=1.0, prior_precision=1e-12).clone()
    value = make_loss(learner)
    gradients = torch.autograd.grad(value, list(learner.parameters()), retain_graph=True)
    torch.manual_seed(4)
    learner.adapt(value)
    pairs = zip(learner.parameters(), model.parameters(), gradients)
    return torch.cat([(new - old + 0.3 * g).flatten() for new, old, g in pairs])


def test_the_examples_behind_a_loss_are_counted_and_no_others():
    x = torch.randn(4, 3)

    def plain(learner):
        return loss(learner(x))

    def with_a_look_aside(learner):
        value = loss(learner(x))
        with torch.no_grad():
            learner(torch.randn(100, 3))
        learner(torch.randn(50, 3))
        return value

    def in_two_parts(learner):
        return (loss(learner(x[:1])) + 3 * loss(learner(x[1:]))) / 4

    def doubled(learner):
        return loss(learner(torch.cat([x, x])))

    def twice(learner):
        return (loss(learner(x)) + loss(learner(x))) / 2

    expected = noise_of_a_step(plain)
    assert torch.allclose(noise_of_a_step(with_a_look_aside), expected)
    assert torch.allclose(noise_of_a_step(in_two_parts), expected)
    assert torch.allclose(noise_of_a_step(doubled) * 2**0.5, expected)
    assert torch.allclose(noise_of_a_step(twice) * 2**0.5, expected)


@pytest.mark.parametrize("parts", [1, 2, 5, 10, 50])
def test_n_is_the_sum_over_the_forwards_behind_a_loss_however_many(parts):
    """At temperature 1 and one step the posterior's variance is 2 lr / n."""
    learner = NIW(Net(), lr=0.3, temperature=1.0).clone()
    x = torch.randn(50, 3)
    learner.adapt(sum(loss(learner(part)) for part in x.chunk(parts)) / parts)
    for variance in learner.posterior().variance.values():
        assert torch.allclose(variance, torch.tensor(2 * 0.3 / 50))


class Detached(nn.Module):
    """Its loss depends on the last layer alone, though its body could adapt."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.body(x).detach())


@pytest.mark.parametrize("second_order", ["none", "last_layer", "all"])
def test_n_and_the_kl_do_not_depend_on_which_weights_a_loss_depends_on(second_order):
    niw = NIW(Detached(), lr=0.3, temperature=1.0, allow_unused=True, second_order=second_order)
    learner, x = niw.clone(), torch.randn(4, 3)
    for _ in range(2):
        learner.adapt(loss(learner(x)))
    assert torch.allclose(learner.posterior().variance["head.bias"], torch.tensor(2 * 0.3 / 4))
    (expected,) = torch.autograd.grad(learner.kl() / 7, niw.hyper.raw_n0, retain_graph=True)
    loss(learner(torch.randn(7, 3))).backward()
    assert torch.allclose(niw.hyper.raw_n0.grad, expected)


def test_n_may_be_given():
    learner = NIW(Net(), lr=0.3, temperature=1.0).clone()
    learner.adapt(loss(learner(torch.randn(4, 3))), n=500)
    assert torch.allclose(learner.posterior().variance["head.bias"], torch.tensor(2 * 0.3 / 500))


def kl_share(run):
    """n_0's gradient, which is the KL's alone, relative to that of a query of one example."""
    niw, learner, x, x_query = adapted(inference="langevin")
    (whole,) = torch.autograd.grad(0.01 * learner.kl(), niw.hyper.raw_n0, retain_graph=True)
    run(learner, x, x_query)
    return (whole / niw.hyper.raw_n0.grad).item()


def looks_in_between(learner, x, x_query):
    value = loss(learner(x_query))
    with torch.no_grad():
        learner(x[:1])
    learner(x[:2])
    learner.query(torch.randn(90, 3))
    value.backward()


def two_losses_in_turn(learner, x, x_query):
    first, second = loss(learner(x_query)), loss(learner(x[:2]))
    first.backward()
    del second


def the_other_loss(learner, x, x_query):
    learner(x_query)
    second = loss(learner(x[:2]))
    learner(x_query)
    second.backward()


KL_N = {
    "one forward": (lambda learner, x, x_query: loss(learner(x_query)).backward(), 7),
    "parts": (lambda learner, x, x_query: sum(loss(learner(row[None])) for row in x_query).backward(), 7),
    "two sets": (lambda learner, x, x_query: (loss(learner(x)) + loss(learner(x_query))).backward(), 11),
    "part of the outputs": (lambda learner, x, x_query: loss(learner(x_query)[:2]).backward(), 7),
    "looks in between": (looks_in_between, 7),
    "two losses": (two_losses_in_turn, 7),
    "the other loss": (the_other_loss, 2),
}


@pytest.mark.parametrize("name", KL_N)
def test_the_kl_s_n_is_that_of_the_forwards_behind_the_loss(name):
    run, n = KL_N[name]
    assert kl_share(run) == pytest.approx(n)


@pytest.mark.parametrize("second_order", ["none", "all"])
def test_support_losses_that_join_the_outer_loss_bring_no_kl_of_their_own(second_order):
    niw, learner, x, x_query = adapted(steps=0, inference="langevin", second_order=second_order)
    losses = []
    for _ in range(3):
        losses.append(loss(learner(x)))
        learner.adapt(losses[-1])
    (expected,) = torch.autograd.grad(0.01 * learner.kl() / 7, niw.hyper.raw_n0, retain_graph=True)
    (loss(learner(x_query)) + sum(losses)).backward()
    assert torch.allclose(niw.hyper.raw_n0.grad, expected)


def test_every_back_propagation_brings_the_kl_over_its_own_examples():
    """A query in parts, each with a backward of its own, has the KL once per part: then write the objective out."""

    def in_parts(learner, x, x_query):
        for part in (x_query[:4], x_query[4:]):
            loss(learner(part)).backward(retain_graph=True)

    assert kl_share(in_parts) == pytest.approx(1 / (1 / 4 + 1 / 3))


def test_a_query_in_parts_has_its_objective_written_out():
    niw, learner, _, x_query = adapted(inference="langevin", second_order="none", add_kl_gradient=False)
    got = []
    for parts in ([slice(None)], [slice(0, 4), slice(4, None)]):
        niw.zero_grad()
        for part in parts:
            value = (learner(x_query[part]) - 1.0).square().sum() / x_query.numel()
            (learner.objective(value, n=7) if part is parts[-1] else value).backward(retain_graph=True)
        got.append(torch.cat([p.grad.flatten() for p in niw.parameters()]))
    assert torch.allclose(*got, rtol=0, atol=1e-12)
    assert niw.hyper.raw_n0.grad != 0


def test_a_look_at_the_query_between_steps_is_no_step_on_other_inputs():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, learner, x, x_query = adapted(inference="langevin")
        learner(x_query)
        learner.adapt(loss(learner(x)))


def test_no_batch_dimension_counts_as_one_example_and_says_so():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self):
            return self.w.norm()

    learner = NIW(Norm(), lr=0.1, temperature=1.0, second_order="none").clone()
    with pytest.warns(UserWarning, match="no batch dimension.*[Pp]ass n"):
        learner.adapt(learner())
    assert torch.allclose(learner.posterior().variance["w"], torch.tensor(0.2))
    learner.adapt(learner(), n=5)
    assert torch.allclose(learner.posterior().variance["w"], torch.tensor(0.04))


def test_ggn_sums_over_the_forwards_behind_the_loss():
    ggn = GGN("gaussian", noise=0.5, samples=None)
    variances = []
    for parts in ([slice(None)], [slice(0, 1), slice(1, None)]):
        torch.manual_seed(0)
        niw = NIW(nn.Linear(3, 1), lr=0.1, curvature=ggn, temperature=1.0, prior_precision=1.0)
        learner, x = niw.clone(), torch.randn(4, 3)
        value = sum(learner(x[part]).square().sum() for part in parts)
        with torch.no_grad():
            learner(x)
        learner.adapt(value)
        variances.append(torch.cat([v.flatten() for v in learner.posterior().variance.values()]))
    assert torch.allclose(*variances)
    assert torch.allclose(variances[0][-1], torch.tensor(1 / (4 / 0.5**2 + 1)))


def test_ggn_with_one_output_names_the_gaussian():
    learner = NIW(nn.Linear(3, 1), lr=0.1, curvature="ggn").clone()
    with pytest.raises(ArgumentError, match="GGN\\('gaussian'"):
        learner.adapt(learner(torch.randn(4, 3)).square().mean())


@pytest.mark.parametrize("inference", ["langevin", "closed_form"])
def test_a_cloned_learner_has_its_own_kl_and_mode(inference):
    niw, learner, _, x_query = adapted(inference=inference)
    learner.eval()
    twin = learner.clone(first_order=True, allow_unused=True)
    assert not twin.module.training
    gradients = []
    for one in (learner, twin):
        niw.zero_grad()
        loss(one(x_query)).backward(retain_graph=True)
        gradients.append(niw.hyper.raw_n0.grad.clone())
    assert torch.allclose(*gradients)
    assert gradients[0] != 0


def test_a_cloned_learner_tells_the_same_roles():
    _, learner, x, x_query = adapted()
    twin = learner.clone()
    assert runs_at_chain(twin, twin(x), x)
    assert not runs_at_chain(twin, twin(x_query), x_query)


def test_a_loop_without_steps_gives_every_parameter_a_gradient():
    niw, learner, _, x_query = adapted(steps=0)
    for part in (x_query[:3], x_query[3:]):
        loss(learner(part)).backward()
    assert all(p.grad is not None for p in niw.parameters())
    assert all(p.grad.abs().max() > 0 for p in niw.module.parameters())
    assert niw.hyper.raw_n0.grad == 0


def test_parameters_thawed_after_wrapping_learn_their_variance():
    model = Net()
    model.body.requires_grad_(False)
    niw = NIW(model, lr=0.3, allow_nograd=True, second_order="all")
    model.body.requires_grad_(True)
    model.head.requires_grad_(False)
    learner, x = niw.clone(), torch.randn(4, 3)
    learner.adapt(loss(learner(x)))
    loss(learner(torch.randn(7, 3))).backward()
    for (name, p), v in zip(model.named_parameters(), niw.hyper.log_variance):
        assert (v.grad is not None) == p.requires_grad, name


@pytest.mark.parametrize("inference", ["langevin", "closed_form"])
def test_what_is_kept_does_not_grow_with_steps_on_new_inputs(inference):
    niw, learner, _, _ = adapted(steps=0, inference=inference, second_order="none")
    for _ in range(20):
        learner.adapt(loss(learner(torch.randn(4, 3))))
        learner(torch.randn(4, 3))
    assert len(learner._support) <= 1
    assert len(learner._first) <= 1
    assert len(learner._forwards) <= 1


@pytest.mark.parametrize("second_order", ["none", "last_layer", "all"])
def test_a_look_at_the_gradient_with_a_graph_leaves_the_kl_to_the_backward(second_order):
    niw, learner, _, x_query = adapted(inference="langevin", second_order=second_order)
    (expected,) = torch.autograd.grad(0.01 * learner.kl() / 7, niw.hyper.raw_n0, retain_graph=True)
    value = loss(learner(x_query))
    gradients = torch.autograd.grad(value, list(learner.parameters()), create_graph=True)
    (value + sum(g.square().sum() for g in gradients)).backward()
    assert torch.allclose(niw.hyper.raw_n0.grad, expected)


def test_an_empty_forward_has_no_examples():
    learner, x = NIW(Net(), lr=0.3, temperature=1.0).clone(), torch.randn(4, 3)
    learner.adapt(loss(learner(x)) + learner(x[:0]).sum())
    assert torch.allclose(learner.posterior().variance["head.bias"], torch.tensor(2 * 0.3 / 4))


def test_in_closed_form_a_step_on_other_inputs_is_told():
    _, learner, _, x_query = adapted()
    with pytest.warns(UserWarning, match="loss of a query's network"):
        learner.adapt(loss(learner(x_query)))


def test_a_copied_learner_knows_its_support():
    _, learner, x, x_query = adapted()
    twin = copy.deepcopy(learner)
    assert runs_at_chain(twin, twin(x), x)
    assert not runs_at_chain(twin, twin(x_query), x_query)
