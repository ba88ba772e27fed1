"""Which likelihood a loss is of, and W, whose W^T W is the Fisher information: the Hessian of a KL by autograd."""

from functools import partial

import pytest
import torch
from torch.distributions import Bernoulli, Categorical, Independent, MultivariateNormal, Normal, kl_divergence
from torch.nn import functional as F

from l2l_niw.errors import ArgumentError, LossError
from l2l_niw.heads.labels import encode
from l2l_niw.heads.predictions import Classes, Evidence, Gaussian
from l2l_niw.inference.laplace import jacobian
from l2l_niw.inference.likelihood import LIKELIHOODS, Seen, energy, look, parts_of, rebuilt, recognise, root, widened

N, CLASSES, SIZE = 4, 3, 2
NOISE = torch.tensor(0.7, dtype=torch.float64)


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def bent(*shape):
    """A function of z that is not linear."""
    weights, start = torch.randn(*shape, SIZE), torch.randn(shape)
    return lambda z: 2.0 * torch.sin(weights @ z + start)


def means():
    f, y = bent(N, 2), torch.randn(N, 2)
    return f, lambda f: F.mse_loss(f, y), lambda f: Normal(f, NOISE), lambda f: -Normal(f, NOISE).log_prob(y).sum()


def normal(own_noise):
    f, s, y = bent(N, 2), bent(N, 2), torch.randn(N, 2)
    std = (lambda z: (0.2 * s(z)).exp()) if own_noise else (lambda z: NOISE.expand(N, 2))
    total = lambda p: -p.log_prob(y).sum()  # noqa: E731
    return lambda z: Normal(f(z), std(z)), lambda p: total(p) / N, lambda p: p, total


def gaussian():
    """A head's: its last dimension is the target's."""
    f, s, y = bent(N, 2), bent(N, 1), torch.randn(N, 2)
    predict = lambda z: Gaussian(f(z), (0.2 * s(z)).exp())  # noqa: E731
    return predict, lambda p: p.nll(y), lambda p: p.base_dist, lambda p: -p.log_prob(y).sum()


def squared_error_of_a_distribution():
    """The noise of the model's own distribution, though the loss is of its means alone."""
    f, y = bent(N, 2), torch.randn(N, 2)
    std = torch.rand(N, 2) * 0.0 + NOISE
    return (
        lambda z: Independent(Normal(f(z), std), 1),
        lambda p: F.mse_loss(p.mean, y),
        lambda p: p.base_dist,
        lambda p: 0.5 * ((p.mean - y) / NOISE).square().sum(),
    )


def logits(of=lambda f: f, **options):
    f, y = bent(N, CLASSES), torch.randint(CLASSES, (N,))
    return (
        lambda z: of(f(z)),
        lambda f: F.cross_entropy(f, y, **options),
        lambda f: Categorical(logits=f),
        lambda f: F.cross_entropy(f, y, reduction="sum", **{k: v for k, v in options.items() if k != "reduction"}),
    )


def log_softmax():
    f, y = bent(N, CLASSES), torch.randint(CLASSES, (N,))
    total = partial(F.nll_loss, target=y, reduction="sum")
    return lambda z: f(z).log_softmax(-1), lambda f: F.nll_loss(f, y), lambda f: Categorical(logits=f), total


def categorical():
    f, y = bent(N, CLASSES), torch.randint(CLASSES, (N,))
    total = lambda p: -p.log_prob(y).sum()  # noqa: E731
    return lambda z: Categorical(logits=f(z)), lambda p: total(p) / N, lambda p: p, total


def classes():
    f, y = bent(N, CLASSES), torch.tensor([3, 9, 5, 9])
    predict = lambda z: Classes(f(z), encode(y))  # noqa: E731
    return predict, lambda p: p.nll(y), lambda p: Categorical(logits=p.logits), lambda p: -p.log_prob(y).sum()


def binary():
    f, y = bent(N, 1), torch.randint(2, (N, 1)).double()
    total = partial(F.binary_cross_entropy_with_logits, target=y, reduction="sum")
    return f, lambda f: total(f) / N, lambda f: Bernoulli(logits=f), total


