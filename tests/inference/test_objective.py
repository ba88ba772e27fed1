"""The expected KL, the objective, and how both reach L_0."""

import weakref

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from prior_cases import leaves_of, make_prior, with_leaves

from l2l_niw.inference import objective as objectives
from l2l_niw.inference.chain import Settings, init, step
from l2l_niw.inference.closed_form import draw, episode_posterior
from l2l_niw.inference.curvature import GGN, SGLD
from l2l_niw.inference.objective import Episode, Tag, Tagged, constant_kl_gradient, expected_kl, objective
from l2l_niw.inference.posterior import chain_precision
from l2l_niw.inference.wishart import WISHARTS, gap_gradient

D, SHAPES = 4, [(2, 3), (4,), ()]


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def l0_and_q(wishart, shapes=((D,),)):
    """L_0, and means and variances of q_i."""
    prior = make_prior([torch.randn(s) for s in shapes], [0.5 * torch.randn(s) - 1 for s in shapes], wishart=wishart)
    return prior, ([torch.randn(s) for s in shapes], [torch.rand(s) + 0.1 for s in shapes])


@pytest.fixture(params=[True, False], ids=["small", "large"])
def either_size(request, monkeypatch):
    """Few weights, which are worked on together, or so many that each tensor is by itself."""
    if not request.param:
        monkeypatch.setattr(objectives, "SMALL", 0)


def gaussian_kl(mean, variance, mu, sigma):
    """KL(N(mean, diag variance) || N(mu, sigma)) for a full matrix sigma."""
    p = torch.distributions.MultivariateNormal(mu, sigma)
    q = torch.distributions.MultivariateNormal(mean, torch.diag(variance))
    return torch.distributions.kl_divergence(q, p)


@pytest.mark.parametrize("wishart", WISHARTS)
def test_expected_kl_equals_monte_carlo_over_the_wishart(wishart):
    prior, q = l0_and_q(wishart)
    n0, v0 = prior.n0.item(), prior.n0 * prior.log_variance[0].exp()
    if wishart == "full":
        sigmas = scipy.stats.invwishart(df=n0, scale=torch.diag(v0).numpy()).rvs(40_000, random_state=1)
        sigmas = torch.from_numpy(sigmas)
    else:  # the inverse of IW(v0, n0) in one dimension is a Gamma
        sigmas = torch.diag_embed(1.0 / torch.distributions.Gamma(n0 / 2, v0 / 2).sample((40_000,)))
    kls = gaussian_kl(q[0][0], q[1][0], prior.m0[0], sigmas)
    assert abs(kls.mean() - expected_kl(q, prior)) < 4 * kls.std() / len(kls) ** 0.5


@pytest.mark.parametrize("wishart", WISHARTS)
@pytest.mark.parametrize("shapes", [[(D,)], SHAPES])
def test_expected_kl_equals_the_papers_printed_formula(either_size, wishart, shapes):
    prior, q = l0_and_q(wishart, shapes)
    m0, log_variance, mean, variance = (
        torch.cat([t.flatten() for t in own]) for own in (prior.m0, prior.log_variance, *q)
    )
    d, n0 = len(m0), prior.n0
    j = torch.arange(1, d + 1)
    psi = torch.digamma(n0 / 2 + (1 - j) / 2).sum() if wishart == "full" else d * torch.digamma(n0 / 2)
    v0 = n0 * log_variance.exp()
    constant = -d * torch.log(torch.tensor(2 * torch.e)) - psi
    quadratic = n0 * ((mean - m0).square() / v0).sum() + n0 * (variance / v0).sum()
    printed = 0.5 * (constant + (v0.log() - variance.log()).sum() + quadratic)
    assert torch.allclose(expected_kl(q, prior), printed, atol=1e-12)


def test_the_kl_of_several_episodes_is_the_sum(either_size):
    prior, _ = l0_and_q("full", SHAPES)
    q = [torch.randn(3, *s) for s in SHAPES], [torch.rand(3, *s) + 0.1 for s in SHAPES]
    each = [expected_kl(([m[i] for m in q[0]], [v[i] for v in q[1]]), prior) for i in range(3)]
    assert torch.allclose(expected_kl(q, prior), sum(each))
    shared = prior._replace(m0=[m.expand(3, *m.shape) for m in prior.m0])
    assert torch.allclose(expected_kl(q, shared), sum(each))


positive, real = st.floats(1e-3, 1e3), st.floats(-10, 10)


