"""How the objective's gradient reaches L_0: iterates as its functions, and the KL that comes with a loss."""

import weakref

import pytest
import torch
from prior_cases import leaves_of, make_prior, with_leaves

from l2l_niw.utils import _functional as functional
from l2l_niw.inference.chain import Settings, as_functions_of_prior, init, mean_of, step
from l2l_niw.inference.closed_form import episode_posterior
from l2l_niw.inference.curvature import GGN, SGLD
from l2l_niw.inference.meta_gradient import State, Tag
from l2l_niw.inference.objective import expected_kl
from l2l_niw.inference.posterior import chain_precision
from l2l_niw.inference.wishart import WISHARTS

SHAPES = [(2, 3), (4,), ()]
WAYS = {"langevin": (True, SGLD()), "closed form": (False, SGLD()), "langevin, GGN": (True, GGN())}
KINDS = {"rooted": ["rooted"] * 3, "unrooted": ["unrooted"] * 3, "of each kind": ["rooted", "unrooted", "rooted"]}
every_way = pytest.mark.parametrize("way", WAYS)
every_kind = pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def in_double(double):
    pass


@pytest.fixture(params=[True, False], ids=["small", "large"])
def either_size(request, monkeypatch):
    """Tensors of few weights, which are worked on as they are, or of so many that it is done in blocks."""
    if not request.param:
        monkeypatch.setattr(functional, "BLOCK", 2)


class Case:
    """
    An episode with arbitrary values. Rooted weights move with m_0, unrooted ones with a tensor of their own. With
    `averaged` the KL is that of iterates' means, which have values, origins and sensitivities of their own.
    """

    def __init__(self, way, kinds, wishart="full", kl_weight=0.3, used=(True, True, True), sloped=True, averaged=False):
        prior_in_chain, self.curvature = WAYS[way]
        m0, log_variance = [torch.randn(s) for s in SHAPES], [0.5 * torch.randn(s) - 1 for s in SHAPES]
        before = make_prior(m0, log_variance, wishart=wishart)._replace(start=1.7)
        self.leaves, self.kinds = leaves_of(before), kinds
        self.prior = with_leaves(before, self.leaves)
        self.settings = Settings(0.2, 0.6, self.curvature.noisy, prior_in_chain=prior_in_chain, burn_in=0)
        chain = init([m.detach() for m in self.prior.m0])
        for _ in range(3):
            gradients = [torch.randn(s) if u else None for s, u in zip(SHAPES, used)]
            chain = step(chain, gradients, self.prior, 2, self.settings)
        if self.curvature.needs_outputs:
            chain = chain._replace(observed=[torch.rand(s) + 0.5 for s in SHAPES])
        self.own = []
        means = self.iterates(sloped)
        last = self.iterates(sloped) if averaged else means
        moments = chain.moments._replace(mean=means[0], origin=means[1], sensitivity=means[2])
        self.chain = chain._replace(theta=last[0], origin=last[1], sensitivity=last[2], moments=moments)
        self.iterates = last
        self.state = State(last, self.chain, self.prior, self.curvature, self.settings, kl_weight)
        self.precisions = [chain_precision(self.chain, i, self.prior, self.curvature, self.settings) for i in range(3)]
        self.complete = [prior_in_chain and self.curvature.noisy and u for u in used]
        self.parameters = [*self.leaves, *self.own]

    def iterates(self, sloped):
        origin = list(self.prior.m0)
        for i, kind in enumerate(self.kinds):
            if kind == "unrooted":
                self.own.append(torch.randn(SHAPES[i]).requires_grad_())
                origin[i] = self.own[-1] * 1.0
        return [torch.randn(s) for s in SHAPES], origin, [torch.randn(s) if sloped else None for s in SHAPES]

    def written_out(self):
        """The iterates and the KL as autograd sees them."""
        prior, q = self.prior, []
        for i, mean in enumerate(as_functions_of_prior(*mean_of(self.chain), prior.log_variance)):
            own = episode_posterior(prior.m0[i], prior.precision(i), mean, self.precisions[i])
            mean = mean if self.settings.prior_in_chain else own[0]
            q.append((mean, 1 / self.precisions[i] if self.complete[i] else own[1]))
        return as_functions_of_prior(*self.iterates, prior.log_variance), expected_kl(
            ([m for m, _ in q], [v for _, v in q]), prior
        )

    def loss(self, weights=None, n=7):
        """A loss of one forward with n examples."""
        loss = cubes(self.state.weights() if weights is None else weights)
        self.state.tags.append(Tag(n, loss))
        return loss


def cubes(iterates):
    return sum(t.pow(3).sum() for t in iterates)


def gradients_of(outputs, case, **options):
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True, **options}
    return torch.autograd.grad(outputs, case.parameters, **options)


def assert_close(found, expected, tolerance=1e-12):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert torch.allclose(a, b, atol=tolerance)


@every_way
@every_kind
@pytest.mark.parametrize("wishart", WISHARTS)
@pytest.mark.parametrize("sloped", [False, True])
@pytest.mark.parametrize("averaged", [False, True])
def test_a_loss_and_the_kl_send_their_gradients_together(either_size, way, kinds, wishart, sloped, averaged):
    case = Case(way, kinds, wishart, sloped=sloped, averaged=averaged)
    weights = case.state.weights()
    assert all(torch.equal(a, b) for a, b in zip(weights, case.iterates[0]))
    found = gradients_of(case.loss(weights), case)
    iterates, kl = case.written_out()
    assert_close(found, gradients_of(cubes(iterates) + 0.3 / 7 * kl, case))


