import mpmath
import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from prior_cases import make_prior
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from l2l_niw import NIW
from l2l_niw.inference.wishart import (
    WISHARTS,
    from_raw,
    gap_gradient,
    initial_degrees,
    log_determinant_gap,
    lower_bound,
    multidigamma,
    to_raw,
)


def scipy_multidigamma(a, d):
    return sum(scipy.special.digamma(a + (1 - j) / 2) for j in range(1, d + 1))


@given(d=st.integers(1, 200), excess=st.floats(1e-3, 1e3))
def test_multidigamma_equals_scipy_sum(d, excess):
    a = (d - 1) / 2 + excess
    expected = scipy_multidigamma(a, d)
    assert multidigamma(torch.tensor(a, dtype=torch.float64), d).item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(d=st.integers(1, 60), excess=st.floats(0.05, 50.0))
def test_multidigamma_gradient_is_the_sum_of_trigammas(d, excess):
    a = torch.tensor((d - 1) / 2 + excess, dtype=torch.float64, requires_grad=True)
    multidigamma(a, d).backward()
    expected = sum(scipy.special.polygamma(1, a.item() + (1 - j) / 2) for j in range(1, d + 1))
    assert a.grad.item() == pytest.approx(expected, rel=1e-8)


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.numel = max(self.numel, result.numel())
        return result


def test_multidigamma_in_millions_of_dimensions_is_exact_and_touches_scalars_only():
    d = 10_000_000
    a = torch.tensor(d / 2 + 3.0, dtype=torch.float64)
    j = torch.arange(1, d + 1, dtype=torch.float64)
    expected = torch.digamma(a + (1 - j) / 2).sum().item()
    with LargestTensor() as largest:
        value = multidigamma(a, d)
    assert value.item() == pytest.approx(expected, rel=1e-10)
    assert largest.numel == 1, "psi_d must be far cheaper than one normal sample of that size"


def test_expected_log_determinant_against_scipy_inverse_wishart():
    d, n0 = 4, 9.0
    v0 = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    draws = scipy.stats.invwishart(df=n0, scale=torch.diag(v0).numpy()).rvs(40_000, random_state=0)
    logdets = torch.linalg.slogdet(torch.from_numpy(draws)).logabsdet
    gap = log_determinant_gap(torch.tensor(n0, dtype=torch.float64), d, "full")
    standard_error = logdets.std() / len(logdets) ** 0.5
    assert abs(logdets.mean() - (v0 / n0).log().sum() - gap) < 4 * standard_error


def niw_log_density(mean, variance, m0, v0, n0, l0):
    """log of the NIW density over a diagonal Sigma, up to a constant, for one Wishart over d weights."""
    d = len(m0)
    log_p_mean = -0.5 * variance.log().sum() - 0.5 * l0 * ((mean - m0).square() / variance).sum()
    return log_p_mean - 0.5 * (n0 + d + 1) * variance.log().sum() - 0.5 * (v0 / variance).sum()


@pytest.mark.parametrize("wishart", WISHARTS)
def test_mode_maximises_the_density(wishart):
    m0, v0, n0 = torch.tensor([0.3, -1.0, 2.0]).double(), torch.tensor([0.5, 1.0, 3.0]).double(), 5.0
    (mean,), (variance,) = make_prior([m0], [(v0 / n0).log()], n0, wishart=wishart).mode()

    def density(mean, variance):
        if wishart == "full":
            return niw_log_density(mean, variance, m0, v0, n0, 2.0)
        parts = ((t[i : i + 1] for t in (mean, variance, m0, v0)) for i in range(3))
        return sum(niw_log_density(*part, n0, 2.0) for part in parts)

    mean, variance = mean.requires_grad_(), variance.requires_grad_()
    gradients = torch.autograd.grad(density(mean, variance), (mean, variance))
    assert all(g.abs().max() < 1e-10 for g in gradients)
    for scale in (0.9, 1.1):
        assert density(mean, variance * scale) < density(mean, variance)


@pytest.mark.parametrize("wishart", WISHARTS)
@given(excess=st.floats(1e-3, 1e4), d=st.integers(1, 10_000_000))
def test_degrees_of_freedom_survive_their_parametrisation(wishart, excess, d):
    n0 = lower_bound(wishart, d) + excess
    raw = torch.tensor(to_raw(n0, wishart, d), dtype=torch.float64)
    assert from_raw(raw, wishart, d).item() == pytest.approx(n0, rel=1e-9)


@pytest.mark.parametrize("wishart", WISHARTS)
@given(raw=st.floats(-30, 30))
def test_degrees_of_freedom_never_leave_their_domain(wishart, raw):
    d = 1000
    assert from_raw(torch.tensor(raw), wishart, d).item() > lower_bound(wishart, d)


