import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prior_cases import leaves_of, make_prior, with_leaves

from l2l_niw.inference import chain as chains
from l2l_niw.utils._functional import BLOCK, in_blocks
from l2l_niw.inference.chain import (
    Settings,
    as_functions_of_prior,
    init,
    iterate_variance,
    langevin_step,
    mean_of,
    noise_like,
    step,
)


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def flat_prior(*shape):
    return make_prior([torch.zeros(shape)], [torch.zeros(shape)])


def run(chain, gradient, prior, n, settings, steps):
    for _ in range(steps):
        chain = step(chain, [gradient(chain.theta[0])], prior, n, settings)
    return chain


def variance_of(chain, scale=None):
    return iterate_variance(chain, 0, scale)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("n", [1, 10])
def test_long_chain_has_the_moments_of_the_tempered_likelihood(temperature, n):
    repeats = 4000  # independent copies of each coordinate, in one vector
    h, centre = torch.tensor([[0.5], [2.0], [8.0]]), torch.tensor([[1.0], [-2.0], [0.5]])
    settings = Settings(lr=0.02 * n, temperature=temperature, burn_in=500)
    start = init([torch.zeros(3, repeats)])
    chain = run(start, lambda theta: h * (theta - centre) / n, flat_prior(3, repeats), n, settings, steps=1500)
    # a step of lr makes the stationary variance of a linear chain T / (h - lr h^2 / 2n), exactly
    h = h.squeeze(1)
    stationary = temperature / (h - settings.lr * h.square() / (2 * n))
    assert torch.allclose(chain.theta[0].var(1), stationary, rtol=0.08)
    # one path of 1,000 correlated steps varies less about its own mean than the law itself does
    correlation = 1 - settings.lr * h / n
    kept = chain.moments.count
    assert kept == 1000
    lags = torch.arange(1, kept)
    loss = (1 + 2 * ((1 - lags / kept) * correlation[:, None] ** lags).sum(1)) / kept
    assert torch.allclose(variance_of(chain).mean(1), stationary * (1 - loss), rtol=0.03)
    assert torch.allclose(mean_of(chain)[0][0].mean(1), centre.squeeze(1), atol=0.02 * temperature**0.5)


def test_scaled_steps_have_the_same_stationary_law():
    repeats, precision = 8000, 2.0
    scale = torch.tensor([[0.25], [1.0], [4.0]]).expand(3, repeats)
    prior = make_prior([torch.zeros(3, repeats)], [scale.log()])
    settings = Settings(lr=0.005, temperature=1.0, learn_step_sizes=True)
    chain = run(init(prior.m0), lambda theta: precision * theta, prior, 1, settings, 1500)
    assert torch.allclose(chain.theta[0].var(1), torch.tensor(1 / precision), rtol=0.06)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("temperature", "n"), [(1.0, 1), (0.3, 6)])
def test_with_the_prior_in_the_chain_its_law_is_the_exact_posterior(learned, temperature, n):
    """The conjugate posterior of a Gaussian mean: weights that the data settle, and some that the prior does."""
    repeats = 6000
    h, centre = torch.tensor([[2.0], [0.5], [4.0]]), torch.tensor([[1.0], [-2.0], [0.5]])
    m0, variance = torch.tensor([[-1.0], [1.0], [2.0]]), torch.tensor([[2.0], [0.5], [0.2]])
    prior = make_prior([m0.expand(3, repeats)], [variance.log().expand(3, repeats)], initial=0.4)
    settings = Settings(lr=0.01 * n, temperature=temperature, learn_step_sizes=learned, prior_in_chain=True)
    chain = run(init(prior.m0), lambda theta: h * (theta - centre) / n, prior, n, settings, 1500)
    precision = h / temperature + 1 / variance
    mean = (h / temperature * centre + m0 / variance) / precision
    got = chain.theta[0]
    spread = precision.rsqrt()
    assert ((got.mean(1, keepdim=True) - mean).abs() < 5 * spread / repeats**0.5).all()
    assert torch.allclose(got.var(1, keepdim=True), 1 / precision, rtol=0.08)


