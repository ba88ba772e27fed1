"""The Sine-Line family, its Bayes-optimal predictor, and the metrics of regression."""

import math

import pytest
import scipy.stats
import torch

from l2l_niw.data import SineLine
from l2l_niw.data.sine_line import BayesOptimal
from l2l_niw.errors import ArgumentError
from l2l_niw.metrics import bootstrap, quantile, r_ece, reliability
from l2l_niw.heads.predictions import Gaussian


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_tasks_have_the_protocol_s_points_and_a_seed_repeats_them():
    tasks, again, other = (SineLine().sample(30, seeded(seed)) for seed in (1, 1, 2))
    assert tasks.x.shape == tasks.y.shape == (30, 5, 1)
    assert tasks.x_query.shape == tasks.y_query.shape == (30, 45, 1)
    points = torch.cat([tasks.x, tasks.x_query], 1).squeeze(-1)
    assert torch.equal(points.sort(-1).values, torch.linspace(-5, 5, 50).expand(30, -1))
    assert all(torch.equal(a, b) for a, b in zip(tasks, again))
    assert not torch.equal(tasks.y, other.y)


def test_curves_are_sines_or_lines_in_equal_parts():
    family = SineLine(noise=1e-6)
    tasks = family.sample(2000, seeded())
    x = torch.cat([tasks.x, tasks.x_query], 1).squeeze(-1).double()
    y = torch.cat([tasks.y, tasks.y_query], 1).squeeze(-1).double()
    design = {
        "sine": torch.stack([x.sin(), x.cos()], -1),
        "line": torch.stack([x, torch.ones_like(x)], -1),
    }
    fits = {}
    for name, columns in design.items():
        solution = torch.linalg.lstsq(columns, y.unsqueeze(-1)).solution
        fits[name] = solution.squeeze(-1), (columns @ solution).squeeze(-1).sub(y).abs().amax(-1) < 1e-4
    (sine, is_sine), (line, is_line) = fits["sine"], fits["line"]
    assert (is_sine ^ is_line).all()
    assert 0.45 < is_sine.double().mean() < 0.55
    amplitude, phase = sine[is_sine].norm(dim=-1), torch.atan2(sine[is_sine][:, 1], sine[is_sine][:, 0])
    for values, (low, high) in (
        (amplitude, SineLine.AMPLITUDE), (phase, SineLine.PHASE),
        (line[is_line][:, 0], SineLine.SLOPE), (line[is_line][:, 1], SineLine.INTERCEPT),
    ):  # fmt: skip
        uniform = scipy.stats.uniform(low, high - low)
        assert scipy.stats.kstest(values.numpy(), uniform.cdf).pvalue > 1e-3


def test_the_noise_is_gaussian_of_its_width():
    quiet, noisy = (SineLine(noise=noise).sample(500, seeded()) for noise in (1e-9, 0.3))
    residuals = (noisy.y_query - quiet.y_query).flatten().double() / 0.3
    assert scipy.stats.kstest(residuals.numpy(), "norm").pvalue > 1e-3


@pytest.mark.parametrize(("options", "message"), [
    ({"shots": 0}, "shots"), ({"shots": 50}, "leave a point"), ({"noise": 0.0}, "noise"), ({"points": 1.5}, "points"),
])  # fmt: skip
def test_bad_families_are_named(options, message):
    with pytest.raises(ArgumentError, match=message):
        SineLine(**options)


class TestBayesOptimal:
    def predictions(self, resolution, tasks=40):
        family = SineLine()
        drawn = family.sample(tasks, seeded(3))
        return BayesOptimal(family, resolution)(*drawn.support, drawn.x_query), drawn

    def test_a_finer_grid_changes_nothing(self):
        (coarse, tasks), (fine, _) = self.predictions(100), self.predictions(170)
        assert (coarse.mean - fine.mean).abs().max() < 0.02
        assert abs(coarse.log_prob(tasks.y_query).mean() - fine.log_prob(tasks.y_query).mean()) < 1e-3

    def test_it_equals_importance_sampling_from_the_prior(self):
        """Curves drawn from the prior, weighted by the support's likelihood: no grid."""
        family = SineLine(shots=3, noise=1.0)
        tasks, n = family.sample(5, seeded(4)), 400_000
        found = BayesOptimal(family, 150)(*tasks.support, tasks.x_query).mean.squeeze(-1)
        draws = family_curves(n)
        for i in range(5):
            seen, asked = tasks.x[i].squeeze(-1), tasks.x_query[i].squeeze(-1)
            weights = torch.softmax(-0.5 * (draws(seen) - tasks.y[i].squeeze(-1)).square().sum(-1), 0)
            curves = draws(asked)
            mean = weights @ curves
            error = (weights.square() @ (curves - mean).square()).sqrt()
            assert ((found[i] - mean).abs() < 5 * error + 5e-3).all()

    def test_it_is_calibrated_and_its_error_is_as_it_expects(self):
        prediction, tasks = self.predictions(80, tasks=200)
        assert r_ece(prediction.cdf(tasks.y_query)) < 0.02
        expected = 0.09 + (prediction.weights * (prediction.means - prediction.mean).square()).sum(-1)
        squared = (prediction.mean - tasks.y_query).squeeze(-1).square()
        difference = bootstrap((squared - expected).mean(-1))
        assert difference.low < 0 < difference.high