def evidence(targets):
    f, s, y = bent(N, 3), bent(), torch.randn(N, targets)

    def exact(p):
        covariance = p.factor @ p.factor.mT + p.noise.square() * torch.eye(N)
        return MultivariateNormal(torch.zeros(targets, N), covariance)

    predict = lambda z: Evidence(f(z), NOISE + 0.1 * s(z), targets)  # noqa: E731
    return predict, lambda p: p.nll(y), exact, lambda p: -exact(p).log_prob(y.mT).sum()


CASES = {
    "means": (means, "gaussian"),
    "normal": (partial(normal, True), "gaussian"),
    "normal of fixed noise": (partial(normal, False), "gaussian"),
    "head's gaussian": (gaussian, "gaussian"),
    "squared error of a distribution": (squared_error_of_a_distribution, "gaussian"),
    "cross-entropy": (logits, "categorical"),
    "summed": (partial(logits, reduction="sum"), "categorical"),
    "smoothed": (partial(logits, label_smoothing=0.2), "categorical"),
    "log-softmax": (log_softmax, "categorical"),
    "categorical": (categorical, "categorical"),
    "head's classes": (classes, "categorical"),
    "binary": (binary, "bernoulli"),
    "evidence": (partial(evidence, 1), "evidence"),
    "evidence of two targets": (partial(evidence, 2), "evidence"),
}


def fisher(predict, exact, z):
    """The Hessian at z of KL(p_z || p_other)."""
    here = exact(predict(z.detach()))
    return torch.autograd.functional.hessian(lambda other: kl_divergence(here, exact(predict(other))).sum(), z)


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    build, name = request.param
    predict, loss, exact, total = build()
    z = torch.randn(SIZE, requires_grad=True)
    outputs = predict(z)
    value = loss(outputs)
    return z, predict, outputs, value, exact, total(outputs), name


def test_w_is_a_root_of_the_fisher_information(case):
    z, predict, outputs, loss, exact, _, name = case
    seen, _ = look(loss, parts_of(outputs), "auto", NOISE, N, create_graph=False)
    w = root(seen, z, partial(jacobian, create_graph=False))
    assert seen.likelihood == name
    assert torch.allclose(w.mT @ w, fisher(predict, exact, z), atol=1e-10)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_a_sure_prediction_has_a_finite_derivative(likelihood):
    """Its probabilities are 0 and 1 in floating point; a square root's derivative there is infinite."""
    z = torch.tensor([2.0, -1.0], requires_grad=True)
    outputs = 1e4 * z.expand(N, SIZE) if likelihood == "categorical" else 1e4 * z
    w = root(Seen(likelihood, (outputs,), NOISE), z, partial(jacobian, create_graph=True))
    (gradient,) = torch.autograd.grad(w.square().sum(), z)
    assert w.isfinite().all()
    assert gradient.isfinite().all()


def test_the_loss_times_its_factor_is_the_negative_log_likelihood(case):
    """Beside a constant, that squared errors leave out, its gradient in z is that of the sum over examples."""
    z, _, outputs, loss, _, total, _ = case
    seen, _ = look(loss, parts_of(outputs), "auto", NOISE, N, create_graph=False)
    found = energy(loss, [seen], z, 1.0, partial(jacobian, create_graph=False), create_graph=False)
    assert torch.allclose(found.gradient, torch.autograd.grad(total, z, retain_graph=True)[0], atol=1e-10)
    assert torch.allclose(found.value, total, atol=1e-10)


@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_a_temperature_divides_the_energy(temperature):
    predict, loss, _, total = means()
    z = torch.randn(SIZE, requires_grad=True)
    outputs = predict(z)
    value, way = loss(outputs), partial(jacobian, create_graph=False)
    seen, _ = look(value, parts_of(outputs), "auto", NOISE, N, create_graph=False)
    found, plain = (energy(value, [seen], z, t, way, create_graph=False) for t in (temperature, 1.0))
    assert torch.allclose(found.value, total(outputs) / temperature)
    assert torch.allclose(found.gradient, plain.gradient / temperature)
    assert torch.allclose(found.w.mT @ found.w, plain.w.mT @ plain.w / temperature)