@pytest.mark.parametrize("learned", [False, True])
def test_without_noise_the_chain_with_the_prior_ends_at_the_map_whatever_the_step_size(learned):
    h, centre = torch.tensor([2.0, 0.5, 4.0]), torch.tensor([1.0, -2.0, 0.5])
    m0, variance = torch.tensor([-1.0, 1.0, 2.0]), torch.tensor([2.0, 0.5, 0.2])
    prior = make_prior([m0], [variance.log()], initial=0.4)
    for lr in (0.05, 0.3):
        settings = Settings(lr, 0.7, noisy=False, learn_step_sizes=learned, prior_in_chain=True)
        chain = run(init(prior.m0), lambda theta: h * (theta - centre), prior, 1, settings, 3000)
        map_estimate = (h / 0.7 * centre + m0 / variance) / (h / 0.7 + 1 / variance)
        assert torch.allclose(chain.theta[0], map_estimate, atol=1e-12)


def test_moments_equal_those_of_the_stored_iterates():
    iterates = torch.randn(20, 7)
    chain, settings = init([torch.zeros(7)]), Settings(lr=1.0, burn_in=5)
    for theta in iterates:
        chain = step(chain, [chain.theta[0] - theta], flat_prior(7), 1, settings)
    kept = iterates[5:]
    assert chain.moments.count == len(kept)
    assert torch.allclose(mean_of(chain)[0][0], kept.mean(0))
    assert torch.allclose(variance_of(chain), kept.var(0, unbiased=False))


@given(steps=st.integers(1, 6), burn_in=st.integers(0, 8), pseudo=st.floats(1e-9, 1.0))
def test_few_samples_never_give_nan(steps, burn_in, pseudo):
    settings = Settings(lr=1.0, temperature=pseudo / 2, noisy=False, burn_in=burn_in)
    chain = init([torch.zeros(3)])
    for _ in range(steps):
        chain = step(chain, [torch.randn(3)], flat_prior(3), 1, settings)
    assert (chain.moments is None) == (steps <= burn_in)
    assert torch.isfinite(1 / variance_of(chain)).all()
    if steps <= burn_in + 1:
        assert torch.equal(mean_of(chain)[0][0], chain.theta[0])
        assert torch.allclose(variance_of(chain), torch.full((3,), pseudo))


@pytest.mark.parametrize("prior_in_chain", [False, True])
def test_without_temperature_a_step_is_gradient_descent(prior_in_chain):
    theta, gradient = torch.randn(5), torch.randn(5)
    settings = Settings(lr=0.1, prior_in_chain=prior_in_chain)
    chain = step(init([theta]), [gradient], flat_prior(5), 3, settings)
    assert torch.equal(chain.theta[0], theta - 0.1 * gradient)


def test_a_weight_without_a_gradient_stays_and_is_not_used():
    prior = make_prior([torch.randn(3), torch.randn(2)], [torch.zeros(3), torch.zeros(2)])
    start = init([torch.randn(3), torch.randn(2)])
    chain = step(start, [None, torch.randn(2)], prior, 1, Settings(0.1, 1.0, prior_in_chain=True))
    assert chain.theta[0] is start.theta[0]
    assert chain.used == (False, True)


def test_a_step_empties_the_list_of_gradients_so_that_they_can_be_freed():
    gradients = [torch.randn(3)]
    step(init([torch.zeros(3)]), gradients, flat_prior(3), 1, Settings(0.1, 1.0))
    assert gradients == []