@given(m=real, v=positive, m0=real, v0=positive, n0=positive)
def test_the_factorised_kl_is_never_negative(m, v, m0, v0, n0):
    m, v, m0, v0 = (torch.tensor([x]) for x in (m, v, m0, v0))
    assert expected_kl(([m], [v]), make_prior([m0], [v0.log()], n0)) >= 0


@pytest.mark.parametrize("wishart", WISHARTS)
def test_gradients_of_f_plus_half_g_by_gradcheck(wishart):
    prior, _ = l0_and_q(wishart)
    m_bar, a, target = torch.randn(D), torch.rand(D) * 5 + 0.1, torch.randn(D)
    deviation = torch.randn(D) / a.sqrt()

    def total(*leaves):
        own = with_leaves(prior, leaves)
        m0, p0 = own.m0[0], own.precision(0)
        f = (draw(m0, p0, m_bar, a, deviation) - target).pow(4).sum()
        q = episode_posterior(m0, p0, m_bar, a)
        return objective(f, expected_kl(([q[0]], [q[1]]), own), 0.7, 3)

    assert torch.autograd.gradcheck(total, tuple(leaves_of(prior)))


def test_the_objective_is_in_units_of_the_mean_loss():
    assert objective(torch.tensor(2.0), torch.tensor(6.0), 0.5, 4).item() == 2.75


# the KL's gradient


@pytest.mark.parametrize("wishart", WISHARTS)
def test_the_hand_written_gradient_is_autograds(wishart):
    before, q = l0_and_q(wishart, SHAPES)
    before = before._replace(start=3.0)
    leaves, mean, a = leaves_of(before), [t.requires_grad_() for t in q[0]], [1 / v for v in q[1]]
    prior = with_leaves(before, leaves)
    expected = torch.autograd.grad(0.3 * expected_kl((mean, q[1]), prior), [*mean, *leaves])
    with torch.no_grad():
        in_mean, in_variance = constant_kl_gradient(mean, prior.m0, prior.scale, a, prior.start, 0.3)
        in_n0 = 0.5 * 0.3 * gap_gradient(prior.raw_n0, prior.d, wishart)
    found = [*in_mean, *(-g for g in in_mean), *in_variance, in_n0]
    assert len(found) == len(expected)
    for got, e in zip(found, expected):
        assert torch.allclose(got, e, atol=1e-13)


# iterates as functions of L_0, and the KL's carrier

WAYS = {"langevin": (True, SGLD()), "closed form": (False, SGLD()), "langevin, GGN": (True, GGN())}
KINDS = {
    "rooted": ["rooted"] * 3,
    "unrooted": ["unrooted"] * 3,
    "kept": ["kept"] * 3,
    "of each kind": ["rooted", "unrooted", "kept"],
}
every_way = pytest.mark.parametrize("way", WAYS)
every_kind = pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)


class Case:
    """
    An episode with arbitrary values. Rooted weights have m_0 for their center, unrooted ones a tensor of their own, and
    kept ones a graph: a function of m_0, of V_0, and of a tensor of their own.
    """

    def __init__(self, way, kinds, wishart="full", kl_weight=0.3, used=(True, True, True), sloped=True):
        prior_in_chain, self.curvature = WAYS[way]
        before, (values, _) = l0_and_q(wishart, SHAPES)
        before = before._replace(start=1.7)
        self.leaves, self.kinds = leaves_of(before), kinds
        self.prior = with_leaves(before, self.leaves)
        self.settings = Settings(0.2, 0.6, self.curvature.noisy, prior_in_chain=prior_in_chain, burn_in=0)
        chain = init([m.detach() for m in self.prior.m0])
        for _ in range(3):
            gradients = [torch.randn(s) if u else None for s, u in zip(SHAPES, used)]
            chain = step(chain, gradients, self.prior, 2, self.settings)
        if self.curvature.needs_outputs:
            chain = chain._replace(observed=[torch.rand(s) + 0.5 for s in SHAPES])
        self.values, self.own = values, [torch.randn(s).requires_grad_() for s in SHAPES]
        self.slope = [torch.randn(s) if sloped and k != "kept" else None for s, k in zip(SHAPES, kinds)]
        self.center, self.mean, self.constant = [], [], []
        for i, kind in enumerate(kinds):
            self.center.append(self.own[i] if kind == "unrooted" else self.prior.m0[i])
            self.mean.append(self.kept(i, self.prior) if kind == "kept" else values[i])
            self.constant += [] if kind == "kept" else [i]
        state = chain, self.prior, self.curvature, self.settings
        self.episode = Episode(self.mean, self.center, self.slope, self.constant, *state, kl_weight)
        self.precisions = chain_precision(chain, range(3), *state[1:])
        self.complete = [prior_in_chain and self.curvature.noisy and u for u in used]
        self.parameters = [*self.leaves, *(t for t, kind in zip(self.own, kinds) if kind != "rooted")]

    def kept(self, i, prior):
        return self.own[i] * prior.m0[i].sin() + prior.scale[i].square()

    def written_out(self):
        """The iterates and the KL as autograd sees them."""
        prior, means, q = with_leaves(self.prior, self.leaves), [], []
        for i, kind in enumerate(self.kinds):
            if kind == "kept":
                means.append(self.kept(i, prior))
            else:
                center = self.own[i] if kind == "unrooted" else prior.m0[i]
                mean = self.values[i] + (center - center.detach())
                if self.slope[i] is not None:
                    mean = mean + self.slope[i] * (prior.log_variance[i] - prior.log_variance[i].detach())
                means.append(mean)
            a = self.precisions[i]
            own = episode_posterior(prior.m0[i], prior.precision(i), means[i], a)
            mean = means[i] if self.settings.prior_in_chain else own[0]
            q.append((mean, 1 / a if self.complete[i] else own[1]))
        return means, expected_kl(([m for m, _ in q], [v for _, v in q]), prior)


