"""How a learner tells support from query and counts data, whatever the loop does between steps."""

import pytest
import torch
from torch import nn

from l2l_niw import NIW
from l2l_niw.curvature import GGN
from l2l_niw.errors import ArgumentError, LossError


@pytest.fixture(autouse=True)
def in_double(double):
    pass


class Net(nn.Module):
    """Takes its inputs by position, by name, or in a dict."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x=None, batch=None):
        return self.head(torch.tanh(self.body(batch["x"] if x is None else x)))


def loss(outputs):
    return (outputs - 1.0).square().mean()


def adapted(call=lambda learner, x: learner(x), steps=3, **options):
    niw = NIW(Net(), lr=0.3, temperature=0.01, prior_precision=1e3, **options)
    learner, x, x_query = niw.clone(), torch.randn(4, 3), torch.randn(7, 3)
    for _ in range(steps):
        learner.adapt(loss(call(learner, x)))
    return niw, learner, x, x_query


def runs_at_chain(learner, outputs, x):
    """Whether outputs are those of the chain's state."""
    state = {name: p.detach() for name, p in learner.module.named_parameters()}
    return torch.allclose(outputs, torch.func.functional_call(learner.niw.module, state, (x,)))


CALLS = {
    "position": lambda learner, x: learner(x),
    "keyword": lambda learner, x: learner(x=x),
    "dict": lambda learner, x: learner(batch={"x": x}),
    "copy": lambda learner, x: learner(x.clone()),
}


@pytest.mark.parametrize("call", list(CALLS.values()), ids=list(CALLS))
def test_support_runs_at_the_chain_and_query_at_a_draw(call):
    _, learner, x, x_query = adapted(call)
    assert runs_at_chain(learner, call(learner, x), x)
    assert not runs_at_chain(learner, call(learner, x_query), x_query)
    assert runs_at_chain(learner, learner.module(x_query), x_query)


def test_queries_between_steps_stay_queries():
    _, learner, x, x_query = adapted()
    for _ in range(3):
        assert not runs_at_chain(learner, learner(x_query), x_query)
        learner.adapt(loss(learner(x)))
    assert not runs_at_chain(learner, learner(x_query), x_query)


def test_a_buffer_that_was_written_to_is_another_input():
    _, learner, x, x_query = adapted()
    x.copy_(x_query[:4])
    assert not runs_at_chain(learner, learner(x), x)


def test_a_failed_step_does_not_make_its_inputs_support():
    _, learner, x, x_query = adapted()
    with pytest.raises(LossError):
        learner.adapt(loss(learner(x_query)) * float("nan"))
    learner.adapt(loss(learner(x)))
    assert not runs_at_chain(learner, learner(x_query), x_query)


def test_evaluation_without_gradients_changes_nothing_for_what_follows():
    _, learner, x, x_query = adapted()
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


def noise_of_a_step(make_loss):
    """The Langevin noise that one step added, at temperature 1."""
    torch.manual_seed(3)
    model = Net()
    learner = NIW(model, lr=0.3, temperature=1.0).clone()
    value = make_loss(learner)
    gradients = torch.autograd.grad(value, list(learner.parameters()), retain_graph=True)
    torch.manual_seed(4)
    learner.adapt(value)
    return torch.cat([(new - old + 0.3 * g).flatten()
                      for new, old, g in zip(learner.parameters(), model.parameters(), gradients)])


def test_the_data_behind_a_loss_are_counted_and_no_others():
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

    expected = noise_of_a_step(plain)
    assert torch.allclose(noise_of_a_step(with_a_look_aside), expected)
    assert torch.allclose(noise_of_a_step(in_two_parts), expected)
    assert torch.allclose(noise_of_a_step(doubled) * 2**0.5, expected)


def test_no_batch_dimension_asks_for_n():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self):
            return self.w.norm()

    learner = NIW(Norm(), lr=0.1).clone()
    with pytest.raises(ArgumentError, match="Pass n"):
        learner.adapt(learner())
    learner.adapt(learner(), n=5)


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


def test_a_cloned_learner_has_its_own_kl_and_mode():
    niw, learner, x, x_query = adapted()
    learner.eval()
    twin = learner.clone(first_order=True, allow_unused=True)
    assert not twin.module.training
    gradients = []
    for one in (learner, twin):
        niw.zero_grad()
        loss(one(x_query)).backward()
        gradients.append(niw.raw_n0.grad.clone())
    assert torch.allclose(*gradients)
    assert gradients[0] != 0


@pytest.mark.parametrize("moment", ["before adapt", "before the query", "before backward"])
def test_a_learner_is_of_the_time_when_it_was_cloned(moment, same_draws):
    def gradients(change):
        def pause(here):
            if here == moment:
                with torch.no_grad():
                    [p.add_(change) for p in niw.parameters()]

        torch.manual_seed(0)
        niw, learner, x, x_query = adapted(steps=0)
        pause("before adapt")
        for _ in range(3):
            learner.adapt(loss(learner(x)))
        pause("before the query")
        value = loss(learner(x_query))
        pause("before backward")
        value.backward()
        return [p.grad for p in niw.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(0.0), gradients(1.0)))


def test_a_loop_without_steps_gives_every_parameter_a_gradient():
    niw, learner, _, x_query = adapted(steps=0)
    for part in (x_query[:3], x_query[3:]):
        loss(learner(part)).backward()
    assert all(p.grad is not None for p in niw.parameters())
    assert all(p.grad.abs().max() > 0 for p in niw.module.parameters())
    assert niw.raw_n0.grad == 0


def test_parameters_thawed_after_wrapping_learn_their_variance():
    model = Net()
    model.body.requires_grad_(False)
    niw = NIW(model, lr=0.3, allow_nograd=True)
    model.body.requires_grad_(True)
    model.head.requires_grad_(False)
    learner, x = niw.clone(), torch.randn(4, 3)
    learner.adapt(loss(learner(x)))
    loss(learner(torch.randn(7, 3))).backward()
    for (name, p), v in zip(model.named_parameters(), niw.log_variance):
        assert (v.grad is not None) == p.requires_grad, name


def test_the_support_can_be_the_query():
    niw, learner, x, _ = adapted()
    twin = learner.clone()
    assert runs_at_chain(learner, learner(x), x)
    outputs = learner.as_query()(x)
    assert not runs_at_chain(learner, outputs, x)
    assert torch.equal(outputs, learner(x))  # one draw until the next step
    loss(outputs).backward()
    found = [p.grad.clone() for p in niw.parameters()]
    niw.zero_grad()
    post = twin.posterior()
    draw = dict(zip(post.mean, twin._episode.weights(at_chain=False)))
    loss(post.network(draw)(x)).backward()
    assert all(torch.allclose(a, p.grad) for a, p in zip(found, niw.parameters()))
    learner.adapt(loss(learner(x)))
    assert runs_at_chain(learner, learner(x), x)


def test_a_support_that_was_overwritten_is_no_support_any_more():
    niw, learner, x, x_query = adapted()
    first = x.clone()
    x.copy_(torch.randn(4, 3))
    assert not runs_at_chain(learner, learner(x.clone()), x)
    assert not runs_at_chain(learner, learner(x), x)
    assert not runs_at_chain(learner, learner(first), first)


def test_memory_does_not_grow_with_steps_on_new_inputs():
    niw, learner, _, _ = adapted(steps=0)
    for _ in range(20):
        learner.adapt(loss(learner(torch.randn(4, 3))))
        learner(torch.randn(4, 3))
    for _ in range(20):
        learner(torch.randn(4, 3))
    assert len(learner._support) == 1
    assert len(learner._recent) <= 4
