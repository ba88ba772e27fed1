"""A learner in the prior's coordinates: its objective's gradient, its states, its copies, and what it refuses."""

import copy
import io
import itertools
import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Independent, MultivariateNormal, Normal
from torch.nn import functional as F

from l2l_niw import NIW, BatchedEpisodes, EpisodicModel
from l2l_niw.algorithms.latent_learner import LatentLearner
from l2l_niw.errors import ArgumentError, ChainError, CheckpointError, LossError
from l2l_niw.heads import BayesianRidge
from l2l_niw.inference import latent_posterior
from l2l_niw.models import MLP

N, M, STEPS = 5, 4, 3
ORDERS = ("none", "last_step", "all")


@pytest.fixture(autouse=True)
def in_double(double):
    pass


class Head(nn.Module):
    """A network that returns a distribution of means and standard deviations, or of logits."""

    def __init__(self, kind):
        super().__init__()
        self.body, self.last, self.kind = nn.Linear(2, 4), nn.Linear(4, 4), kind

    def forward(self, x):
        f = self.last(torch.tanh(self.body(x)))
        if self.kind == "categorical":
            return Categorical(logits=f, validate_args=False)
        p = Normal(f[..., :2], F.softplus(f[..., 2:]) + 0.3, validate_args=False)
        return Independent(p, 1, validate_args=False) if self.kind == "independent" else p


def network(outputs=1):
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs))


def data(kind, n):
    x = torch.randn(n, 2)
    if kind in ("gaussian", "linear"):
        return x, x.sum(-1, keepdim=True).sin()
    if kind in ("normal", "independent"):
        return x, x.sin()
    if kind == "bernoulli":
        return x, (x[:, :1] > 0).double()
    return x, (x.abs().sum(-1) * 1.3).long().clamp(max=2)


def mse(net, x, y):
    return F.mse_loss(net(x), y)


def cross_entropy(net, x, y):
    return F.cross_entropy(net(x), y)


def binary(net, x, y):
    return F.binary_cross_entropy_with_logits(net(x), y)


def nll(net, x, y):
    return -net(x).log_prob(y).sum() / len(x)


KINDS = {
    "linear": (lambda: nn.Linear(2, 1), mse),
    "gaussian": (network, mse),
    "categorical": (lambda: network(3), cross_entropy),
    "bernoulli": (network, binary),
    "normal": (lambda: Head("normal"), nll),
    "independent": (lambda: Head("independent"), nll),
    "distribution of classes": (lambda: Head("categorical"), nll),
}
SHAPES = {
    "full": {"curvature": "full"},
    "rank 2": {"rank": 2, "prior_std": 1.0},
    "by layer": {"rank": 2, "directions": "by_layer", "prior_std": 1.0},
    "adapters": {"rank": 2, "directions": "adapters", "prior_std": 1.0},
}


def make(kind="gaussian", shape="rank 2", **options):
    build, loss = KINDS[kind]
    given = {"noise": 0.6, "n0": 3.0, **SHAPES[shape], **options}
    return NIW(build(), lr=0.1, **given), loss


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
    niw, loss = make(kind, first_order=True, linearise=False)
    support, query = data(kind, N), data(kind, M)
    learner = adapted(niw, loss, support)
    found = gradients(niw, loss(learner.query, *query))
    z, unit = learner.posterior().z, learner._progress.solution.unit
    weights = {
        name: p + torch.tensordot(z, u, 1)
        for (name, p), u in zip(niw.module.named_parameters(), niw.hyper.directions)
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

    def test_a_support_s_outputs_have_no_spread_in_them(self):
        """Those of a query do; the two differ by the declared role alone."""
        niw, loss = make("categorical")
        support = data("categorical", N)
        learner = adapted(niw, loss, support)
        weights = dict(learner.named_parameters())
        plain = torch.func.functional_call(niw.module, {k.partition(".")[2]: w for k, w in weights.items()}, support[0])
        assert torch.allclose(learner(support[0]), plain)
        assert not torch.allclose(learner.query(support[0]).softmax(-1), plain.softmax(-1))
        niw.options.linearise = False
        assert torch.allclose(learner.query(support[0]), plain)

    def test_a_step_on_a_query_s_outputs_is_warned_of(self):
        niw, loss = make("categorical")
        learner = adapted(niw, loss, data("categorical", N), 1)
        with pytest.warns(UserWarning, match="a step was taken on the loss of a query's outputs"):
            learner.adapt(loss(learner, *data("categorical", N)))

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
