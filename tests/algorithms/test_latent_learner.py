"""A learner in the prior's coordinates: its objective's gradient, its states, its copies, and what it refuses."""

import copy
import io
import itertools
import math
import pickle
import weakref

import pytest
import torch
from latent_cases import KINDS, SHAPES, Spare, binary, data, make, mse, network
from torch import nn
from torch.distributions import Categorical, MultivariateNormal, Normal
from torch.nn import functional as F

from l2l_niw import NIW, BatchedEpisodes, EpisodicModel
from l2l_niw.algorithms.latent_learner import LatentLearner
from l2l_niw.errors import ArgumentError, ChainError, CheckpointError, LossError
from l2l_niw.heads import BayesianRidge, LeaveOneOut, NearestCentroid
from l2l_niw.inference import latent_posterior
from l2l_niw.models import MLP

N, M, STEPS = 5, 4, 3
ORDERS = ("none", "last_step", "all")


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def adapted(niw, loss, support, steps=STEPS):
    learner = niw.clone()
    for _ in range(steps):
        learner.adapt(loss(learner, *support))
    return learner


def gradients(niw, value):
    niw.zero_grad()
    value.backward()
    return [p.grad.clone() for p in niw.parameters()]


def assert_close(found, expected, tolerance=1e-9):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * max(1.0, theirs.abs().max().item()))


def written_out(niw, support, query, steps=STEPS, start=None):
    """
    The objective by dense matrices, for outputs that are means: Gauss-Newton steps from z = 0 on l(z) + |z|^2 / 2, the
    query's loss there, and minus the log evidence plus the Wishart's part over M, in units of the loss: a mean squared
    error is one nat per example every 2 noise^2.
    """
    u, m = dense_directions(niw), torch.cat([p.flatten() for p in niw.module.parameters()])
    noise, n0, (x, y) = niw.hyper.log_noise.exp(), niw.hyper.raw_n0.exp(), support
    shapes = [(name, p.shape) for name, p in niw.module.named_parameters()]

    def outputs(z, x):
        parts = (m + u @ z).split([shape.numel() for _, shape in shapes])
        weights = {name: part.view(shape) for part, (name, shape) in zip(parts, shapes)}
        return torch.func.functional_call(niw.module, weights, (x,)).flatten()

    z = torch.zeros(u.shape[1]) if start is None else start
    for _ in range(steps):
        f, jacobian, start = outputs(z, x), torch.func.jacrev(outputs)(z, x), z
        covariance = torch.linalg.inv(torch.eye(len(z)) + jacobian.mT @ jacobian / noise**2)
        move = covariance @ (jacobian.mT @ (y.flatten() - f) / noise**2 - z)
        z = z + move * torch.clamp(2.0 / move.norm(), max=1.0)
    evidence = Normal(f, noise).log_prob(y.flatten()).sum() - start.square().sum() / 2 + covariance.logdet() / 2
    loss = (outputs(z, query[0]) - query[1].flatten()).square().mean()
    return loss + 2 * noise.detach() ** 2 * (gap(n0, len(z)) - evidence) / M


def gap(n0, d):
    """What not knowing Sigma costs, of d one-dimensional Wisharts."""
    return 0.5 * d * (torch.log(n0 / 2) - torch.digamma(n0 / 2))


def dense_directions(niw):
    """U as a matrix, (weights, coordinates)."""
    hyper = niw.hyper
    if not niw.rank:
        return torch.diag(torch.cat([(0.5 * v).exp().flatten() for v in hyper.log_variance]))
    return torch.cat([d.flatten(1).mT for d in hyper.directions])


@pytest.mark.parametrize("kind", ["linear", "gaussian"])
@pytest.mark.parametrize("shape", ["full", "rank 2"])
def test_an_unmodified_loop_has_the_written_out_objective_s_gradient(kind, shape):
    niw, loss = make(kind, shape)
    support, query = data(kind, N), data(kind, M)
    found = gradients(niw, loss(adapted(niw, loss, support), *query))
    assert_close(found, gradients(niw, written_out(niw, support, query)))
    assert all(g.abs().max() > 1e-6 for g in found)


def objective_value(niw, loss, support, query, unit):
    """The objective's value, as a number, in fixed units of the loss."""
    learner = adapted(niw, loss, support)
    solution = learner._progress.solution
    energy = gap(niw.hyper.raw_n0.exp(), len(solution.z)) - solution.evidence
    return (loss(learner.query, *query) + unit * energy / M).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["full", "rank 2", "adapters"])
def test_the_loop_s_gradient_is_that_of_finite_differences(kind, shape):
    """Along random directions of all of niw.parameters() at once and of each by itself."""
    niw, loss = make(kind, shape)
    support, query = data(kind, N), data(kind, M)
    learner = adapted(niw, loss, support)
    unit = learner._progress.solution.unit
    found = gradients(niw, loss(learner.query, *query))
    parameters, h = list(niw.parameters()), 1e-5
    for chosen in [range(len(parameters)), *[[i] for i in range(len(parameters))]]:
        directions = {i: torch.randn_like(parameters[i]) for i in chosen}
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                for i, d in directions.items():
                    parameters[i].add_(sign * h * d)
            values.append(objective_value(niw, loss, support, query, unit))
            with torch.no_grad():
                for i, d in directions.items():
                    parameters[i].sub_(sign * h * d)
        expected = (values[0] - values[1]) / (2 * h)
        got = sum((found[i] * d).sum().item() for i, d in directions.items())
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_the_gradient_s_own_gradient_is_that_of_finite_differences(kind):
    """In m_0 and U: the unit of the loss, a constant to the gradient, depends on the noise alone."""
    niw, loss = make(kind)
    support, query = data(kind, N), data(kind, M)
    parameters = [*niw.module.parameters(), *niw.hyper.directions]
    directions = [torch.randn_like(p) for p in parameters]

    def gradient(create_graph=False):
        value = loss(adapted(niw, loss, support), *query)
        return torch.autograd.grad(value, parameters, create_graph=create_graph)

    product = sum((g * d).sum() for g, d in zip(gradient(create_graph=True), directions))
    found, ends = torch.autograd.grad(product, parameters), []
    for sign in (1, -2):
        with torch.no_grad():
            for p, d in zip(parameters, directions):
                p.add_(sign * 1e-5 * d)
        ends.append(gradient())
    assert_close(found, [(a - b) / 2e-5 for a, b in zip(*ends)], 1e-6)