@pytest.mark.parametrize("burn_in", [None, 0])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_variance_of_iterates_has_a_pseudo_observation_of_the_noise(burn_in, scaled):
    shapes = [(3,), (2, 2), (), (4,)]
    prior = make_prior([torch.randn(s) for s in shapes], [torch.randn(s) for s in shapes])
    chain = init(prior.m0)
    for _ in range(3):
        chain = step(chain, [torch.randn(s) for s in shapes], prior, 2, Settings(0.1, 0.6, burn_in=burn_in))
    for i, shape in enumerate(shapes):
        scale = prior.scale(i) if scaled else None
        squares = torch.zeros(shape) if burn_in is None else chain.moments.squares[i]
        noise = 2 * 0.1 * 0.6 / 2 * (torch.exp(prior.log_variance[i]) if scaled else torch.ones(shape))
        assert torch.allclose(iterate_variance(chain, i, scale), (squares + noise) / (1 if burn_in is None else 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("prior_in_chain", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_the_iterates_of_half_models_stay_half(dtype, learned, prior_in_chain, keep):
    m0, log_variance = torch.randn(6).to(dtype), torch.randn(6, dtype=torch.float32)
    prior = make_prior([m0], [log_variance])
    settings = Settings(0.1, 0.5, False, learned, prior_in_chain, burn_in=0)
    exact = make_prior([m0.double()], [log_variance.double()])
    chain, reference = init(prior.m0), init(exact.m0)
    for _ in range(3):
        gradient = torch.randn(6).to(dtype)
        chain = step(chain, [gradient], prior, 2, settings, [0] if keep else [])
        reference = step(reference, [gradient.double()], exact, 2, settings)
    assert chain.theta[0].dtype == mean_of(chain)[0][0].dtype == dtype
    assert torch.allclose(chain.theta[0].double(), reference.theta[0], atol=0.1)


# how iterates change with L_0


def hand_written(start, m0, log_variance, gradients, noises, n, initial, settings):
    """The iterates as autograd sees them: gradients and noise are constants, V_0 is in D and in P_0."""
    theta, iterates, lr, temperature = start, [], settings.lr, settings.temperature
    for gradient, noise in zip(gradients, noises):
        d = torch.exp(log_variance - initial) if settings.learn_step_sizes else torch.ones_like(m0)
        theta = theta - lr * d * gradient + torch.sqrt(2 * lr * d * temperature / n) * noise
        if settings.prior_in_chain:
            c = lr * d * temperature * torch.exp(-log_variance) / n
            theta = (theta + c * m0) / (1 + c)
        iterates.append(theta)
    return iterates


def derivatives(outputs, leaves, upstream):
    return torch.autograd.grad(outputs, leaves, upstream, retain_graph=True, allow_unused=True, materialize_grads=True)


def assert_moves(origin, sensitivity, expected, leaves, shape):
    """An iterate's derivatives are its origin's, with its sensitivity in log V_0 beside."""
    upstream = torch.randn(shape)
    got = list(derivatives(origin, leaves, upstream))
    if sensitivity is not None:
        assert not sensitivity.requires_grad
        got[-1] = got[-1] + upstream * sensitivity
    for a, b in zip(got, derivatives(expected, leaves, upstream)):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.fixture
def noises(monkeypatch):
    """Every noise that a chain draws, in turn."""
    drawn, draw = [], chains.noise_like
    monkeypatch.setattr(chains, "noise_like", lambda t: drawn.append(draw(t)) or drawn[-1])
    return drawn


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("prior_in_chain", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_root_and_slope_give_autograds_derivatives(noises, learned, noisy, prior_in_chain, elsewhere):
    n, initial, shape, steps = 2, -0.7, (4, 3), 6
    before = make_prior([torch.randn(shape)], [0.5 * torch.randn(shape)], initial=initial)
    m0, log_variance, raw = leaves_of(before)
    prior, gradients = with_leaves(before, [m0, log_variance, raw]), torch.randn(steps, *shape)
    start = torch.randn(shape).requires_grad_() if elsewhere else prior.m0[0]
    settings = Settings(0.3, 0.8, noisy, learned, prior_in_chain, burn_in=2)
    chain = init([start])
    for g in gradients:
        chain = step(chain, [g], prior, n, settings)
    assert len(noises) == (steps if noisy else 0)
    used = noises or torch.zeros(steps, *shape)
    iterates = hand_written(start, prior.m0[0], log_variance, gradients, used, n, initial, settings)
    leaves, moments = [*([start] if elsewhere else []), m0, log_variance], chain.moments
    assert (chain.sensitivity[0] is None) == (not learned and not prior_in_chain)
    assert (chain.origin[0] is start) == (not elsewhere or not prior_in_chain)
    assert not chain.theta[0].requires_grad
    assert torch.allclose(chain.theta[0], iterates[-1], atol=1e-12)
    assert_moves(chain.origin[0], chain.sensitivity[0], iterates[-1], leaves, shape)
    mean = torch.stack(iterates[2:]).mean(0)
    assert torch.allclose(moments.mean[0], mean, atol=1e-12)
    assert_moves(moments.origin[0], moments.sensitivity[0], mean, leaves, shape)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("kinds", [("used", "late"), ("early", "used"), ("early", "late")])
def test_weights_that_some_losses_do_not_depend_on_move_as_they_should(noises, learned, kinds):
    """Used by all three losses, by the last two, or by the first two: those that are not stay where they are."""
    n, shapes, when = 2, [(4, 3), (5,)], {"used": (0, 1, 2), "late": (1, 2), "early": (0, 1)}
    before = make_prior([torch.randn(s) for s in shapes], [0.5 * torch.randn(s) for s in shapes])
    leaves = leaves_of(before)
    prior, settings = with_leaves(before, leaves), Settings(0.3, 0.8, True, learned, True, burn_in=0)
    chain, gradients = init(prior.m0), [[torch.randn(s) for s in shapes] for _ in range(3)]
    drawn = [[], []]
    for t in range(3):
        present = [i for i, kind in enumerate(kinds) if t in when[kind]]
        chain = step(chain, [gradients[t][i] if i in present else None for i in range(2)], prior, n, settings)
        for i, noise in zip(present, noises[-len(present) :]):
            drawn[i].append(noise)
    for i, kind in enumerate(kinds):
        m0, log_variance = leaves[i], leaves[2 + i]
        own = [gradients[t][i] for t in when[kind]]
        moves = hand_written(m0, m0, log_variance, own, drawn[i], n, 0.0, settings)
        iterates = {"used": moves, "late": [m0, *moves], "early": [*moves, moves[-1]]}[kind]
        mean = sum(iterates) / 3
        assert torch.allclose(chain.theta[i], iterates[-1], atol=1e-12)
        assert_moves(chain.origin[i], chain.sensitivity[i], iterates[-1], [m0, log_variance], shapes[i])
        assert torch.allclose(chain.moments.mean[i], mean, atol=1e-12)
        assert_moves(chain.moments.origin[i], chain.moments.sensitivity[i], mean, [m0, log_variance], shapes[i])


@pytest.mark.parametrize("used", [False, True])
def test_a_weight_that_is_replaced_keeps_the_slope_of_its_earlier_iterates_in_the_mean(noises, used):
    """A learner's weights that the user detached: they move with themselves, their mean with both."""
    before = make_prior([torch.randn(5)], [0.5 * torch.randn(5)])
    leaves, gradients = leaves_of(before), torch.randn(2, 5)
    prior, settings = with_leaves(before, leaves), Settings(0.3, 0.8, True, True, burn_in=0)
    chain = step(init(prior.m0), [gradients[0]], prior, 2, settings)
    first = hand_written(leaves[0], leaves[0], leaves[1], gradients[:1], noises, 2, 0.0, settings)[0]
    start = first.detach().clone().requires_grad_()
    chain = chain._replace(theta=[start.detach()], origin=[start], sensitivity=[None])
    chain = step(chain, [gradients[1] if used else None], prior, 2, settings)
    second = start
    if used:
        (second,) = hand_written(start, leaves[0], leaves[1], gradients[1:], noises[1:], 2, 0.0, settings)
    moments = chain.moments
    assert torch.allclose(moments.mean[0], (first + second) / 2, atol=1e-12)
    assert_moves(moments.origin[0], moments.sensitivity[0], (first + second) / 2, [start, *leaves[:2]], (5,))


def test_a_step_that_v0_has_no_part_in_keeps_the_slope():
    """The temperature was set to 0 after the first step."""
    prior = make_prior([torch.randn(5)], [0.5 * torch.randn(5)])
    first = step(init(prior.m0), [torch.randn(5)], prior, 2, Settings(0.3, 0.8, prior_in_chain=True))
    second = step(first, [torch.randn(5)], prior, 2, Settings(0.3, 0.0, prior_in_chain=True))
    assert second.sensitivity[0] is not None
    assert torch.equal(second.sensitivity[0], first.sensitivity[0])


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("prior_in_chain", [False, True])
@pytest.mark.parametrize("with_graph", [(), (0,), (0, 1)])
def test_the_derivatives_of_steps_with_a_graph_are_those_of_their_graph(noises, learned, prior_in_chain, with_graph):
    """Two weights, whose gradients depend on both: on the iterates of those with a graph, not on the others'."""
    initial, steps, shape = 0.2, 4, (3,)
    before = make_prior([*torch.randn(2, *shape)], [*0.5 * torch.randn(2, *shape)], initial=initial)
    leaves, settings = leaves_of(before), Settings(0.3, 0.8, True, learned, prior_in_chain, burn_in=1)
    prior = with_leaves(before, leaves)

    def gradients_at(theta):
        own = [t if i in with_graph else t.detach() for i, t in enumerate(theta)]
        found = own[0].sin() * own[1].cos(), own[0] * own[1].exp()
        return [g if i in with_graph else g.detach() for i, g in enumerate(found)]

    chain = init(prior.m0)
    for _ in range(steps):
        weights = as_functions_of_prior(*chain[:3], prior.log_variance)
        if len(with_graph) == 2:
            chain = chain._replace(origin=weights)
        chain = step(chain, gradients_at(weights), prior, 2, settings, with_graph)
    theta, iterates = leaves[:2], []
    for t in range(steps):
        found = zip(theta, leaves[:2], leaves[2:4], gradients_at(theta), noises[2 * t : 2 * t + 2])
        theta = [hand_written(own, m, v, [g], [e], 2, initial, settings)[0] for own, m, v, g, e in found]
        iterates.append(theta)
    means = [sum(column) / (steps - 1) for column in zip(*iterates[1:])]
    for triple, expected in [(chain[:3], theta), (mean_of(chain), means)]:
        for got, e in zip(as_functions_of_prior(*triple, prior.log_variance), expected):
            assert torch.allclose(got, e, atol=1e-12)
            upstream = torch.randn(shape)
            for a, b in zip(*(derivatives(t, leaves[:4], upstream) for t in (got, e))):
                assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_states_are_never_written_to(learned, elsewhere):
    m0 = torch.randn(BLOCK + 7)
    prior, settings = make_prior([m0], [torch.zeros_like(m0)]), Settings(0.3, 0.8, True, learned, True, burn_in=0)
    chain, states = init([torch.randn_like(m0)] if elsewhere else prior.m0), []
    for _ in range(3):
        chain = step(chain, [torch.randn_like(m0)], prior, 2, settings)
        moments = chain.moments
        tensors = [chain.theta[0], chain.origin[0], chain.sensitivity[0]]
        tensors += [moments.mean[0], moments.origin[0], moments.sensitivity[0], moments.squares[0]]
        states.append((tensors, [t.clone() for t in tensors]))
    assert all(torch.equal(a, b) for now, then in states for a, b in zip(now, then))


# noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (2047,), (2048,), (3, 683), (200, 1001)])
def test_noise_is_standardised_and_independent(dtype, shape):
    tensor = torch.zeros(shape, dtype=dtype)
    draws = torch.stack([noise_like(tensor) for _ in range(max(1, 400_000 // tensor.numel()))])
    assert draws.dtype == dtype
    assert draws.shape[1:] == shape
    x = draws.flatten(1).double()
    size = x.numel()
    assert abs(x.mean()) < 5 / size**0.5
    assert abs(x.var() - 1) < 5 * (2 / size) ** 0.5
    for distance in (1, 2, 8):  # eight values come of one random word
        if x.shape[1] > distance:
            pairs = x[:, distance:] * x[:, :-distance]
            assert abs(pairs.mean()) < 5 / pairs.numel() ** 0.5
    if len(x) > 1:
        pairs = x[1:] * x[:-1]
        assert abs(pairs.mean()) < 5 / pairs.numel() ** 0.5


@pytest.mark.parametrize("size", [5, 5000])
def test_noise_is_repeatable_with_a_seed(size):
    def draw(seed):
        torch.manual_seed(seed)
        return noise_like(torch.zeros(size))

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))


# blocks


def columns(learned, sloped, shrinkages, shapes=((BLOCK + 13,), (300, 500), (500, 300), (4, 5), ())):
    """Large tensors, one whose gradient is not contiguous, one that is not itself, and small ones."""
    theta, gradient, m0 = ([torch.randn(s) for s in shapes] for _ in range(3))
    theta[2] = torch.randn(300, 500).T
    gradient[1] = torch.randn(500, 300).T
    log_variance = [torch.rand(s).add(0.5).log() for s in shapes] if learned else None
    sensitivity = [torch.randn(s) for s in shapes] if sloped else None
    shrinkage = [torch.rand(s) for s in shapes] if shrinkages == "list" else shrinkages
    return theta, gradient, m0, log_variance, shrinkage, sensitivity


def copies(given):
    return [[t.clone() for t in column] if isinstance(column, list) else column for column in given]


@pytest.fixture
def one_stream(monkeypatch):
    """Noise comes from one stream of numbers, whatever the sizes that it is drawn in; the stream can be rewound."""
    numbers, place = torch.randn(400_000), [0]

    def draw(tensor):
        place[0] += tensor.numel()
        return numbers[place[0] - tensor.numel() : place[0]].view(tensor.shape).to(tensor.dtype)

    monkeypatch.setattr(chains, "noise_like", draw)
    return lambda: place.__setitem__(0, 0)


@pytest.mark.parametrize("size", [0.0, 0.3])
@pytest.mark.parametrize("sloped", [False, True])
@pytest.mark.parametrize(("learned", "shrinkages"), [(False, 0.0), (False, "list"), (True, 0.0), (True, 0.2)])
@torch.no_grad()
def test_blocks_are_the_whole_step(one_stream, learned, shrinkages, sloped, size):
    given = columns(learned, sloped, shrinkages)
    expected = langevin_step(*given, 0.1, size)
    one_stream()
    own = copies(given)
    got = in_blocks(langevin_step, (*own, 0.1, size), consumed=1)
    assert own[1] == [None] * len(own[0]), "gradients are let go"
    assert len(got) == len(expected) == 1 + sloped
    for pair in zip(got, expected):
        assert all(torch.equal(a, b) for a, b in zip(*pair))
    for column, before in zip(own, given):
        if isinstance(before, list) and before is not given[1]:
            assert all(torch.equal(a, b) for a, b in zip(column, before)), "states are not written to"


@torch.no_grad()
def test_slopes_of_large_tensors_may_be_written_to(one_stream):
    given = columns(True, True, 0.2)
    new, sensitivities = langevin_step(*given, 0.1, 0.3)
    one_stream()
    own = copies(given)
    before = [t.data_ptr() for t in own[5]]
    got, found = in_blocks(langevin_step, (*own, 0.1, 0.3), consumed=1, written=(1, 5))
    assert all(torch.equal(a, b) for a, b in zip((*got, *found), (*new, *sensitivities)))
    assert all(t.data_ptr() == p for t, p in zip(found, before))
    assert all(torch.equal(a, b) for a, b in zip(own[0], given[0]))


@pytest.mark.parametrize("shrinkages", [0.0, 0.2])
@torch.no_grad()
def test_blocks_noise_is_the_slopes_noise(shrinkages):
    given = columns(True, True, shrinkages)
    log_variance, sensitivity = given[3], given[5]
    clean, still = langevin_step(*given, 0.1, 0.0)
    got, found = in_blocks(langevin_step, (*copies(given), 0.1, 0.3), consumed=1)
    for a, b, new, old, v in zip(got, clean, found, still, log_variance):
        noise = (a - b) / (1 - shrinkages)
        assert torch.allclose(new, old + (1 - shrinkages) * 0.5 * noise, atol=1e-12)
        assert (noise / (0.3 * v.exp().sqrt())).square().mean() == pytest.approx(1.0, abs=5 * (2 / a.numel()) ** 0.5)
    assert len(got) == len(sensitivity)


@torch.no_grad()
def test_several_episodes_step_from_one_m0():
    theta, gradient = ([torch.randn(3, 40_000)] for _ in range(2))
    m0, shrinkage, sensitivity = [torch.randn(40_000)], [torch.rand(40_000)], [torch.randn(3, 40_000)]
    got, found = in_blocks(
        langevin_step, (theta, list(gradient), m0, None, shrinkage, sensitivity, 0.1, 0.0), consumed=1
    )
    for i in range(3):
        own = [theta[0][i]], [gradient[0][i]], m0, None, shrinkage, [sensitivity[0][i]]
        (one,), (moves,) = langevin_step(*own, 0.1, 0.0)
        assert torch.equal(got[0][i], one)
        assert torch.equal(found[0][i], moves)