def test_an_energy_has_the_noise_s_gradient():
    predict, loss, _, _ = means()

    def of(z, log_noise):
        outputs = predict(z)
        value = loss(outputs)
        seen, _ = look(value, parts_of(outputs), "auto", log_noise.exp(), N, create_graph=True)
        return tuple(energy(value, [seen], z, 1.0, partial(jacobian, create_graph=True), create_graph=True))

    assert torch.autograd.gradcheck(of, (torch.randn(SIZE, requires_grad=True), NOISE.log().requires_grad_()))


def recognised(loss, f, names=LIKELIHOODS[1:], lead=0):
    f = f.clone().requires_grad_()
    return recognise(loss(f), f, names, lead, NOISE, create_graph=False)


Y, K, HARD = torch.randn(6, 2), torch.tensor([0, 2, 1, 1, 0, 2]), torch.tensor([0.0, 1, 1, 0, 1, 1]).double()
TOLD = {
    "mse": (lambda f: F.mse_loss(f, Y.double()), (6, 2), "gaussian", 12 / (2 * 0.49)),
    "summed squared error": (lambda f: F.mse_loss(f, Y.double(), reduction="sum"), (6, 2), "gaussian", 1 / 0.98),
    "half a squared error": (lambda f: 0.5 * (f - Y).square().sum(-1).mean(), (6, 2), "gaussian", 6 / 0.49),
    "huber within": (lambda f: F.huber_loss(f, Y.double(), delta=50.0), (6, 2), "gaussian", 12 / 0.49),
    "cross-entropy": (lambda f: F.cross_entropy(f, K), (6, 3), "categorical", 6),
    "summed cross-entropy": (lambda f: F.cross_entropy(f, K, reduction="sum"), (6, 3), "categorical", 1),
    "smoothed": (lambda f: F.cross_entropy(f, K, label_smoothing=0.1), (6, 3), "categorical", 6),
    "two classes": (lambda f: F.cross_entropy(f, K.clamp(max=1)), (6, 2), "categorical", 6),
    "binary": (lambda f: F.binary_cross_entropy_with_logits(f, HARD), (6,), "bernoulli", 6),
    "summed binary": (
        lambda f: F.binary_cross_entropy_with_logits(f, HARD, reduction="sum"),
        (6,),
        "bernoulli",
        1,
    ),
    "several binary": (
        lambda f: F.binary_cross_entropy_with_logits(f, HARD.view(3, 2)),
        (3, 2),
        "bernoulli",
        6,
    ),
}


@pytest.mark.parametrize("scale", [3.0, 1e-1, 1e-5, 0.0])
@pytest.mark.parametrize("name", TOLD)
def test_a_loss_shows_its_likelihood_and_its_factor(name, scale):
    """Also of outputs that hardly differ, as those of a network whose last layer starts at 0."""
    loss, shape, expected, factor = TOLD[name]
    found, got = recognised(loss, scale * torch.randn(shape))
    assert found == expected
    assert got.item() == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("scale", [3.0, 1e-5])
def test_so_it_does_for_outputs_that_are_log_probabilities(scale):
    f = (scale * torch.randn(6, 3)).log_softmax(-1)
    for reduction, factor in (("mean", 6), ("sum", 1)):
        name, got = recognised(lambda f, how=reduction: F.nll_loss(f, K, reduction=how), f)
        assert name == "categorical"
        assert got.item() == pytest.approx(factor)


def test_every_episode_has_its_own_factor():
    y = torch.randn(3, 5, 2)
    sizes = torch.tensor([1.0, 2.0, 4.0])
    loss = lambda f: (sizes * (f - y).square().mean((-2, -1))).sum()  # noqa: E731
    name, factor = recognised(loss, torch.randn(3, 5, 2), lead=1)
    assert name == "gaussian"
    assert torch.allclose(factor, 10 / (2 * 0.49) / sizes)