@pytest.mark.parametrize("shape", ["full", "rank 2"])
def test_on_a_linear_model_the_last_step_s_gradient_is_that_of_all(shape):
    """Once the first steps have led to the mode: there a step's result does not depend on where it began."""
    found = []
    for second_order in ("last_step", "all"):
        torch.manual_seed(1)
        niw, loss = make("linear", shape, second_order=second_order)
        support, query = data("linear", N), data("linear", M)
        found.append(gradients(niw, loss(adapted(niw, loss, support, 6), *query)))
    assert_close(*found, 1e-8)


def test_the_last_step_alone_is_written_out():
    """On a bent network: z where the last step began is a constant."""
    niw, loss = make(second_order="last_step")
    support, query = data("gaussian", N), data("gaussian", M)
    found = gradients(niw, loss(adapted(niw, loss, support), *query))
    start = adapted(niw, loss, support, STEPS - 1).posterior().z.detach()
    assert_close(found, gradients(niw, written_out(niw, support, query, 1, start)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("second_order", ORDERS)
def test_the_objective_written_out_has_the_automatic_one_s_gradient(kind, second_order):
    support, query, found = data(kind, N), data(kind, M), []
    for automatic in (True, False):
        torch.manual_seed(1)
        niw, loss = make(kind, second_order=second_order, add_kl_gradient=automatic)
        learner = adapted(niw, loss, support)
        value = loss(learner.query, *query)
        value = value if automatic else learner.objective(value)
        niw.zero_grad()
        value.backward()
        found.append([torch.zeros_like(p) if p.grad is None else p.grad for p in niw.parameters()])
    assert_close(*found)


@pytest.mark.parametrize("temperature", [0.2, 3.0])
@pytest.mark.parametrize("kind", ["linear", "categorical"])
def test_the_objective_s_weight_of_the_kl_is_the_temperature(kind, temperature):
    """mean query loss + T (E[l] / T + KL) / M: in the support's loss the temperature cancels."""
    niw, loss = make(kind, temperature=temperature, add_kl_gradient=False)
    support, query = data(kind, N), data(kind, M)
    learner = adapted(niw, loss, support, 8)
    z, value = learner.posterior().z, loss(learner.query, *query)
    energy = learner.objective(value) - value
    scale = 0.5 / 0.36 if kind == "linear" else 1.0  # nats of one example's loss
    with torch.no_grad():
        fit = loss(learner, *support) * N * scale
        constant = N * math.log(0.6 * math.sqrt(2 * math.pi)) if kind == "linear" else 0.0
        logdet = learner.posterior().covariance.logdet()
        wishart = gap(niw.hyper.raw_n0.exp(), len(z))
        expected = fit + constant + temperature * (0.5 * z.square().sum() - 0.5 * logdet + wishart)
    assert energy.item() == pytest.approx(expected.item() / scale / M, rel=1e-5)


@pytest.mark.parametrize("kind", ["linear", "gaussian", "categorical"])
def test_a_first_order_learner_takes_steps_as_constants(kind):
    """What is left: the query's gradient at m_0 + U z with z fixed, and of n_0 the Wishart's part."""
    niw, loss = make(kind, first_order=True, linearise="none")
    support, query = data(kind, N), data(kind, M)
    learner = adapted(niw, loss, support)
    found = gradients(niw, loss(learner.query, *query))
    z, unit = learner.posterior().z, learner._progress.solution.unit
    weights = {
        name: p + torch.tensordot(z, u, 1) for (name, p), u in zip(niw.module.named_parameters(), niw.hyper.directions)
    }
    value = loss(lambda x: torch.func.functional_call(niw.module, weights, (x,)), *query)
    value = value + unit * gap(niw.hyper.raw_n0.exp(), len(z)) / M
    assert_close(found, gradients(niw, value + 0.0 * niw.hyper.log_noise))
    for learner in (niw.clone(first_order=True), niw.clone(first_order=False)):
        for _ in range(STEPS):
            learner.adapt(loss(learner, *support), first_order=True)
        assert_close(gradients(niw, loss(learner.query, *query)), found)


def rotated(niw):
    r = torch.linalg.qr(torch.randn(2, 2)).Q
    twin = copy.deepcopy(niw)
    with torch.no_grad():
        for u in twin.hyper.directions:
            u.copy_(torch.tensordot(r, u, 1))
    return twin


@pytest.mark.parametrize("kind", KINDS)
def test_a_rotation_of_the_coordinates_changes_nothing(kind):
    niw, loss = make(kind)
    twin, support, query = rotated(niw), data(kind, N), data(kind, M)
    found = []
    for own in (niw, twin):
        learner = adapted(own, loss, support)
        value = loss(learner.query, *query)
        kl, evidence = learner.kl(), learner._progress.solution.evidence
        own.zero_grad()
        value.backward()
        m0 = [p.grad for p in own.module.parameters()]
        variances = list(learner.posterior().variance.values())
        found.append([value, kl, evidence, *variances, own.hyper.log_noise.grad, own.hyper.raw_n0.grad, *m0])
    assert_close(*found, 1e-8)


def test_rank_0_is_niw_without_rank():
    support, query, found = data("gaussian", N), data("gaussian", M), []
    for options in ({}, {"rank": 0}):
        torch.manual_seed(1)
        niw = NIW(network(), lr=0.1, **options)
        learner = adapted(niw, mse, support)
        assert not isinstance(learner, LatentLearner)
        found.append([*gradients(niw, mse(learner, *query)), *niw.state_dict().values()])
    for ours, theirs in zip(*found):
        assert torch.equal(ours, theirs)


class TestStates:
    def test_an_earlier_state_s_graph_is_let_go(self):
        niw, loss = make(second_order="last_step")
        learner, support = niw.clone(), data("gaussian", N)
        states = []
        for _ in range(STEPS):
            learner.adapt(loss(learner, *support))
            states.append(learner._state)
        assert [state.z is None for state in states] == [True] * (STEPS - 1) + [False]

    @pytest.mark.parametrize(("second_order", "grows"), [("none", False), ("last_step", False), ("all", True)])
    @pytest.mark.parametrize("kind", ["gaussian", "categorical"])
    def test_what_graphs_hold_grows_with_the_steps_of_all_alone(self, kind, second_order, grows):
        niw, loss = make(kind, second_order=second_order)
        support, query, kept = data(kind, N), data(kind, M), weakref.WeakSet()

        class Held:
            def __init__(self, tensor):
                self.tensor = tensor.detach()
                kept.add(self)

        def count(steps):
            value = loss(adapted(niw, loss, support, steps), *query)
            assert value.requires_grad
            return len(kept)

        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
            few = count(2)
            assert not kept
            many = count(8)
        assert (many > few) == grows
        assert not kept

    @pytest.mark.parametrize("second_order", ORDERS)
    def test_a_query_before_a_further_step_keeps_its_gradient(self, second_order):
        niw, loss = make(second_order=second_order)
        support, query = data("gaussian", N), data("gaussian", M)
        expected = gradients(niw, loss(adapted(niw, loss, support, 2), *query))
        learner = adapted(niw, loss, support, 2)
        early = loss(learner, *query)
        learner.adapt(loss(learner, *support))
        assert_close(gradients(niw, early), expected)

    @pytest.mark.parametrize("second_order", ORDERS)
    def test_a_query_in_between_leaves_the_last_one_s_gradient(self, second_order):
        niw, loss = make(second_order=second_order)
        support, query = data("gaussian", N), data("gaussian", M)
        expected = gradients(niw, loss(adapted(niw, loss, support), *query))
        learner = niw.clone()
        kept = []
        for _ in range(STEPS):
            kept.append(loss(learner, *query))
            learner.adapt(loss(learner, *support))
        assert_close(gradients(niw, loss(learner, *query)), expected)

    @pytest.mark.parametrize("second_order", ORDERS)
    @pytest.mark.parametrize("kind", ["gaussian", "categorical"])
    def test_so_it_is_with_what_a_posterior_s_gradient_is(self, kind, second_order):
        """Of its mean, covariance and KL: after a query and a KL at each earlier state as after none."""
        niw, loss = make(kind, second_order=second_order)
        support, query, found = data(kind, N), data(kind, M), []
        for looked in (False, True):
            learner, kept = niw.clone(), []
            for step in range(STEPS):
                kept += [loss(learner, *query)] if looked else []
                kept += [learner.kl()] if looked and step else []
                learner.adapt(loss(learner, *support))
            post = learner.posterior()
            value = post.z.sum() + post.covariance.square().sum() + learner.kl() + post.mean["2.weight"].sum()
            options = {"allow_unused": True, "materialize_grads": True}
            found.append([value, *torch.autograd.grad(value, list(niw.parameters()), **options)])
        assert_close(*found)

    @pytest.mark.parametrize("second_order", ORDERS)
    def test_a_kl_before_a_further_step_keeps_its_gradient(self, second_order):
        niw, loss = make(second_order=second_order)
        support, found, options = data("gaussian", N), [], {"allow_unused": True, "materialize_grads": True}
        for more in (0, 1):
            learner = adapted(niw, loss, support, 2)
            kl, variances = learner.kl(), sum(v.sum() for v in learner.posterior().variance.values())
            for _ in range(more):
                learner.adapt(loss(learner, *support))
            found.append(torch.autograd.grad(kl + variances, list(niw.parameters()), **options))
        assert_close(*found)

    @pytest.mark.parametrize("second_order", ORDERS)
    def test_both_losses_of_one_backward_have_their_gradients(self, second_order):
        niw, loss = make(second_order=second_order)
        support, query = data("gaussian", N), data("gaussian", M)
        each = [gradients(niw, loss(adapted(niw, loss, support, k), *query)) for k in (2, 3)]
        learner = adapted(niw, loss, support, 2)
        early = loss(learner, *query)
        learner.adapt(loss(learner, *support))
        assert_close(gradients(niw, early + loss(learner, *query)), [a + b for a, b in zip(*each)])

    @pytest.mark.parametrize("second_order", ORDERS)
    @pytest.mark.parametrize("kind", ["gaussian", "categorical"])
    def test_autograd_grad_is_backward(self, kind, second_order):
        niw, loss = make(kind, second_order=second_order)
        support, query = data(kind, N), data(kind, M)
        expected = gradients(niw, loss(adapted(niw, loss, support), *query))
        found = torch.autograd.grad(loss(adapted(niw, loss, support), *query), list(niw.parameters()))
        assert_close(found, expected)

    @pytest.mark.parametrize("second_order", ORDERS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_parameter_has_a_gradient(self, kind, second_order):
        """Zeros where there is none, as of the noise in a classification."""
        niw, loss = make(kind, second_order=second_order)
        loss(adapted(niw, loss, data(kind, N)), *data(kind, M)).backward()
        for p in niw.parameters():
            p.grad.mul_(1.0 / 8)
        if kind in ("categorical", "bernoulli"):
            assert niw.hyper.log_noise.grad == 0

    @pytest.mark.parametrize("second_order", ORDERS)
    def test_the_query_s_gradient_in_the_learner_s_own_weights(self, second_order):
        niw, loss = make(second_order=second_order)
        query = data("gaussian", M)
        learner = adapted(niw, loss, data("gaussian", N))
        weights = {name: w.detach().requires_grad_() for name, w in learner.module.named_parameters()}
        expected = torch.autograd.grad(
            loss(lambda x: torch.func.functional_call(niw.module, weights, (x,)), *query), list(weights.values())
        )
        assert_close(torch.autograd.grad(loss(learner, *query), list(learner.parameters())), expected)

    def test_a_query_in_two_parts_counts_all_of_its_examples(self):
        niw, loss = make()
        support, (x, y) = data("gaussian", N), data("gaussian", M)
        expected = gradients(niw, loss(adapted(niw, loss, support), x, y))
        learner = adapted(niw, loss, support)
        halves = loss(learner, x[:2], y[:2]) + loss(learner, x[2:], y[2:])
        assert_close(gradients(niw, halves / 2), expected)

    def test_a_look_at_other_outputs_changes_no_gradient(self):
        niw, loss = make()
        support, query = data("gaussian", N), data("gaussian", M)
        expected = gradients(niw, loss(adapted(niw, loss, support), *query))
        learner = adapted(niw, loss, support)
        value = loss(learner, *query)
        learner(torch.randn(9, 2))
        loss(learner, *support)
        assert_close(gradients(niw, value), expected)

    def test_without_the_free_energy_it_is_the_query_s_own_gradient(self):
        """kl_weight=0: nothing reaches n_0."""
        niw, loss = make(kl_weight=0.0)
        found = gradients(niw, loss(adapted(niw, loss, data("gaussian", N)), *data("gaussian", M)))
        assert niw.hyper.raw_n0.grad == 0
        assert any(g.abs().max() > 0 for g in found)

    @pytest.mark.parametrize("kind", KINDS)
    def test_outputs_without_a_graph_are_those_with_one(self, kind):
        niw, loss = make(kind)
        support, (x, _) = data(kind, N), data(kind, M)
        learner = adapted(niw, loss, support)

        def tensors(outputs):
            if isinstance(outputs, torch.Tensor):
                return [outputs]
            return [outputs.logits] if isinstance(outputs, Categorical) else [outputs.mean, outputs.stddev]

        for call in (lambda: learner(x), lambda: learner.query(x), lambda: learner(support[0])):
            with torch.no_grad():
                found = tensors(call())
            with torch.inference_mode():
                again = tensors(call())
            for ours, other, theirs in zip(found, again, tensors(call())):
                assert torch.allclose(ours, theirs, atol=1e-12)
                assert torch.allclose(other, theirs, atol=1e-12)
                assert theirs.requires_grad
                assert not ours.requires_grad

    @pytest.mark.parametrize("second_order", ORDERS)
    @pytest.mark.parametrize("kind", ["gaussian", "categorical", "normal"])
    def test_a_forward_after_the_query_s_backward_is_the_same(self, kind, second_order):
        niw, loss = make(kind, second_order=second_order)
        support, query = data(kind, N), data(kind, M)
        learner = adapted(niw, loss, support)
        first = loss(learner, *query)
        first.backward()
        assert torch.allclose(loss(learner, *query), first)

    @pytest.mark.parametrize("second_order", ["none", "last_step"])
    @pytest.mark.parametrize("kind", ["gaussian", "categorical"])
    def test_so_is_a_second_query_s_gradient_where_steps_keep_no_graph(self, kind, second_order):
        niw, loss = make(kind, second_order=second_order)
        support, query, other = data(kind, N), data(kind, M), data(kind, M)
        expected = [gradients(niw, loss(adapted(niw, loss, support), *own)) for own in (query, other)]
        learner = adapted(niw, loss, support)
        for own, theirs in zip((query, other), expected):
            assert_close(gradients(niw, loss(learner, *own)), theirs)

    def test_a_support_s_outputs_have_no_spread_in_them(self):
        """Those of a query do; the two differ by the declared role alone."""
        niw, loss = make("categorical")
        support = data("categorical", N)
        learner = adapted(niw, loss, support)
        weights = dict(learner.named_parameters())
        plain = torch.func.functional_call(niw.module, {k.partition(".")[2]: w for k, w in weights.items()}, support[0])
        assert torch.allclose(learner(support[0]), plain)
        assert not torch.allclose(learner.query(support[0]).softmax(-1), plain.softmax(-1))
        niw.options.linearise = "none"
        assert torch.allclose(learner.query(support[0]), plain)

    def test_a_step_on_a_query_s_outputs_is_warned_of(self):
        niw, loss = make("categorical")
        learner = adapted(niw, loss, data("categorical", N), 1)
        with pytest.warns(UserWarning, match="a step was taken on the loss of a query's outputs"):
            learner.adapt(loss(learner, *data("categorical", N)))

    @pytest.mark.parametrize("kind", ["linear", "categorical", "bernoulli", "distribution of classes"])
    def test_steps_on_a_smaller_support_lead_to_its_own_mode(self, kind):
        """After one on a larger: the gradient of the new one's energy is 0 there."""
        niw, loss = make(kind, linearise="none")
        learner, (x, y) = adapted(niw, loss, data(kind, N), 1), data(kind, 2)
        for _ in range(25):
            learner.adapt(loss(learner, x, y))
        scale = 1 / (2 * 0.36) if kind == "linear" else 1.0  # nats of one example's loss
        energy = 2 * scale * loss(learner, x, y) + 0.5 * learner._z.square().sum()
        assert torch.autograd.grad(energy, learner._z)[0].abs().max() < 1e-5
        assert learner.posterior().z.abs().max() > 1e-2

    def test_losses_of_two_forwards_are_one_support(self):
        niw, loss = make()
        x, y = data("gaussian", N + 1)
        whole, halves = niw.clone(), niw.clone()
        for _ in range(STEPS):
            whole.adapt(loss(whole, x, y))
            halves.adapt((loss(halves, x[:3], y[:3]) + loss(halves, x[3:], y[3:])) / 2)
        first, second = whole.posterior(), halves.posterior()
        assert torch.allclose(first.z, second.z)
        assert torch.allclose(first.covariance, second.covariance)
        ours, theirs = whole._progress.solution, halves._progress.solution
        assert torch.allclose(ours.evidence, theirs.evidence)
        assert torch.allclose(ours.unit, theirs.unit)


class TestDirections:
    SIZES = {  # of a network of 2 -> 4 -> 1: tensors beside the scalars, and coordinates
        "full": ([(4, 2), (4,), (1, 4), (1,)], 17),
        "rank 2": ([(2, 4, 2), (2, 4), (2, 1, 4), (2, 1)], 2),
        "by layer": ([(2, 4, 2), (2, 4), (2, 1, 4), (2, 1)], 4),
        "adapters": ([(4, 2), (2, 4), (1, 2), (2, 1), (2, 2), (2, 4)], 4),
    }

    @pytest.mark.parametrize("shape", SHAPES)
    def test_shapes_of_the_parameters(self, shape):
        niw, loss = make(shape=shape)
        shapes, size = self.SIZES[shape]
        found = [tuple(p.shape) for p in niw.hyper.parameters() if p.dim()]
        assert sorted(found) == sorted(shapes)
        assert sorted(name for name, p in niw.hyper.named_parameters() if not p.dim()) == ["log_noise", "raw_n0"]
        learner = adapted(niw, loss, data("gaussian", N), 1)
        assert learner.posterior().covariance.shape == (size, size)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_offsets_are_linear_in_the_coordinates(self, shape):
        latent = make(shape=shape)[0]._latent()
        a, b = torch.randn(2, latent.size)
        for left, right, both in zip(latent.offsets(a), latent.offsets(b), latent.offsets(2 * a - 3 * b)):
            assert torch.allclose(both, 2 * left - 3 * right)
        for alone, batch, m in zip(latent.offsets(b), latent.offsets(torch.stack([a, b])), latent.m0):
            assert batch.shape == (2, *m.shape)
            assert torch.allclose(batch[1], alone)

    def test_by_layer_a_coordinate_moves_one_layer(self):
        for shape in ("by layer", "adapters"):
            latent = make(shape=shape)[0]._latent()
            moved = latent.offsets(torch.tensor([1.0, 2.0, 0.0, 0.0]))
            assert [bool(t.any()) for t in moved] == [True, True, False, False]

    def test_adapters_are_outer_products(self):
        niw, _ = make(shape="adapters")
        moved = niw._latent().offsets(torch.tensor([1.0, 0.0, 0.0, 0.0]))[0]
        expected = niw.hyper.directions[0][:, 0].outer(niw.hyper.columns[0][0])
        assert torch.allclose(moved, expected)
        assert torch.linalg.matrix_rank(moved) == 1

    @pytest.mark.parametrize("n", [2, 40])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_variances_are_those_of_draws(self, shape, n):
        """Also of the prior, where nothing has been seen."""
        niw, loss = make(shape=shape)
        for post in (niw.prior(), adapted(niw, loss, data("gaussian", n), 1).posterior()):
            with torch.no_grad():
                draws = [post.rsample() for _ in range(4000)]
            for name, variance in post.variance.items():
                drawn = torch.stack([draw[name] for draw in draws])
                error = (variance / 4000).sqrt()
                assert ((drawn.mean(0) - post.mean[name]).abs() < 5 * error).all()
                assert torch.allclose(drawn.var(0), variance, rtol=0.15)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_scale_prior_std(self, shape):
        niw, _ = make(shape=shape)
        before = niw.prior().variance
        niw.scale_prior_std(3.0)
        for name, variance in niw.prior().variance.items():
            assert torch.allclose(variance, 9.0 * before[name])

    @pytest.mark.parametrize("shape", SHAPES)
    def test_prior_std_is_relative_to_the_weights(self, shape):
        """By default 0.3 of a layer's root mean square for its own weights, 0.1 for each direction's entries."""
        model = nn.Linear(300, 200, bias=False)
        niw = NIW(model, lr=0.1, **{k: v for k, v in SHAPES[shape].items() if k != "prior_std"})
        niw.hyper.raw_n0.data.fill_(40.0)  # the mode's variance is V_0 / n_0
        expected = (0.3 if shape == "full" else 0.1 * math.sqrt(2.0)) * model.weight.square().mean().sqrt()
        assert niw.prior().variance["weight"].mean().sqrt().item() == pytest.approx(expected.item(), rel=0.15)


class TestSelection:
    """Weights that are shared, and frozen ones."""

    @pytest.mark.parametrize("second_order", ORDERS)
    @pytest.mark.parametrize("shape", ["full", "rank 2"])
    def test_shared_weights_have_the_written_out_gradient(self, shape, second_order):
        """The last layer is random: with features fixed it is a conjugate model, and steps are at its mode."""
        niw, loss = make(shape=shape, random="last_layer", second_order=second_order)
        support, query = data("gaussian", N), data("gaussian", M)
        learner = adapted(niw, loss, support, 6)
        found = gradients(niw, loss(learner, *query))
        body, last, noise = niw.module[:2], niw.module[2], niw.hyper.log_noise.exp()
        u = dense_directions(niw)

        def features(x):
            return F.pad(body(x), (0, 1), value=1.0)

        def z_of(phi, y, m, u, noise):
            projected = phi @ u
            covariance = torch.linalg.inv(torch.eye(u.shape[1]) + projected.mT @ projected / noise**2)
            return covariance @ projected.mT @ (y - phi @ m) / noise**2

        m = torch.cat([last.weight.flatten(), last.bias])
        phi, y = features(support[0]), support[1].flatten()
        z = z_of(phi, y, m, u, noise)
        if second_order == "none":
            z = z.detach()
        loss_ = (features(query[0]) @ (m + u @ z) - query[1].flatten()).square().mean()
        marginal = MultivariateNormal(phi @ m, phi @ u @ u.mT @ phi.mT + noise**2 * torch.eye(N)).log_prob(y)
        marginal = marginal.detach() if second_order == "none" else marginal
        energy = gap(niw.hyper.raw_n0.exp(), u.shape[1]) - marginal
        value = loss_ + 2 * noise.detach() ** 2 * energy / M + 0.0 * noise
        assert_close(found, gradients(niw, value), 1e-7)

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("layer", [0, 2])
    def test_frozen_weights_stay_and_the_rest_is_as_if_they_were_shared(self, layer, shape):
        """Whichever layer they are of: as many coordinates, the same KL, and the same posterior."""
        found, support = [], data("gaussian", N)
        for frozen in (True, False):
            torch.manual_seed(1)
            model = network()
            random = "all" if frozen else f"{2 - layer}.*"
            model[layer].requires_grad_(not frozen)
            niw = NIW(
                model, lr=0.1, random=random, allow_nograd=True, noise=0.6, n0=30.0, wishart="full", **SHAPES[shape]
            )
            with torch.no_grad():
                for parameters in (niw.hyper.log_variance, niw.hyper.directions):
                    own = [p for p in parameters if p.requires_grad or not frozen]
                    for p in own[-2:] if layer == 0 else own[:2]:
                        p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
                for p in niw.hyper.columns:
                    p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
            learner = adapted(niw, mse, support)
            post = learner.posterior()
            own = {name: v for name, v in post.variance.items() if name.startswith(str(2 - layer))}
            assert set(post.variance) == set(own)
            found.append([learner.kl(), *own.values(), *post.mean.values()])
            found[-1].append(niw.clone()._latent.n0)
        assert_close(*found)

    def test_frozen_weights_have_no_gradient(self):
        model = network()
        model[0].requires_grad_(False)
        niw = NIW(model, lr=0.1, rank=2, allow_nograd=True)
        learner = adapted(niw, mse, data("gaussian", N))
        mse(learner, *data("gaussian", M)).backward()
        assert model[0].weight.grad is None
        assert niw.hyper.directions[0].grad is None
        assert model[2].weight.grad.abs().max() > 0
        assert niw.hyper.directions[2].grad.abs().max() > 0
        with pytest.raises(ArgumentError, match="requires_grad=False"):
            learner.adapt(mse(learner, *data("gaussian", N)), allow_nograd=False)

    def test_unused_weights(self):
        with pytest.raises(LossError, match="'spare.weight'"):
            adapted(NIW(Spare(), lr=0.1, rank=2), mse, data("gaussian", N), 1)
        niw = NIW(Spare(), lr=0.1, curvature="full", allow_unused=True)
        post = adapted(niw, mse, data("gaussian", N), 1).posterior()
        assert torch.equal(post.mean["spare.weight"], niw.module.spare.weight)
        assert torch.allclose(post.variance["spare.weight"], niw.hyper.log_variance[2].exp())

    def test_inputs_with_a_graph_get_their_gradient(self):
        """Features of a network before the wrapper: as if it were part of the model, and shared."""
        torch.manual_seed(1)
        model, support, query = network(), data("gaussian", N), data("gaussian", M)
        for second_order in ORDERS:
            torch.manual_seed(2)
            whole = NIW(copy.deepcopy(model), lr=0.1, rank=2, random="2.*", second_order=second_order)
            expected = gradients(whole, mse(adapted(whole, mse, support), *query))
            torch.manual_seed(2)
            body, last = copy.deepcopy(model[:2]), copy.deepcopy(model[2])
            niw = NIW(last, lr=0.1, rank=2, second_order=second_order)
            with torch.no_grad():
                for ours, theirs in zip(niw.hyper.directions, whole.hyper.directions):
                    ours.copy_(theirs)
            learner, features = niw.clone(), body(support[0])
            for _ in range(STEPS):
                learner.adapt(F.mse_loss(learner(features), support[1]))
            F.mse_loss(learner(body(query[0])), query[1]).backward()
            assert_close([p.grad for p in (*body.parameters(), *niw.parameters())], expected)


class TestCopies:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_a_state_dict_s_round_trip(self, shape):
        niw, loss = make(shape=shape)
        with torch.no_grad():
            for p in niw.parameters():
                p.add_(0.1 * torch.randn_like(p))
        file = io.BytesIO()
        torch.save(niw.state_dict(), file)
        file.seek(0)
        twin, _ = make(shape=shape)
        twin.load_state_dict(torch.load(file))
        support, query = data("gaussian", N), data("gaussian", M)
        first, second = (gradients(own, loss(adapted(own, loss, support), *query)) for own in (niw, twin))
        assert_close(first, second, 0.0)

    @pytest.mark.parametrize(("own", "other"), [*itertools.permutations(["full", "by layer", "adapters", "chain"], 2)])
    def test_a_state_dict_of_another_kind_raises(self, own, other):
        niw = NIW(network(), lr=0.1, **SHAPES.get(own, {}))
        before = copy.deepcopy(niw.state_dict())
        with pytest.raises(CheckpointError, match="not a state dict of this NIW"):
            niw.load_state_dict(NIW(network(), lr=0.1, **SHAPES.get(other, {})).state_dict())
        for name, value in niw.state_dict().items():
            assert torch.equal(value, before[name])

    def test_so_does_another_rank_another_wishart_and_what_is_not_finite(self):
        niw, _ = make()
        for other in (make(rank=3)[0], make(wishart="full")[0]):
            with pytest.raises(CheckpointError):
                niw.load_state_dict(other.state_dict())
        state = niw.state_dict()
        state["hyper.log_noise"] = torch.tensor(math.nan)
        with pytest.raises(CheckpointError, match="not finite"):
            niw.load_state_dict(state)

    @pytest.mark.parametrize("way", [copy.deepcopy, lambda learner: pickle.loads(pickle.dumps(learner))])
    @pytest.mark.parametrize("kind", ["gaussian", "categorical"])
    @pytest.mark.parametrize("second_order", ORDERS)
    def test_a_copied_learner_continues_equally(self, way, kind, second_order):
        niw, loss = make(kind, second_order=second_order)
        support, query = data(kind, N), data(kind, M)
        learner = adapted(niw, loss, support, 2)
        twin = way(learner)
        values = []
        for own in (learner, twin):
            with torch.no_grad():
                before = own.query(query[0])
            own.adapt(loss(own, *support))
            post = own.posterior()
            values.append([before, loss(own, *query), own.kl(), post.z, post.covariance, *post.variance.values()])
        assert_close(*values, 1e-12)

    def test_a_copied_wrapper_is_its_own(self):
        niw, loss = make()
        support = data("gaussian", N)
        twin = pickle.loads(pickle.dumps(niw))
        expected = adapted(niw, loss, support).posterior().z
        assert torch.allclose(adapted(twin, loss, support).posterior().z, expected)
        with torch.no_grad():
            twin.hyper.directions[0].mul_(2.0)
        assert torch.allclose(adapted(niw, loss, support).posterior().z, expected)

    @pytest.mark.parametrize("second_order", ORDERS)
    @pytest.mark.parametrize("kind", ["gaussian", "categorical"])
    def test_a_learner_s_clone_continues_with_its_graph(self, kind, second_order):
        """Parent and clone each have the gradient of a learner that took all steps."""
        niw, loss = make(kind, second_order=second_order)
        support, query = data(kind, N), data(kind, M)
        expected = [gradients(niw, loss(adapted(niw, loss, support, k), *query)) for k in (3, 2, 3)]
        parent = adapted(niw, loss, support, 2)
        clone = parent.clone()
        clone.adapt(loss(clone, *support))
        losses = [loss(clone, *query), loss(parent, *query)]
        parent.adapt(loss(parent, *support))
        losses.append(loss(parent, *query))
        for own, theirs in zip(losses, expected):
            assert_close(torch.autograd.grad(own, list(niw.parameters()), retain_graph=True), theirs)

    def test_what_is_written_to_the_parameters_later_does_not_change_a_learner(self):
        niw, loss = make()
        support, query = data("gaussian", N), data("gaussian", M)
        learner = niw.clone()
        expected = adapted(niw, loss, support).query(query[0]).detach()
        learner.adapt(loss(learner, *support))
        with torch.no_grad():
            for p in niw.parameters():
                p.add_(1.0)
        for _ in range(STEPS - 1):
            learner.adapt(loss(learner, *support))
        assert torch.allclose(learner.query(query[0]), expected)


def test_diagnostics():
    niw, (x, y) = NIW(nn.Linear(2, 1, bias=False), lr=0.1, curvature="full", noise=0.6, n0=4.0), data("linear", N)
    with pytest.raises(ChainError, match="Clone, adapt, then ask"):
        niw.diagnostics()
    with torch.no_grad():
        niw.hyper.log_variance[0].copy_(torch.tensor([[0.5, -0.5]]))
    adapted(niw, mse, (x, y))
    found, std = niw.diagnostics(), torch.tensor([0.25, -0.25]).exp()
    features = x * std
    covariance = torch.linalg.inv(torch.eye(2) + features.mT @ features / 0.36)
    z = covariance @ features.mT @ (y.flatten() - x @ niw.module.weight.flatten()) / 0.36
    marginal = MultivariateNormal(
        x @ niw.module.weight.flatten(), features @ features.mT + 0.36 * torch.eye(N)
    ).log_prob(y.flatten())
    assert found["share"] == pytest.approx(1 - covariance.trace().item() / 2)
    assert found["length"] == pytest.approx(z.norm().item())
    assert found["evidence"] == pytest.approx(marginal.item())
    assert found["noise"] == pytest.approx(0.6)
    assert found["n0"] == pytest.approx(4.0)
    assert (found["likelihood"], found["second_order"]) == ("gaussian", "all")
    assert found["layers"]["weight"]["prior_std"] == pytest.approx(std.square().mean().sqrt().item())
    assert found["layers"]["weight"]["moved"] == pytest.approx((std * z).square().mean().sqrt().item())


def test_of_a_classification_diagnostics_have_no_noise():
    niw, loss = make("categorical")
    adapted(niw, loss, data("categorical", N))
    assert niw.diagnostics()["noise"] is None
    assert niw.diagnostics()["likelihood"] == "categorical"


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"rank": 2, "prior_precision": 1.0}, "give prior_std"),
            ({"curvature": "full", "prior_precision": 1.0}, "give prior_std"),
            ({"prior_std": 0.1}, "prior_std goes with rank"),
            ({"rank": 2, "inference": "closed_form"}, "no option 'inference' with rank.* There are: add_kl_gradient"),
            ({"rank": 2, "burn_in": 1}, "no option 'burn_in' with rank"),
            ({"rank": 2, "curvature": "ggn"}, "no option 'curvature' with rank"),
            ({"rank": 2, "curvature": "full"}, "two priors: give one"),
            ({"directions": "adapters"}, "needs a rank"),
            ({"curvature": "full", "directions": "by_layer"}, "needs a rank"),
            ({"noise": 0.3}, "noise goes with rank"),
            ({"linearise": "none"}, "no option 'linearise'"),
            ({"rank": 2, "directions": "by_row"}, "directions must be one of"),
            ({"rank": -1}, "rank must be a whole number of at least 0"),
            ({"rank": 1.5}, "rank must be a whole number"),
            ({"rank": 2, "temperature": 0.0}, "temperature must be above 0"),
            ({"curvature": "full", "temperature": 0.0}, "temperature must be above 0"),
            ({"rank": 2, "prior_std": 0.0}, "prior_std must be"),
            ({"rank": 2, "noise": -1.0}, "noise must be"),
            ({"rank": 2, "radius": 0.0}, "radius must be"),
            ({"rank": 2, "likelihood": "poisson"}, "likelihood must be one of"),
            ({"rank": 2, "second_order": "last_layer"}, "second_order must be one of"),
            ({"rank": 2, "n0": 0.0}, "n0"),
        ],
    )
    def test_arguments(self, options, message):
        with pytest.raises(ArgumentError, match=message):
            NIW(network(), lr=0.1, **options)

    def test_options_are_checked_when_they_are_set(self):
        niw, _ = make()
        for name, value in (("temperature", 0.0), ("radius", -1.0), ("burn_in", 1), ("second_order", "last_layer")):
            with pytest.raises(ArgumentError, match=name):
                setattr(niw.options, name, value)
        assert niw.options.temperature == 1.0

    def test_a_model_that_returns_a_tuple(self):
        class Two(nn.Linear):
            def forward(self, x):
                return super().forward(x), x

        niw = NIW(Two(2, 1), lr=0.1, rank=2)
        x, y = data("gaussian", N)
        with pytest.raises(ArgumentError, match="this one returns a tuple"):
            adapted(niw, lambda net, x, y: F.mse_loss(net(x)[0], y), (x, y))

    def test_a_jacobian_that_does_not_fit(self, monkeypatch):
        monkeypatch.setattr(latent_posterior, "LARGEST", 60)
        niw, loss = make(shape="full")  # 17 coordinates
        with pytest.raises(ArgumentError, match="Jacobian of 5 outputs in 17 coordinates.* rank=8"):
            adapted(niw, loss, data("gaussian", 5))
        adapted(niw, loss, data("gaussian", 3))
        batch = [t.unsqueeze(0) for t in data("gaussian", 5)]
        with pytest.raises(ArgumentError, match="Jacobian of 5 outputs"):
            BatchedEpisodes(niw, loss)(batch, batch)

    def test_the_wrapper_itself_is_not_adapted(self):
        niw, loss = make()
        with pytest.raises(ArgumentError, match="adapt a clone"):
            niw.adapt(loss(niw, *data("gaussian", N)))

    def test_calls_before_any_step(self):
        learner = make()[0].clone()
        with pytest.raises(ChainError, match="posterior: .*or pass nll"):
            learner.posterior()
        with pytest.raises(ChainError, match="kl: "):
            learner.kl()
        with pytest.raises(ArgumentError, match="Take a step first"):
            learner.posterior(lambda network: None, steps=0).linearised(torch.zeros(1, 2))

    def test_objectives_that_would_count_twice_or_not_know_n(self):
        niw, loss = make()
        learner = adapted(niw, loss, data("gaussian", N))
        with pytest.raises(ArgumentError, match="add_kl_gradient=False"):
            learner.objective(loss(learner, *data("gaussian", M)))
        niw.options.add_kl_gradient = False
        with pytest.raises(ArgumentError, match="no forwards since its last step"):
            adapted(niw, loss, data("gaussian", N)).objective(torch.zeros(()))

    def test_losses_that_cannot_be_stepped_on(self):
        niw, loss = make()
        x, y = data("gaussian", N)
        learner = niw.clone()
        for value, message in (
            ((learner(x) - y).square(), "scalar"),
            (loss(learner, x, y).detach(), "no graph"),
            (loss(learner, x, y) * math.nan, "is nan"),
            (loss(niw, x, y), "does not depend on this learner's weights"),
            (F.l1_loss(learner(x), y), "not a negative log-likelihood"),
        ):
            with pytest.raises(LossError, match=message):
                learner.adapt(value)
        learner.adapt(loss(learner, x, y))
        stale = loss(learner, x, y)
        learner.adapt(loss(learner, x, y))
        with pytest.raises(LossError, match="came by no forward of this learner since its last step"):
            learner.adapt(stale)
        with pytest.raises(ArgumentError, match="number of examples"):
            learner.adapt(loss(learner, x, y), n=0)

    def test_an_nll_that_leaves_its_network_alone(self):
        niw, loss = make()
        with pytest.raises(LossError, match="must call the network"):
            niw.clone().posterior(lambda network: torch.zeros(()))

    def test_another_likelihood_than_the_wrapper_has_seen(self):
        niw, _ = make()
        adapted(niw, mse, data("gaussian", N), 1)
        with pytest.raises(LossError, match=r"known \(gaussian\)"):
            adapted(niw, binary, data("bernoulli", N), 1)


