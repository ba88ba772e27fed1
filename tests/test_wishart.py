import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from l2l_niw.wishart import (
    WISHARTS,
    from_raw,
    gap_slope,
    log_determinant_gap,
    lower_bound,
    mode,
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
    m0, v0 = torch.tensor([0.3, -1.0, 2.0]).double(), torch.tensor([0.5, 1.0, 3.0]).double()
    n0 = torch.tensor(5.0).double()
    mean, variance = mode(m0, v0.log(), n0, wishart)

    def density(mean, variance):
        if wishart == "full":
            return niw_log_density(mean, variance, m0, v0, n0, 2.0)
        return sum(niw_log_density(mean[i : i + 1], variance[i : i + 1], m0[i : i + 1], v0[i : i + 1], n0, 2.0)
                   for i in range(3))

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
@given(d=st.integers(1, 300), raw=st.floats(-3.0, 6.0))
def test_the_gap_s_slope_is_its_derivative(wishart, d, raw):
    raw = torch.tensor(raw, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(log_determinant_gap(from_raw(raw, wishart, d), d, wishart), raw)
    assert torch.allclose(gap_slope(raw.detach(), d, wishart), expected, rtol=1e-7, atol=1e-9)