def gradients_of(outputs, case, upstream=None, **options):
    options = {"allow_unused": True, **options}
    return torch.autograd.grad(outputs, case.parameters, upstream, **options)


def assert_close(found, expected, tolerance=1e-12):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert torch.allclose(a, b, atol=tolerance)


N = torch.tensor([7.0, 0.0], dtype=torch.float64)


@every_way
@every_kind
@pytest.mark.parametrize("wishart", WISHARTS)
def test_the_kls_gradient_arrives_with_n(either_size, way, kinds, wishart):
    case = Case(way, kinds, wishart)
    _, carrier = case.episode.follow()
    assert not carrier.any()
    found = gradients_of(carrier, case, N, materialize_grads=True)
    _, kl = case.written_out()
    assert_close(found, gradients_of(0.3 / 7 * kl, case, materialize_grads=True))


@every_way
@pytest.mark.parametrize("used", [(True, False, True), (False, True, True), (True, True, False)])
def test_the_kls_gradient_is_that_of_weights_that_no_loss_used_too(either_size, way, used):
    case = Case(way, KINDS["of each kind"], used=used)
    _, carrier = case.episode.follow()
    found = gradients_of(carrier, case, N, materialize_grads=True)
    assert_close(found, gradients_of(0.3 / 7 * case.written_out()[1], case, materialize_grads=True))


@every_way
@every_kind
@pytest.mark.parametrize("sloped", [False, True])
def test_a_loss_and_the_kl_send_their_gradients_together(either_size, way, kinds, sloped):
    case, direction = Case(way, kinds, sloped=sloped), [torch.randn(s) for s in SHAPES]

    def loss(iterates):
        return sum((t.sin() * v).sum() for t, v in zip(iterates, direction))

    iterates, carrier = case.episode.follow()
    assert all(torch.equal(a, b) for a, b in zip(iterates, case.mean))
    found = gradients_of([loss(iterates), carrier], case, [torch.tensor(1.0), N], materialize_grads=True)
    means, kl = case.written_out()
    assert_close(found, gradients_of(loss(means) + 0.3 / 7 * kl, case, materialize_grads=True))


def cubes(iterates):
    return sum(t.pow(3).sum() for t in iterates)


def hessian_vector_product(outputs, case, upstream=None):
    directions = [torch.linspace(-1.0, 1.0, t.numel()).view_as(t) for t in case.parameters]
    gradients = gradients_of(outputs, case, upstream, create_graph=True, materialize_grads=True)
    product = sum((g * v).sum() for g, v in zip(gradients, directions))
    return gradients_of(product, case, materialize_grads=True)


@every_kind
def test_iterates_can_be_differentiated_again(either_size, kinds):
    case = Case("langevin", kinds)
    iterates, _ = case.episode.follow()
    found = hessian_vector_product(cubes(iterates), case)
    assert_close(found, hessian_vector_product(cubes(case.written_out()[0]), case))


@every_way
@every_kind
def test_the_kls_gradient_can_be_differentiated_again(either_size, way, kinds):
    case = Case(way, kinds)
    iterates, carrier = case.episode.follow()
    found = hessian_vector_product([cubes(iterates), carrier], case, [torch.tensor(1.0), N])
    means, kl = case.written_out()
    assert_close(found, hessian_vector_product(cubes(means) + 0.3 / 7 * kl, case), 1e-11)