REFUSED = {
    "l1": lambda f: F.l1_loss(f, torch.zeros_like(f)),
    "huber outside": lambda f: F.huber_loss(f, f.detach() + 5.0, delta=0.1),
    "huber half outside": lambda f: F.huber_loss(f, f.detach() + 5.0 * (f.detach() > 0), delta=0.1),
    "weighted": lambda f: F.cross_entropy(f, K, weight=torch.tensor([1.0, 5.0, 0.2])),
    "weighted squares": lambda f: (torch.tensor([1.0, 2.0, 3.0]) * f.square()).mean(),
    "quartic": lambda f: f.pow(4).mean(),
    "focal": lambda f: ((1 - f.softmax(-1)) ** 2 * -f.log_softmax(-1))[:, 0].mean(),
    "linear": lambda f: f.mean(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_losses_raise_with_a_remedy(name):
    with pytest.raises(LossError, match="Use a squared error, a cross-entropy, .* or NIW without rank"):
        recognised(REFUSED[name], torch.randn(6, 3))


def test_a_given_likelihood_is_the_only_one():
    with pytest.raises(LossError, match=r"known \(bernoulli\)"):
        recognised(lambda f: F.mse_loss(f, Y), torch.randn(6, 2), ("bernoulli",))


def test_outputs_that_are_not_known():
    with pytest.raises(ArgumentError, match="a tensor, a Normal, a Categorical.* returns a tuple"):
        parts_of((torch.zeros(2), torch.zeros(2)))


@pytest.mark.parametrize("name", [n for n in CASES if "evidence" not in n])
def test_outputs_rebuilt_of_other_tensors(name):
    torch.manual_seed(0)
    predict = CASES[name][0]()[0]
    outputs, other = predict(torch.zeros(SIZE)), predict(torch.ones(SIZE))
    found = rebuilt(outputs, parts_of(other).tensors)
    assert type(found) is type(other)
    for ours, theirs in zip(parts_of(found).tensors, parts_of(other).tensors):
        assert torch.allclose(ours, theirs)


def test_a_rebuilt_evidence_has_the_same_likelihood():
    first, other = Evidence(torch.randn(N, 3), NOISE, 2), Evidence(torch.randn(N, 3), 2 * NOISE, 2)
    y = torch.randn(N, 2)
    assert torch.allclose(rebuilt(first, parts_of(other).tensors).log_prob(y), other.log_prob(y))


VARIANCE = torch.tensor([0.2, 1.5, 0.0, 4.0]).double()


def test_a_normal_s_variance_grows():
    p = widened(Normal(torch.arange(4.0), torch.full((4,), 0.5)), None, lambda means: VARIANCE, 0)
    assert torch.allclose(p.mean, torch.arange(4.0))
    assert torch.allclose(p.variance, 0.25 + VARIANCE)


def test_means_without_a_spread_stay():
    f = torch.randn(4, 1)
    assert widened(f, "gaussian", None, 0) is f


@pytest.mark.parametrize("f", [-2.0, 0.5, 3.0])
def test_shrunk_logits_have_nearly_the_averaged_probability(f):
    """MacKay's approximation of the sigmoid's average over a Gaussian."""
    shrunk = widened(torch.full((4,), f), "bernoulli", lambda means: VARIANCE, 0)
    drawn = f + VARIANCE.sqrt() * torch.randn(400_000, 4)
    assert torch.allclose(shrunk.sigmoid(), drawn.sigmoid().mean(0), atol=0.02)
    assert (shrunk.abs()[[0, 1, 3]] < abs(f)).all()


@pytest.mark.parametrize("size", [(2, 2), (3, 2), (5, 8), (10, 8)])
def test_so_have_those_of_several_classes(size):
    """Half as far from the average as the probabilities at the mean are, and nothing changes with a common shift."""
    f, slope, shift = 1.5 * torch.randn(40, size[0]), torch.randn(40, *size) / size[1] ** 0.5, torch.randn(size[1])

    def predict(slope):
        z = torch.zeros(size[1], requires_grad=True)
        variances = lambda means: jacobian(means, z, False).square().sum(-1)  # noqa: E731
        return widened(f + (slope @ z), "categorical", variances, 0).softmax(-1).detach()

    drawn = f + torch.einsum("nkr,sr->snk", slope, torch.randn(20_000, size[1]))
    average = drawn.softmax(-1).mean(0)
    error, without = ((p - average).abs().mean() for p in (predict(slope), f.softmax(-1)))
    assert error < 0.5 * without
    assert torch.allclose(predict(slope + shift), predict(slope))
