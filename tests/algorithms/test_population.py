"""The whole model on a population of linear-Gaussian tasks whose mean and covariance are known.

theta_i ~ N(mu, diag Sigma), y = X theta_i + noise, with orthogonal designs, so that a diagonal posterior is
exact. Chains run on each task's data and the objective is scored on the same data, as the paper has it.
"""

import pytest
import torch
from torch import nn

from l2l_niw import NIW, BatchedEpisodes
from l2l_niw.inference.curvature import GGN
from l2l_niw.inference.objective import expected_kl
from l2l_niw.inference.wishart import WISHARTS

MU = torch.tensor([1.0, -2.0, 0.7, 3.0])
SIGMA = torch.tensor([0.04, 1.0, 0.25, 0.5])
NOISE, N = 0.5, 8
INFERENCE = ["langevin", "closed_form"]


def sample_tasks(*batch):
    """Orthogonal inputs with X^T X = N I, and targets."""
    theta = MU + SIGMA.sqrt() * torch.randn(*batch, 4)
    x = torch.linalg.qr(torch.randn(*batch, N, 4)).Q * N**0.5
    return x, (x @ theta[..., None]).squeeze(-1) + NOISE * torch.randn(*batch, N)


def mean_nll(network, x, y):
    return 0.5 * ((network(x).squeeze(-1) - y) / NOISE).square().mean()


def make(inference, wishart="factorised", curvature=None, **options):
    """lr = NOISE^2 takes a step without noise to the likelihood's mode, and the prior's proximal step to the MAP."""
    curvature = curvature or GGN("gaussian", NOISE, samples=None)
    options = {"second_order": "none", "learn_step_sizes": False, "add_kl_gradient": False, **options}
    return NIW(
        nn.Linear(4, 1, bias=False),
        lr=NOISE**2,
        temperature=1.0,
        prior_precision=1.0,
        inference=inference,
        wishart=wishart,
        curvature=curvature,
        **options,
    )


def sampled_objective(episodes, x, y):
    """Eq. 14 written out: the loss of networks drawn from q_i plus KL / N, where q_i is what `posterior` returns."""
    post = episodes.posterior((x, y))
    outputs = x @ post.rsample()["weight"].transpose(-1, -2)
    q = [post.mean["weight"]], [post.variance["weight"]]
    kl = expected_kl(q, episodes.niw._prior()).mean()
    return mean_nll(lambda _: outputs, x, y) + kl / N


def meta_train(niw, steps, batches, objective, batch=32):
    opt = torch.optim.Adam(niw.parameters(), lr=0.15)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, batches)
    episodes = BatchedEpisodes(niw, mean_nll, steps=steps)
    for _ in range(batches):
        opt.zero_grad()
        objective(episodes, *sample_tasks(batch)).backward()
        opt.step()
        schedule.step()


def learned(niw):
    return niw.module.weight.detach().flatten(), niw.hyper.log_variance[0].detach().exp().flatten()


def assert_recovered(niw):
    mean, variance = learned(niw)
    assert ((mean - MU) / MU).abs().max() < 0.05
    assert (variance / SIGMA - 1).abs().max() < 0.2


def exact_posterior(x, y):
    precision = x.T @ x / NOISE**2 + torch.diag(1 / SIGMA)
    return torch.linalg.solve(precision, x.T @ y / NOISE**2 + MU / SIGMA), torch.linalg.inv(precision)


@pytest.fixture(scope="module", params=[(i, w) for i in INFERENCE for w in WISHARTS], ids="-".join)
def exact(request):
    """Trained with the exact curvature."""
    torch.manual_seed(0)
    niw = make(*request.param)
    meta_train(niw, 1, 300, sampled_objective)
    return niw


def test_meta_training_recovers_the_population(exact):
    assert_recovered(exact)


def test_the_predictive_is_the_exact_bayesian_one(exact):
    for _ in range(5):
        x, y = sample_tasks()
        learner = exact.clone()
        learner.adapt(mean_nll(learner, x, y))
        post = learner.posterior()
        mean, covariance = exact_posterior(x, y)
        x_new = torch.randn(6, 4)
        with torch.no_grad():
            outputs = post.predict(x_new, samples=4000).squeeze(-1)
        exact_variance = (x_new @ covariance * x_new).sum(1)
        assert torch.allclose(post.mean["weight"].flatten(), mean, atol=0.05)
        assert torch.allclose(post.variance["weight"].flatten(), covariance.diagonal(), rtol=0.1)
        assert ((outputs.mean(0) - x_new @ mean).abs() < 0.5 * exact_variance.sqrt()).all()
        assert torch.allclose(outputs.var(0), exact_variance, rtol=0.2)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("lr", [NOISE**2, 0.5 * NOISE**2])
def test_a_chain_with_the_prior_in_it_goes_to_the_exact_posterior(steps, lr):
    """Whatever the learned prior: its distance shrinks by the same factor each step, and is 0 at lr = NOISE^2."""
    niw = make("langevin")
    niw.lr = lr
    with torch.no_grad():
        niw.module.weight.copy_(MU)
        niw.hyper.log_variance[0].copy_(SIGMA.log())
    x, y = sample_tasks()
    learner = niw.clone()
    for _ in range(steps):
        learner.adapt(mean_nll(learner, x, y))
    mean, covariance = exact_posterior(x, y)
    left = ((1 - lr / NOISE**2) / (1 + lr / N / SIGMA)) ** steps
    post = learner.posterior()
    assert torch.allclose(post.mean["weight"].flatten(), mean + left * (MU - mean), atol=1e-5)
    assert torch.allclose(post.variance["weight"].flatten(), covariance.diagonal(), rtol=1e-4)


def test_the_unmodified_path_recovers_the_population_in_closed_form():
    """The query runs a network drawn from q_i, and the KL's gradient is added."""
    niw = make("closed_form")
    meta_train(niw, 1, 300, lambda episodes, x, y: episodes((x, y), (x, y)))
    assert_recovered(niw)


def gradients(niw, value):
    niw.zero_grad()
    value.backward()
    return [p.grad.clone() for p in niw.parameters()]


@pytest.mark.parametrize("second_order", ["none", "all"])
@pytest.mark.parametrize("inference", ["closed_form", "langevin"])
def test_the_objective_of_a_network_drawn_from_a_learners_posterior_is_the_one_written_out(inference, second_order):
    niw = make(inference, second_order=second_order)
    x, y = sample_tasks()
    learner = niw.clone()
    learner.adapt(mean_nll(learner, x, y))
    post = learner.posterior()
    torch.manual_seed(1)
    loss = mean_nll(post.network(post.rsample()), x, y)
    got = gradients(niw, loss + niw.options.kl_weight / N * learner.kl())
    torch.manual_seed(1)
    expected = gradients(niw, sampled_objective(BatchedEpisodes(niw, mean_nll, steps=1), x[None], y[None]))
    for g, e in zip(got, expected):
        assert torch.allclose(g, e, atol=1e-5)


def test_sgld_moments_recover_the_mean_and_the_wide_variances():
    """
    Five noisy steps at T = 1 know the mean as well, but the variance of their iterates is the step's own: variances
    well above NOISE^2 / N, the likelihood's, come out right, and the narrow one, 0.04, is lost in the chain's noise.
    """
    niw = make("closed_form", curvature="sgld", average_iterates=True, burn_in=2)
    meta_train(niw, 5, 200, sampled_objective)
    mean, variance = learned(niw)
    ratio = variance / SIGMA
    assert ((mean - MU) / MU).abs().max() < 0.05
    assert (ratio[1:] - 1).abs().max() < 0.2
    assert ratio[0] < 0.6