def test_a_loss_on_tagged_iterates_can_be_differentiated_again():
    case = Case("closed form", KINDS["kept"])
    iterates, carrier = case.episode.follow()
    found = hessian_vector_product(cubes(tagged(7, 0, carrier, *iterates)[1]), case)
    means, kl = case.written_out()
    assert_close(found, hessian_vector_product(cubes(means) + 0.3 / 7 * kl, case), 1e-11)


@every_way
@every_kind
def test_a_gradient_with_a_graph_is_the_gradient_without(either_size, way, kinds):
    case = Case(way, kinds)
    iterates, carrier = case.episode.follow()
    outputs, upstream = [cubes(iterates), carrier], [torch.tensor(1.0), N]
    without = gradients_of(outputs, case, upstream, retain_graph=True, materialize_grads=True)
    assert_close(gradients_of(outputs, case, upstream, create_graph=True, materialize_grads=True), without)


def test_a_frozen_n0_keeps_no_other_parameter_from_being_differentiated_again():
    case = Case("langevin", KINDS["rooted"])
    case.leaves[-1].requires_grad_(False)
    prior = with_leaves(case.prior, case.leaves)
    state = case.episode.chain, prior, case.curvature, case.settings
    _, carrier = Episode(case.mean, prior.m0, case.slope, case.constant, *state, 0.3).follow()
    found = torch.autograd.grad(carrier, case.leaves[:-1], N, create_graph=True)
    case.parameters = case.leaves[:-1]
    assert_close(found, gradients_of(0.3 / 7 * case.written_out()[1], case, materialize_grads=True))


@pytest.mark.parametrize("sloped", [True, False])
@pytest.mark.parametrize("kinds", [KINDS["rooted"], KINDS["unrooted"]])
def test_iterates_follow_their_centers_and_v0(either_size, kinds, sloped):
    case = Case("langevin", kinds, sloped=sloped)
    iterates, _ = case.episode.follow()
    assert all(torch.equal(a, b) for a, b in zip(iterates, case.values))
    upstream = [torch.randn(s) for s in SHAPES[:2]]  # the third has no part in the loss
    leaves = [*(case.leaves if kinds[0] == "rooted" else case.own)[:3], *case.leaves[3:6]]
    found = torch.autograd.grad(iterates[:2], leaves, upstream, allow_unused=True)
    for i, gradient in enumerate(upstream):
        assert torch.equal(found[i], gradient)
        assert torch.allclose(found[3 + i], gradient * case.slope[i]) if sloped else found[3 + i] is None
    assert found[2] is found[5] is None


def test_a_kept_iterate_is_given_back_as_it_is():
    case = Case("langevin", KINDS["of each kind"])
    iterates, _ = case.episode.follow()
    assert iterates[2] is case.mean[2]
    assert not any(t is m for t, m in zip(iterates[:2], case.mean))


@every_kind
@pytest.mark.parametrize("released", [False, True])
def test_without_a_kl_every_parameter_has_a_gradient_of_zero(either_size, kinds, released):
    case = Case("langevin", kinds, kl_weight=0.3 if released else 0.0)
    _, carrier = case.episode.follow()
    if released:
        case.episode.release()
    carrier.backward(N)
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in case.leaves)


@every_way
@every_kind
def test_with_a_kl_every_parameter_has_a_gradient(either_size, way, kinds):
    case = Case(way, kinds, sloped=False)
    _, carrier = case.episode.follow()
    carrier.backward(N)
    assert all(t.grad is not None for t in case.leaves)


def test_what_is_not_back_propagated_sends_nothing():
    case = Case("langevin", KINDS["of each kind"])
    iterates, _ = case.episode.follow()
    found = gradients_of(iterates[0].sum(), case, retain_graph=True)
    assert [g is not None for g in found] == [True, False, False, True, False, False, False, False, False]
    (kept,) = torch.autograd.grad(iterates[2].sum(), case.own[2])
    assert torch.equal(kept, case.leaves[2].sin())


def test_a_released_episode_holds_nothing_and_its_iterates_follow_their_centers_alone():
    case = Case("langevin", KINDS["of each kind"])
    iterates, carrier = case.episode.follow()
    held = [weakref.ref(t) for t in (*case.slope[:2], *case.episode.chain.theta, case.values[0])]
    case.episode.release()
    case.slope = case.values = case.mean = None
    assert all(ref() is None for ref in held)
    outputs, upstream = [iterates[0].sum(), iterates[1].sum(), carrier], [None, None, N]
    found = gradients_of(outputs, case, upstream, materialize_grads=True)
    expected = [torch.zeros_like(t) for t in case.parameters]
    expected[0], expected[len(case.leaves)] = torch.ones(SHAPES[0]), torch.ones(SHAPES[1])
    assert_close(found, expected)