def family_curves(n):
    """Curves of the family, drawn from its prior without the package's help."""
    u = torch.rand(5, n, 1, generator=seeded(5))
    amplitude, phase, slope, intercept = 0.1 + 4.9 * u[0], math.pi * u[1], 6 * u[2] - 3, 6 * u[3] - 3
    return lambda x: torch.where(u[4] < 0.5, amplitude * torch.sin(x + phase), slope * x + intercept)


class TestRegressionECE:
    def test_the_true_predictive_has_none(self):
        y = torch.randn(200_000, generator=seeded(), dtype=torch.float64)
        assert r_ece(torch.distributions.Normal(0.0, 1.0).cdf(y)) < 2e-3

    @pytest.mark.parametrize("scale", [0.5, 2.0, 4.0])
    def test_a_gaussian_of_the_wrong_scale_has_its_known_value(self, scale):
        y = torch.randn(400_000, generator=seeded(), dtype=torch.float64)
        levels = [j / 20 for j in range(1, 21)]
        norm = scipy.stats.norm
        known = sum(abs(norm.cdf(scale * norm.ppf(p)) - p) for p in levels) / 20
        assert r_ece(torch.distributions.Normal(0.0, scale).cdf(y)) == pytest.approx(known, abs=2e-3)

    def test_the_curve_counts_targets_below_quantiles(self):
        levels, fractions = reliability(torch.tensor([0.05, 0.3, 0.5, 0.9]), bins=4)
        assert levels.tolist() == [0.25, 0.5, 0.75, 1.0]
        assert fractions.tolist() == [0.25, 0.75, 0.75, 1.0]

    @pytest.mark.parametrize("bad", [torch.tensor([]), torch.tensor([0.5, 1.2]), torch.tensor([math.nan])])
    def test_what_is_no_distribution_function_is_refused(self, bad):
        with pytest.raises(ArgumentError, match="cdf"):
            r_ece(bad)


class TestBootstrap:
    def test_its_interval_is_the_central_limit_s(self):
        values = torch.randn(4000, generator=seeded(), dtype=torch.float64).exp()
        found = bootstrap(values, resamples=4000)
        half = 1.96 * values.std().item() / 4000**0.5
        assert found.mean == pytest.approx(values.mean().item())
        assert found.low == pytest.approx(found.mean - half, abs=0.15 * half)
        assert found.high == pytest.approx(found.mean + half, abs=0.15 * half)

    def test_quantiles_are_scipy_s_and_a_mixture_s_own(self):
        means, scales = torch.randn(6, 1, dtype=torch.float64), torch.rand(6, 1, dtype=torch.float64) + 0.1
        far = torch.full_like(means, 50.0)
        for level in (0.05, 0.5, 0.9):
            found = quantile(Gaussian(means, scales).cdf, level, -far, far)
            assert torch.allclose(found, torch.tensor(scipy.stats.norm(means, scales).ppf(level)), atol=1e-10)
        mixture = Gaussian.mix([Gaussian(means, scales), Gaussian(means + 3, 2 * scales)])
        assert torch.allclose(
            mixture.cdf(quantile(mixture.cdf, 0.7, -far, far)), torch.tensor(0.7, dtype=torch.float64)
        )
        with pytest.raises(ArgumentError, match="enclose"):
            quantile(mixture.cdf, 0.7, -far, means - 9)
        with pytest.raises(ArgumentError, match="level"):
            quantile(mixture.cdf, 1.0, -far, far)

    def test_runs_that_differ_widen_it(self):
        """The variance of a mean over runs is theirs over their number, also where there are few."""
        between, within = torch.randn(4, 1, generator=seeded()), torch.randn(4, 3000, generator=seeded())
        found = bootstrap(between + 0.5 * within, resamples=4000)
        half = 1.96 * between.std().item() / 4**0.5
        assert found.high - found.low == pytest.approx(2 * half, rel=0.1)
        assert found.mean == pytest.approx((between + 0.5 * within).mean().item(), abs=1e-6)
        alone = bootstrap((between + 0.5 * within).mean(0))
        assert alone.high - alone.low < 0.2 * half

    def test_pairing_sees_what_scatter_hides(self):
        hard = 10 * torch.rand(500, generator=seeded())
        a, b = hard + 0.1, hard
        assert bootstrap(a - b).low > 0.09
        assert bootstrap(a).low < bootstrap(b).high

    @pytest.mark.parametrize("bad", [torch.tensor([1.0]), torch.tensor([1.0, math.inf]), torch.ones(2, 2, 2)])
    def test_bad_values_are_refused(self, bad):
        with pytest.raises(ArgumentError, match="values"):
            bootstrap(bad)