@pytest.mark.parametrize("wishart", WISHARTS)
@pytest.mark.parametrize("d", [1, 3, 7])
def test_degrees_of_freedom_start_one_above_the_smallest_integer_or_at_the_authors_one(wishart, d):
    niw = NIW(nn.Linear(d, 1, bias=False), lr=0.1, wishart=wishart)
    n0 = niw._prior().n0.item()
    assert n0 == pytest.approx(initial_degrees(wishart, d), rel=1e-6)
    assert n0 == pytest.approx(d + 1 if wishart == "full" else 1, rel=1e-6)


def sum_over_weights(term, d, wishart):
    """The sum over j = 0 .. d - 1, where d one-dimensional Wisharts have j = 0 each."""
    return sum(map(term, range(d))) if wishart == "full" else d * term(0)


@pytest.mark.parametrize("wishart", WISHARTS)
@given(d=st.integers(1, 100), raw=st.floats(-3.0, 6.0))
def test_the_gaps_gradient_is_its_derivative(wishart, d, raw):
    """By a sum of trigammas: d gap / d raw = exp(raw) (d / n_0 - psi_d'(n_0 / 2) / 2)."""
    excess = mpmath.exp(raw)
    n0 = lower_bound(wishart, d) + excess
    trigammas = sum_over_weights(lambda j: mpmath.psi(1, (n0 - j) / 2), d, wishart)
    expected = float(excess * (d / n0 - trigammas / 2))
    leaf = torch.tensor(raw, dtype=torch.float64, requires_grad=True)
    for graph in (False, True):
        with torch.set_grad_enabled(graph):
            found = gap_gradient(leaf, d, wishart)
        assert found.item() == pytest.approx(expected, rel=1e-7, abs=1e-9)
        assert found.requires_grad == graph


@pytest.mark.parametrize("wishart", WISHARTS)
@pytest.mark.parametrize("d", [1, 3, 1000])
def test_the_gaps_gradient_can_be_differentiated_again(wishart, d):
    leaf = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda raw: gap_gradient(raw, d, wishart), leaf)


@pytest.mark.parametrize("graph", [False, True])
def test_the_gradient_at_a_constant_is_a_constant(graph):
    leaf = torch.tensor(0.7, dtype=torch.float64)
    with torch.no_grad():
        expected = gap_gradient(leaf, 5, "full")
    with torch.set_grad_enabled(graph):
        found = gap_gradient(leaf, 5, "full")
    assert torch.allclose(found, expected)
    assert not found.requires_grad


def exact_gap(n0, d, wishart):
    """The gap with 60 digits."""
    with mpmath.workdps(60):
        half = mpmath.mpf(n0) / 2
        return sum_over_weights(lambda j: mpmath.log(half) - mpmath.psi(0, half - mpmath.mpf(j) / 2), d, wishart)


def exact_slope(n0, d, wishart):
    """The gap's derivative in n_0 with 60 digits."""
    with mpmath.workdps(60):
        half = mpmath.mpf(n0) / 2
        return sum_over_weights(lambda j: 1 / half - mpmath.psi(1, half - mpmath.mpf(j) / 2), d, wishart) / 2


def gap_and_slope(n0, d, wishart):
    leaf = torch.tensor(n0, dtype=torch.float64, requires_grad=True)
    gap = log_determinant_gap(leaf, d, wishart)
    return gap.item(), torch.autograd.grad(gap, leaf)[0].item()


@pytest.mark.parametrize("wishart", WISHARTS)
@pytest.mark.parametrize("d", [1, 3, 1000])
@pytest.mark.parametrize("n0", [1e8, 1e10, 1e12, 1e14, 1e16])
def test_the_gap_does_not_cancel_where_n0_is_large(wishart, d, n0):
    gap, slope = gap_and_slope(n0, d, wishart)
    assert gap > 0 > slope
    assert gap == pytest.approx(float(exact_gap(n0, d, wishart)), rel=1e-6)
    assert slope == pytest.approx(float(exact_slope(n0, d, wishart)), rel=1e-6)
    with torch.no_grad():
        in_raw = gap_gradient(torch.tensor(to_raw(n0, wishart, d), dtype=torch.float64), d, wishart)
    assert in_raw.item() == pytest.approx(slope * (n0 - lower_bound(wishart, d)), rel=1e-6)


@pytest.mark.parametrize("wishart", WISHARTS)
@pytest.mark.parametrize("d", [1, 3, 1000])
def test_the_gap_and_its_slope_are_continuous_where_the_series_takes_over(wishart, d):
    switch = 2e4 * (d if wishart == "full" else 1)
    for n0 in (switch * (1 - 1e-9), switch * (1 + 1e-9)):
        gap, slope = gap_and_slope(n0, d, wishart)
        assert gap == pytest.approx(float(exact_gap(n0, d, wishart)), rel=1e-5)
        assert slope == pytest.approx(float(exact_slope(n0, d, wishart)), rel=1e-5)
    grid = switch * torch.logspace(-2, 2, 200, dtype=torch.float64)
    values = torch.stack([log_determinant_gap(n0, d, wishart) for n0 in grid])
    assert (values[1:] < values[:-1]).all(), "the gap falls as n_0 grows"
