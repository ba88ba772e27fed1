"""Densities of directions against numerical integration, samples and scipy."""

import math

import pytest
import torch
from scipy import integrate, stats

from l2l_niw.errors import ArgumentError
from l2l_niw.metrics import density_rank, projected_normal, r_ece

LAWS = {
    "broad": ([0.3, -0.2], [1.0, 0.7]),
    "away from the origin": ([3.0, 1.0], [0.5, 0.2]),
    "narrow": ([0.6, -0.8], [0.01, 0.02]),
    "around the origin": ([0.0, 0.0], [1.0, 3.0]),
}


def circle(n):
    angle = torch.arange(n, dtype=torch.float64) * 2 * math.pi / n
    return torch.stack([angle.sin(), angle.cos()], -1)


@pytest.mark.parametrize("law", LAWS)
def test_on_the_circle_it_integrates_to_one_and_is_the_integral_over_the_radius(law):
    means, scales = (torch.tensor([part], dtype=torch.float64) for part in LAWS[law])
    density = projected_normal(circle(20_000), means, scales).exp()
    assert density.mean().item() * 2 * math.pi == pytest.approx(1, abs=1e-6)
    normal = [stats.norm(m, s) for m, s in zip(*LAWS[law])]
    for y in circle(7):

        def along(r, y=y):
            return r * normal[0].pdf(r * y[0]) * normal[1].pdf(r * y[1])

        middle = float((y * means[0]).sum().clamp_min(0))
        value, _ = integrate.quad(along, 0, 40, points=[middle, middle + 0.1], limit=500, epsabs=0)
        if value > 1e-12:
            assert projected_normal(y, means, scales).exp().item() == pytest.approx(value, rel=1e-6)


def test_of_a_mixture_on_the_sphere_it_integrates_to_one_and_is_that_of_samples():
    torch.manual_seed(0)
    means, scales = torch.randn(3, 4).double(), 0.2 + torch.rand(3, 4).double()
    log_weights = torch.randn(3)
    y = torch.nn.functional.normalize(torch.randn(200_000, 4).double(), dim=-1)
    surface = 2 * math.pi**2
    for antipodal in (False, True):
        density = projected_normal(y, means, scales, log_weights, antipodal).exp() * surface
        assert density.mean().item() == pytest.approx(1, abs=4 * density.std().item() / len(y) ** 0.5)
    which = torch.distributions.Categorical(logits=log_weights).sample((200_000,))
    x = torch.nn.functional.normalize(means[which] + scales[which] * torch.randn(200_000, 4), dim=-1)
    cap = 0.8  # how often samples are near a direction, and what the density says of that
    found = ((x @ y[0]).abs() > cap).double().mean().item()
    density = projected_normal(y, means, scales, log_weights, antipodal=True).exp() * surface
    assert ((y @ y[0]).abs() > cap).double().mul(density).mean().item() == pytest.approx(found, abs=0.01)


def test_opposite_quaternions_are_one():
    means, scales = torch.randn(2, 4), 0.1 + torch.rand(2, 4)
    y = torch.nn.functional.normalize(torch.randn(5, 4), dim=-1)
    same = projected_normal(y, means, scales, antipodal=True), projected_normal(-y, means, scales, antipodal=True)
    torch.testing.assert_close(*same)
    assert not torch.allclose(projected_normal(y, means, scales), projected_normal(-y, means, scales))


def test_a_uniform_law_has_a_constant_density():
    level = projected_normal(circle(12), torch.zeros(1, 2), torch.full((1, 2), 0.3))
    torch.testing.assert_close(level, torch.full((12,), -math.log(2 * math.pi)).double())


@pytest.mark.parametrize("width", [2, 3, 4])
def test_far_on_the_other_side_it_is_smooth_and_finite(width):
    scale = torch.logspace(0, -5, 2001, dtype=torch.float64).view(-1, 1, 1).expand(-1, 1, width)
    mean = torch.eye(width, dtype=torch.float64)[:1].expand(2001, 1, width)
    away = projected_normal(-mean[:, 0], mean, scale)
    # log of (2 pi)^(-d/2) (d - 1)! s^d exp(-1 / (2 s^2)) where s is small
    s = scale[-1, 0, 0]
    limit = width * s.log() - 0.5 / s**2 + math.log(math.factorial(width - 1)) - width / 2 * math.log(2 * math.pi)
    assert away[-1].item() == pytest.approx(limit.item(), rel=1e-9)
    bent = (away + 0.5 / scale[:, 0, 0] ** 2).diff().diff().abs()
    assert bent.max() < 1e-3  # no jump where the series begins


def test_ranks_of_the_true_predictive_are_uniform_and_those_of_others_are_not():
    means, scales = torch.tensor([[0.5, 0.5], [-1.0, 0.3]]), torch.tensor([[0.3, 0.3], [0.1, 0.4]])
    which = torch.randint(2, (99 + 1, 4000))
    x = torch.nn.functional.normalize(means[which] + scales[which] * torch.randn(100, 4000, 2), dim=-1)
    rank = density_rank(lambda y: projected_normal(y, means, scales), x[1:], x[0])
    assert r_ece((rank + 1) / 100) < 0.02
    assert ((rank + 1) / 100 <= 0.9).double().mean().item() == pytest.approx(0.9, abs=0.02)
    flat = torch.nn.functional.normalize(torch.randn(4000, 2), dim=-1)
    assert r_ece((density_rank(lambda y: projected_normal(y, means, scales), x[1:], flat) + 1) / 100) > 0.1


def test_shapes_and_lengths_are_checked():
    with pytest.raises(ArgumentError, match=r"means and scales must both be \(..., components, 2\)"):
        projected_normal(circle(3), torch.zeros(2), torch.ones(2))
    with pytest.raises(ArgumentError, match="y must be of length 1"):
        projected_normal(2 * circle(3), torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(ArgumentError, match=r"samples must be \(samples, 3, 2\)"):
        density_rank(lambda y: y.sum(-1), torch.zeros(5, 2), circle(3))