# which forwards are behind a loss


def tagged(n, part, carrier, *weights, found=None):
    tag = Tag([] if found is None else found)
    tag.n = n
    return tag, Tagged.apply(tag, part, carrier, *weights)


def leaves_and_carrier():
    return torch.zeros(2, requires_grad=True), torch.randn(3, requires_grad=True)


@pytest.mark.parametrize("part", [0, 1])
def test_the_number_of_examples_is_the_sum_over_the_forwards_behind_a_loss(part):
    (carrier, weight), found = leaves_and_carrier(), []
    views = [tagged(n, part, carrier, weight, found=found)[1][0] for n in (5, 7, 100)]
    assert all(torch.equal(v, weight) for v in views)
    (views[0].square().sum() + views[1].sum()).backward()  # the third forward has no part in it
    assert carrier.grad.tolist() == ([0.0, 12.0] if part else [12.0, 0.0])
    assert sorted(tag.n for tag in found) == [5, 7]
    assert torch.allclose(weight.grad, 2 * weight.detach() + 1)


@pytest.mark.parametrize(("first", "second"), [((0, 1), (0, 1)), ((0, 1), (0,)), ((0, 1), (1,)), ((0,), (0, 1))])
def test_a_forwards_two_parts_are_counted_apart(first, second):
    """Forwards of 5 and 7 examples, behind a loss that depends on some of their parts."""
    carrier, body, last = torch.zeros(2, requires_grad=True), *torch.randn(2, 3, requires_grad=True)
    found, loss = [], 0.0
    for n, parts in ((5, first), (7, second)):
        tag = Tag(found)
        tag.n = n
        views = [Tagged.apply(tag, part, carrier, (body, last)[part])[0] for part in (0, 1)]
        loss = loss + sum(views[part].sum() for part in parts)
    (gradient,) = torch.autograd.grad(loss, carrier)
    expected = [sum(n for n, parts in ((5, first), (7, second)) if part in parts) for part in (0, 1)]
    assert gradient.tolist() == expected
    assert [tag.n for tag in sorted(found, key=lambda t: t.n)] == [5, 7]


@pytest.mark.parametrize("counts", [(7.0, 0.0), (0.0, 7.0), (7.0, 3.0), (3.0, 7.0), (7.0, 7.0)])
def test_the_larger_count_is_the_number_of_examples(counts):
    case = Case("langevin", KINDS["of each kind"])
    _, carrier = case.episode.follow()
    found = gradients_of(carrier, case, torch.tensor(counts), materialize_grads=True)
    assert_close(found, gradients_of(0.3 / 7 * case.written_out()[1], case, materialize_grads=True))


@every_kind
def test_a_loss_on_tagged_iterates_has_the_kls_gradient_with_their_number(kinds):
    case = Case("langevin", kinds)
    iterates, carrier = case.episode.follow()
    forwards = [tagged(n, 0, carrier, *iterates)[1] for n in (4, 3)]
    found = gradients_of(sum(map(cubes, forwards)), case, materialize_grads=True)
    means, kl = case.written_out()
    expected = 2 * cubes(means) + 0.3 / 7 * kl
    assert_close(found, gradients_of(expected, case, materialize_grads=True))


def test_a_forward_that_a_step_was_taken_on_does_not_count():
    carrier, weight = leaves_and_carrier()
    tag, (view,) = tagged(5, 0, carrier, weight)
    _, (other,) = tagged(7, 0, carrier, weight)
    tag.stepped_on = True
    view.sum().backward()
    assert carrier.grad is None
    assert tag.found == [tag]
    (tagged(3, 0, carrier, view)[1][0].sum() + other.sum()).backward()
    assert carrier.grad.tolist() == [10.0, 0.0]


def test_a_forward_is_found_once_and_its_weights_without_a_gradient_get_none():
    carrier, weight = leaves_and_carrier()
    unused = torch.randn(2, requires_grad=True)
    tag, (view, other) = tagged(5, 0, carrier, weight, unused)
    for _ in range(2):
        view.sum().backward(retain_graph=True)
    assert tag.found == [tag]
    assert unused.grad is None
    assert torch.equal(other, unused)


def test_a_tag_counts_without_a_carrier_that_wants_to_know():
    weight = torch.randn(3, requires_grad=True)
    tag, (view,) = tagged(5, 0, torch.zeros(2), weight)
    view.square().sum().backward()
    assert tag.found == [tag]
    assert torch.allclose(weight.grad, 2 * weight.detach())