def test_the_evidence_of_a_head_is_stepped_on():
    """Ordinary steps on a BayesianRidge head's evidence raise it, and the query's prediction is a Gaussian."""
    model = EpisodicModel(MLP(1, (4, 4), nn.Tanh), BayesianRidge(noise=0.3))
    niw = NIW(model, lr=0.1, rank=2, random="backbone.*", prior_std=1.0)
    x = torch.randn(6, 1)
    y = (2 * x).sin()
    learner, values = niw.clone(), []
    for _ in range(30):
        loss = learner(x, y).nll(y)
        values.append(loss.item() * 6 + 0.5 * learner._z.square().sum().item())
        learner.adapt(loss)
    assert values[-1] < values[5] < values[0]
    assert learner(x, y, torch.randn(3, 1)).mean.shape == (3, 1)
    (gradient,) = torch.autograd.grad(learner(x, y).nll(y) * 6 + 0.5 * learner._z.square().sum(), learner._z)
    assert gradient.norm() < 0.1


def test_a_step_that_fails_after_the_graph_was_let_go_says_so(monkeypatch):
    niw, loss = make(second_order="last_step")
    support = data("gaussian", N)
    learner = adapted(niw, loss, support, steps=1)
    value = loss(learner, *support)
    monkeypatch.setattr("l2l_niw.algorithms.latent_learner.step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        learner.adapt(value)
    with pytest.raises(ChainError, match="Clone anew"):
        loss(learner, *support)


def test_means_can_be_stepped_on_with_other_inputs_each_time_without_a_warning(recwarn):
    niw, loss = make("gaussian")
    learner = niw.clone()
    for _ in range(3):
        learner.adapt(loss(learner, *data("gaussian", N)))
    assert not [w for w in recwarn if "NIW" in str(w.message)]


def test_a_scalar_weight_has_a_variance():
    niw = NIW(EpisodicModel(MLP(2, (4,)), BayesianRidge()), 1.0, rank=2, random=["head.prior_scale.log", "backbone.*"])
    scalars = [name for name, p in niw.module.named_parameters() if p.dim() == 0]
    x, y = data("gaussian", N)
    learner = niw.clone()
    learner.adapt(learner(x, y).nll(y))
    variance = learner.posterior().variance
    found = [variance[name] for name in scalars if name in variance]
    assert found
    assert all(v.shape == () and v > 0 for v in found)
    assert niw.diagnostics()["layers"]


def test_a_left_out_head_is_a_categorical_of_what_the_others_say():
    x, y = torch.randn(6, 2), torch.arange(6) % 3
    niw = NIW(EpisodicModel(MLP(2, (4,)), LeaveOneOut(NearestCentroid())), 1.0, rank=2, prior_std=1.0)

    class Logits(nn.Module):
        """The same network, whose outputs are the logits."""

        def __init__(self):
            super().__init__()
            self.model = copy.deepcopy(niw.module)

        def forward(self, x):
            return self.model(x, y).each.logits.squeeze(-2)

    other = NIW(Logits(), 1.0, rank=2)
    other.hyper.load_state_dict(niw.hyper.state_dict())
    found = adapted(niw, lambda net, x, y: net(x, y).nll(y), (x, y)).posterior()
    expected = adapted(other, lambda net, x, y: F.cross_entropy(net(x), y), (x, y)).posterior()
    assert_close([found.z, found.covariance], [expected.z, expected.covariance])
    assert found.z.norm() > 0.1
    batched = BatchedEpisodes(niw, lambda net, x, y: net(x, y).nll(y), steps=STEPS).posterior((x[None], y[None]))
    assert_close([batched.z[0]], [found.z])