@every_way
@pytest.mark.parametrize("used", [(True, False, True), (False, True, True), (True, True, False)])
def test_the_kls_gradient_is_that_of_weights_that_no_loss_used_too(either_size, way, used):
    case = Case(way, KINDS["of each kind"], used=used)
    found = gradients_of(case.loss(), case)
    iterates, kl = case.written_out()
    assert_close(found, gradients_of(cubes(iterates) + 0.3 / 7 * kl, case))


def hessian_vector_product(outputs, case):
    directions = [torch.linspace(-1.0, 1.0, t.numel()).view_as(t) for t in case.parameters]
    product = sum((g * v).sum() for g, v in zip(gradients_of(outputs, case, create_graph=True), directions))
    return gradients_of(product, case)


@every_way
@every_kind
def test_gradients_can_be_differentiated_again(either_size, way, kinds):
    case = Case(way, kinds)
    found = hessian_vector_product(case.loss(), case)
    iterates, kl = case.written_out()
    assert_close(found, hessian_vector_product(cubes(iterates) + 0.3 / 7 * kl, case), 1e-11)


@every_way
@every_kind
def test_a_gradient_with_a_graph_is_the_gradient_without(either_size, way, kinds):
    case = Case(way, kinds)
    loss = case.loss()
    without = gradients_of(loss, case)
    assert_close(gradients_of(loss, case, create_graph=True), without)


def test_a_frozen_n0_keeps_no_other_parameter_from_being_differentiated_again():
    case = Case("langevin", KINDS["rooted"])
    case.leaves[-1].requires_grad_(False)
    prior = with_leaves(case.prior, case.leaves)
    case.chain = case.chain._replace(origin=prior.m0, moments=case.chain.moments._replace(origin=prior.m0))
    case.prior, case.iterates = prior, case.chain[:3]
    case.state = State(case.iterates, case.chain, prior, case.curvature, case.settings, 0.3)
    case.parameters = case.leaves[:-1]
    found = gradients_of(case.loss(), case, create_graph=True)
    iterates, kl = case.written_out()
    assert_close(found, gradients_of(cubes(iterates) + 0.3 / 7 * kl, case))


def test_what_is_not_back_propagated_sends_nothing():
    case = Case("langevin", KINDS["of each kind"])
    weights = case.state.weights()
    found = gradients_of(weights[0].sum(), case, materialize_grads=False)
    assert [g is not None for g in found] == [True, False, False, True, False, False, False, False]
    assert torch.equal(found[0], torch.ones(SHAPES[0]))
    assert torch.equal(found[3], case.iterates[2][0])


@pytest.mark.parametrize("kinds", [KINDS["rooted"], KINDS["of each kind"]])
@pytest.mark.parametrize("released", [False, True])
def test_without_a_kl_every_parameter_has_a_gradient(either_size, kinds, released):
    case = Case("langevin", kinds, kl_weight=0.3 if released else 0.0)
    weights = case.state.weights()
    if released:
        case.state.release(with_graph=())
    loss = weights[0].sum()
    case.state.tags.append(Tag(7, loss))
    loss.backward()
    assert all(t.grad is not None for t in case.leaves)
    assert not any(t.grad.any() for t in (*case.leaves[1:3], *case.leaves[4:]))


def test_a_released_state_holds_the_slopes_of_kept_weights_alone():
    case = Case("langevin", KINDS["of each kind"])
    weights = case.state.weights()
    held = [weakref.ref(t) for t in (*case.iterates[2][:2], *case.iterates[0])]
    sensitivity = case.iterates[2][2]
    case.state.release(with_graph=(2,))
    case.chain = case.iterates = None
    assert all(ref() is None for ref in held)
    found = gradients_of(sum(w.sum() for w in weights), case)
    assert torch.equal(found[5], sensitivity)
    assert not found[3].any()
    assert torch.equal(found[0], torch.ones(SHAPES[0]))


# which forwards are behind a loss


@every_kind
def test_examples_are_summed_over_the_forwards_behind_a_loss(kinds):
    case = Case("langevin", kinds)
    weights = case.state.weights()
    losses = [case.loss(weights, n) for n in (4, 3, 100)]  # the third forward has no part in it
    found = gradients_of(losses[0] + losses[1], case)
    iterates, kl = case.written_out()
    expected = gradients_of(2 * cubes(iterates) + 0.3 / 7 * kl, case)
    assert_close(found, expected)
    gradients_of(losses[2], case)
    assert_close(gradients_of(losses[0] + losses[1], case), expected)


def test_a_forward_that_a_step_was_taken_on_does_not_count():
    case = Case("langevin", KINDS["of each kind"])
    weights = case.state.weights()
    losses = [case.loss(weights, n) for n in (5, 7)]
    case.state.tags[0].stepped_on = True
    iterates, kl = case.written_out()
    assert_close(gradients_of(losses[0], case), gradients_of(cubes(iterates), case))
    assert_close(gradients_of(sum(losses), case), gradients_of(2 * cubes(iterates) + 0.3 / 7 * kl, case))


def test_a_forward_knows_the_back_propagations_that_came_by():
    x = torch.randn(3, requires_grad=True)
    used, other = x.exp(), x.sin()
    tags = [Tag(2, {"outputs": [used]}), Tag(3, (other,)), Tag(4, "nothing to see")]
    assert [tag.is_behind() for tag in tags] == [False, False, True], "what cannot be seen counts"
    used.sum().backward()
    assert [tag.is_behind() for tag in tags] == [True, False, True]
    assert torch.equal(x.grad, used.detach())
    tags[0].task = None
    assert not tags[0].is_behind()


def test_a_forwards_own_inputs_do_not_tell_of_it():
    x = torch.randn(3, requires_grad=True)
    tag = Tag(2, (x, x.exp()), [id(x)])
    x.sum().backward()
    assert not tag.is_behind()
