"""A mixture of NIWs: in loops, in batches, at meta-test, and on populations whose exact answer is known."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from latent_cases import cross_entropy, mse, network, nll
from torch import nn
from torch.distributions import MultivariateNormal, Normal
from torch.nn import functional as F

from l2l_niw import NIW, BatchedEpisodes
from l2l_niw.algorithms import NIWMixture
from l2l_niw.errors import ArgumentError, CheckpointError, LossError, ModelError
from l2l_niw.heads.predictions import Gaussian
from l2l_niw.inference.mixture import Energies, mixture_objective

WAYS = {
    "langevin": {"temperature": 0.01},
    "closed form": {"temperature": 0.01, "inference": "closed_form"},
    "rank": {"rank": 2},
    "full": {"curvature": "full", "noise": 0.5},
}
B, N, M = 3, 5, 4


def tasks():
    x, x_query = torch.randn(B, N, 2), torch.randn(B, M, 2)
    return (x, x.sum(-1, keepdim=True).sin()), (x_query, x_query.sum(-1, keepdim=True).sin())


def gradients(niw):
    return [p.grad.clone() for p in niw.parameters()]


def same(a, b):
    return all(torch.allclose(x, y, atol=1e-10) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("how", ["components", "list"])
def test_one_component_is_the_plain_wrapper(how, options):
    model, results = network(), []
    for given, kw in ((model, {}), (model, {"components": 1}) if how == "components" else ([model], {})):
        torch.manual_seed(1)
        niw = NIW(given, 0.1, **kw, **options)
        assert type(niw) is NIW
        assert niw.module is model
        niw.zero_grad()
        support, query = tasks()
        BatchedEpisodes(niw, mse, steps=2)(support, query).backward()
        results.append(gradients(niw))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kl", [True, False])
@pytest.mark.parametrize("responsibilities", ["evidence", "uniform"])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_components_that_are_the_same_count_as_one(options, responsibilities, kl, double):
    options = {**options, "add_kl_gradient": kl, "temperature": 0.0 if "rank" not in options else 1.0}
    if "curvature" in options or "rank" in options:
        options["temperature"] = 1.0
    else:
        options |= {"kl_weight": 0.0, "learn_step_sizes": False}
    model = network()
    one, several = (
        NIW(copy.deepcopy(model), 0.1, **options),
        NIW([copy.deepcopy(model) for _ in range(3)], 0.1, **options),
    )
    for part in several.components:
        part.load_state_dict(one.state_dict())
    support, query = tasks()
    losses = []
    for niw in (one, several):
        losses.append(BatchedEpisodes(niw, mse, steps=2, responsibilities=responsibilities)(support, query))
        losses[-1].backward()
    assert torch.allclose(*losses, atol=1e-12)
    total = [sum(p) for p in zip(*([q.grad for q in part.parameters()] for part in several.components), strict=True)]
    assert same(gradients(one), total)


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_permuted_components_permute_everything(options, double):
    options = {**options, "temperature": 1.0} if "rank" in options or "curvature" in options else {"temperature": 0.0}
    models, order, results = [network() for _ in range(3)], [2, 0, 1], []
    niw = NIW(models, 0.1, **options)
    other = NIW([copy.deepcopy(models[k]) for k in order], 0.1, **options)
    with torch.no_grad():
        niw.log_weights.copy_(torch.randn(3))
        other.log_weights.copy_(niw.log_weights[order])
    for part, k in zip(other.components, order):
        part.load_state_dict(niw.components[k].state_dict())
    support, query = tasks()
    for own in (niw, other):
        episodes = BatchedEpisodes(own, mse, steps=2)
        loss = episodes(support, query)
        loss.backward()
        results.append((loss, episodes.posterior(support).responsibilities))
    assert torch.allclose(results[0][0], results[1][0])
    assert torch.allclose(results[0][1][:, order], results[1][1])
    assert torch.allclose(niw.log_weights.grad[order], other.log_weights.grad)
    for part, k in zip(other.components, order):
        assert same(gradients(part), gradients(niw.components[k]))


QUIET = {"temperature": 1e-12, "prior_precision": 1e13}  # hardly any noise, and a prior as strong as the data


class NoVmap(nn.Module):
    """A network with control flow that looks at values."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        return self.net(x) if x.sum().item() < 1e9 else x


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_model_that_cannot_be_vmapped_runs_in_a_loop(options, double):
    options = {**options, "temperature": 1.0} if "rank" in options or "curvature" in options else {**options, **QUIET}
    niw = NIW([NoVmap() for _ in range(2)], 0.1, **options)
    other = NIW([own.net for own in copy.deepcopy(list(niw.module))], 0.1, **options)
    for part, own in zip(other.components, niw.components):
        part.load_state_dict({k.replace("module.net.", "module."): v for k, v in own.state_dict().items()})
    support, query = tasks()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        looped, batched = BatchedEpisodes(niw, mse, steps=2), BatchedEpisodes(other, mse, steps=2)
        losses = looped(support, query), batched(support, query)
        for loss in losses:
            loss.backward()
        assert all(part._looped for part in looped._parts)
        posts = looped.posterior(support), batched.posterior(support)
    assert torch.allclose(*losses, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(gradients(niw), gradients(other), strict=True))
    assert torch.allclose(posts[0].responsibilities, posts[1].responsibilities, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 2])
def test_loop_and_batch_agree(rank, double):
    """The objective of a batch, from learners of all components in a loop."""
    options = {"rank": rank, "add_kl_gradient": False} if rank else {"temperature": 0.0}
    niw = NIW([network() for _ in range(2)], 0.1, **options)
    (x, y), (x_query, y_query) = tasks()
    batched = BatchedEpisodes(niw, mse, steps=2)((x, y), (x_query, y_query))
    values = []
    for i in range(B):
        parts = []
        for k in range(2):
            learner = niw.clone(component=k)
            for _ in range(2):
                learner.adapt(mse(learner, x[i], y[i]))
            loss, zero = mse(learner.query, x_query[i], y_query[i]), torch.zeros(())
            if rank:
                free, noise = learner.posterior().free_energy, niw.components[k].hyper.log_noise.exp().detach()
                constant = M * (noise.log() + 0.5 * math.log(2 * math.pi))
                unit = 2 * noise**2 / M
                parts.append(Energies(free, loss / unit, zero, constant, unit))
            else:
                free = N * mse(learner, x[i], y[i])
                parts.append(Energies(free, M * loss, zero, zero, torch.tensor(1 / M)))
        found = mixture_objective(niw.log_weights, parts, 1.0 if rank else 0.0)
        values.append(found.loss + found.rest)
    assert torch.allclose(torch.stack(values).mean(), batched)


def test_clones_take_the_components_in_turn():
    niw = NIW([network() for _ in range(3)], 0.1)
    turns = [niw.clone().component for _ in range(30)]
    assert all(sorted(turns[i : i + 3]) == [0, 1, 2] for i in range(0, 30, 3))
    assert set(turns[::2]) == set(turns[::3]) == {0, 1, 2}  # loops that clone twice or thrice per task train all
    assert niw.clone(component=2).component == 2
    learner = niw.clone(component=1)
    assert learner.clone().component == 1
    assert NIW(network(), 0.1).clone().component == 0
    x = torch.randn(4, 2)
    for k in range(3):
        assert torch.equal(niw.clone(component=k)(x), niw.components[k].module(x))
    for wrong in (3, -1, 0.5):
        with pytest.raises(ArgumentError, match="component"):
            niw.clone(component=wrong)


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_an_unmodified_loop_trains_all_components(options):
    niw = NIW(network(), 0.1, components=3, **options)
    opt = torch.optim.Adam(niw.parameters(), 1e-2)
    before = [p.clone() for p in niw.parameters()]
    (x, y), (x_query, y_query) = tasks()
    for _ in range(3):
        opt.zero_grad()
        for i in range(2):  # fewer tasks than components
            learner = niw.clone()
            for _ in range(2):
                learner.adapt(mse(learner, x[i], y[i]))
            mse(learner, x_query[i], y_query[i]).backward()
        for p in niw.parameters():
            p.grad.data.mul_(1.0 / 2)
        opt.step()
    for k, part in enumerate(niw.components):
        assert part.module[0].weight.grad is not None
        assert not torch.equal(part.module[0].weight, before[1 + k * len(list(part.parameters()))])
    assert torch.equal(niw.log_weights, torch.zeros(3))


def test_new_components_are_the_model_with_noise():
    model = nn.Linear(300, 200)
    niw = NIW(model, 0.1, components=2, perturbation=0.25)
    first, second = niw.module
    assert first is model
    difference = second.weight - first.weight
    assert difference.std().item() == pytest.approx(0.25 * first.weight.square().mean().sqrt().item(), rel=0.02)
    assert torch.equal(*(own.weight for own in NIW(model, 0.1, components=2, perturbation=0.0).module))


def test_frozen_weights_stay_the_models():
    model = network()
    model[0].requires_grad_(False)
    niw = NIW(model, 0.1, allow_nograd=True, components=2)
    assert torch.equal(*(own[0].weight for own in niw.module))
    assert not torch.equal(*(own[2].weight for own in niw.module))


@pytest.mark.parametrize(
    ("model", "options", "error", "match"),
    [
        ([], {}, ModelError, "empty"),
        ([nn.Linear(2, 1), nn.Linear(3, 1)], {}, ModelError, "architecture"),
        ([nn.Linear(2, 1), nn.Linear(2, 1)], {"components": 3}, ArgumentError, "2 models"),
        ([nn.Linear(2, 1), nn.Linear(2, 1)], {"components": 1}, ArgumentError, "2 models"),
        ([nn.Linear(2, 1), nn.Linear(2, 1).double()], {}, ModelError, "dtype"),
        (nn.Linear(2, 1), {"components": 0}, ArgumentError, "components"),
        (nn.Linear(2, 1), {"components": 2, "perturbation": -1.0}, ArgumentError, "perturbation"),
        ([nn.Linear(2, 1), "model"], {}, ModelError, "torch.nn.Module"),
    ],
)
def test_bad_components(model, options, error, match):
    with pytest.raises(error, match=match):
        NIW(model, 0.1, **options)


def test_components_must_not_share_weights():
    model = nn.Linear(2, 1)
    with pytest.raises(ModelError, match="share"):
        NIW([model, model], 0.1)


def test_what_needs_one_network_says_so():
    niw = NIW(network(), 0.1, components=2)
    for call in (
        lambda: niw(torch.zeros(1, 2)),
        lambda: niw.adapt(None),
        niw.kl,
        niw.posterior,
        lambda: niw.objective(1),
    ):
        with pytest.raises(ArgumentError):
            call()
    with pytest.raises(ArgumentError, match="responsibilities"):
        BatchedEpisodes(niw, mse, responsibilities="equal")


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_copies_and_states(options):
    niw = NIW([network() for _ in range(2)], 0.1, **options)
    with torch.no_grad():
        niw.log_weights.copy_(torch.tensor([0.3, -0.2]))
    for other in (pickle.loads(pickle.dumps(niw)), copy.deepcopy(niw)):
        assert isinstance(other, NIWMixture)
        assert all(torch.equal(a, b) for a, b in zip(niw.parameters(), other.parameters(), strict=True))
        assert other.components[1].options is other.options
        with torch.no_grad():
            other.components[1].module[0].weight.zero_()
        other.load_state_dict(niw.state_dict())
        assert torch.equal(other.components[1].module[0].weight, niw.components[1].module[0].weight)
    with pytest.raises(CheckpointError, match="components"):
        niw.load_state_dict(NIW(network(), 0.1, **options).state_dict())


def test_settings_are_those_of_all_components():
    niw = NIW(network(), 0.1, components=2)
    niw.lr = 0.3
    niw.options.kl_weight = 0.25
    assert [part.lr for part in niw.components] == [0.3, 0.3]
    assert [part.options.kl_weight for part in niw.components] == [0.25, 0.25]
    assert niw.lr == 0.3
    niw.scale_prior_std(2.0)
    spreads = [part.hyper.log_variance[0] for part in niw.components]
    assert torch.equal(*spreads)


@pytest.mark.parametrize("from_mode", [True, False])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_posterior_of_a_task(options, from_mode, double):
    niw = NIW(
        [network() for _ in range(2)],
        0.1,
        **{**options, **({} if "temperature" not in options else {"temperature": 1e-8})},
    )
    (x, y), _ = tasks()
    with torch.no_grad():
        post = niw.posterior(lambda net: mse(net, x[0], y[0]), steps=2, from_mode=from_mode)
    assert post.responsibilities.sum().item() == pytest.approx(1.0)
    assert not post.responsibilities.requires_grad
    assert post.predict(x[0], samples=6).shape == (6, N, 1)
    if not from_mode:
        batched = BatchedEpisodes(niw, mse, steps=2).posterior((x, y))
        assert torch.allclose(batched.responsibilities[0], post.responsibilities, atol=1e-3)


def test_a_chains_free_energy_is_its_loss_and_its_kl(double):
    niw = NIW([network() for _ in range(2)], 0.1, temperature=0.05)
    (x, y), _ = tasks()
    part = niw.components[0]
    post = part.posterior(lambda net: mse(net, x[0], y[0]), steps=3)
    p0 = [v.exp() for v in part.hyper.log_variance]
    kl = sum(
        torch.distributions.kl_divergence(Normal(m, v.sqrt()), Normal(m0, p.sqrt())).sum()
        for m, v, m0, p in zip(post.mean.values(), post.variance.values(), part.module.parameters(), p0)
    )
    n0 = torch.tensor(1.0)
    kl = kl + 0.5 * sum(p.numel() for p in p0) * (torch.log(n0 / 2) - torch.digamma(n0 / 2))
    loss = mse(post.network(post.mean), x[0], y[0])
    assert torch.allclose(post.free_energy, N * loss + 0.05 * kl)


def test_a_component_without_tasks_is_reported():
    niw = NIW([nn.Linear(2, 1) for _ in range(2)], 0.1, temperature=0.0)
    with torch.no_grad():
        niw.components[1].module.bias.fill_(1e3)
    (x, y), query = tasks()
    episodes = BatchedEpisodes(niw, mse, steps=1)
    for _ in range(166):  # of 3 tasks each
        episodes((x, y), query)
    with pytest.warns(UserWarning, match="next to no task"):
        episodes((x, y), query)
    found = niw.diagnostics()
    assert found["dead"] == [1]
    assert found["responsibilities"][0] == pytest.approx(1.0)
    assert found["entropy"] == pytest.approx(0.0, abs=1e-6)
    assert found["weights"] == [0.5, 0.5]
    assert found["components"][0]["n0"] > 0


def test_classification():
    niw = NIW([network(3) for _ in range(2)], 0.1, curvature="full")
    x, y = torch.randn(B, 6, 2), torch.randint(3, (B, 6))
    episodes = BatchedEpisodes(niw, cross_entropy, steps=2)
    episodes((x, y), (x, y)).backward()
    post = episodes.posterior((x, y))
    assert torch.allclose(post.linearised(x).probs.sum(-1), torch.ones(B, 6))
    assert post.predict(x, samples=5).shape == (5, B, 6, 3)
    prior = niw.prior()
    assert torch.allclose(prior.responsibilities, torch.tensor([0.5, 0.5]))


# A population of two clusters of linear-Gaussian tasks.
D, NOISE, WEIGHTS = 2, 0.5, (0.3, 0.7)
MEANS = torch.tensor([[2.0, -1.0], [-1.5, 2.5]], dtype=torch.float64)
STDS = torch.tensor([[0.4, 0.8], [0.7, 0.3]], dtype=torch.float64)


class Regression(nn.Linear):
    """A linear model with noise of a known size."""

    def __init__(self):
        super().__init__(D, 1, bias=False)

    def forward(self, x):
        return Gaussian(super().forward(x), torch.tensor(NOISE))


def draw_tasks(count, n, m=1):
    which = (torch.rand(count) > WEIGHTS[0]).long()
    theta = MEANS[which] + STDS[which] * torch.randn(count, D)
    x = torch.randn(count, n + m, D)
    y = x @ theta.unsqueeze(-1) + NOISE * torch.randn(count, n + m, 1)
    return (x[:, :n], y[:, :n]), (x[:, n:], y[:, n:])


def exact(x, y, x_query, means=MEANS, stds=STDS, weights=WEIGHTS):
    """Log evidence of each component, and mean and variance of the query under each."""
    (y,), evidence, moments = y.mT, [], []
    for mean, std in zip(means, stds):
        prior = torch.diag(std**2)
        joint = torch.cat([x, x_query])
        covariance = joint @ prior @ joint.mT + NOISE**2 * torch.eye(len(joint))
        n, centre = len(x), joint @ mean
        evidence.append(MultivariateNormal(centre[:n], covariance[:n, :n]).log_prob(y))
        gain = torch.linalg.solve(covariance[:n, :n], covariance[:n, n:]).mT
        moments.append(
            (centre[n:] + gain @ (y - centre[:n]), (covariance[n:, n:] - gain @ covariance[:n, n:]).diagonal())
        )
    return (torch.tensor(weights).log() + torch.stack(evidence)).softmax(0), moments


def make_exact():
    niw = NIW([Regression() for _ in range(2)], 1.0, curvature="full", n0=1e9, radius=100.0)
    with torch.no_grad():
        niw.log_weights.copy_(torch.tensor(WEIGHTS).log())
        for part, mean, std in zip(niw.components, MEANS, STDS):
            part.module.weight.copy_(mean)
            part.hyper.log_variance[0].copy_(2 * std.log())
    return niw


@pytest.mark.parametrize("n", [1, 2, 8])
def test_responsibilities_and_predictive_are_the_exact_ones(n, double):
    niw = make_exact()
    support, (x_query, y_query) = draw_tasks(6, n, 3)
    post = BatchedEpisodes(niw, nll, steps=2).posterior(support)
    found = post.linearised(x_query)
    for i in range(6):
        shares, moments = exact(support[0][i], support[1][i], x_query[i])
        assert torch.allclose(post.responsibilities[i], shares, atol=1e-6)
        density = sum(r * Normal(m, v.sqrt()).log_prob(y_query[i, :, 0]).exp() for r, (m, v) in zip(shares, moments))
        assert torch.allclose(found.log_prob(y_query)[i].exp(), density, atol=1e-6)


def test_the_objective_is_the_log_marginal_likelihood_by_monte_carlo(double):
    """Of one task's support and query, by networks drawn from the prior; a bound before steps have converged."""
    niw = make_exact()
    support, query = draw_tasks(1, 2)
    found = BatchedEpisodes(niw, nll, steps=2)(support, query)
    rest = mixture_total(niw, support, query, steps=2)
    which = (torch.rand(400_000) > WEIGHTS[0]).long()
    theta = MEANS[which] + STDS[which] * torch.randn(len(which), D)
    x, y = (torch.cat([a[0], b[0]]) for a, b in zip(support, query))
    likelihood = Normal(theta @ x.mT, NOISE).log_prob(y.squeeze(-1)).sum(-1).exp()
    error = likelihood.std() / len(likelihood) ** 0.5 / likelihood.mean()
    assert abs(rest + likelihood.mean().log()) < 4 * error
    assert found.item() < rest  # the query's part of it
    assert mixture_total(niw, support, query, steps=1) > rest


def mixture_total(niw, support, query, steps):
    """The whole objective, the evidence's part included."""
    niw.options.add_kl_gradient = False
    with torch.no_grad():
        found = BatchedEpisodes(niw, nll, steps=steps)(support, query)
    niw.options.add_kl_gradient = True
    return found.item()


@pytest.mark.slow
def test_two_clusters_of_tasks_are_recovered(double):
    torch.manual_seed(0)
    niw = NIW([Regression() for _ in range(2)], 1.0, curvature="full", n0=1e6, radius=100.0)
    episodes, batches = BatchedEpisodes(niw, nll, steps=2), 600
    opt = torch.optim.Adam(niw.parameters(), 0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, batches)
    for _ in range(batches):
        opt.zero_grad()
        episodes(*draw_tasks(500, 4)).backward()
        opt.step()
        schedule.step()
    order = torch.stack([part.module.weight[0] for part in niw.components])[:, 0].argsort(descending=True).tolist()
    parts = [niw.components[k] for k in order]
    means = torch.stack([part.module.weight[0] for part in parts]).detach()
    stds = torch.stack([(0.5 * part.hyper.log_variance[0][0]).exp() for part in parts]).detach()
    assert torch.allclose(means, MEANS, rtol=0.05)
    assert torch.allclose(stds**2, STDS**2, rtol=0.2)
    assert torch.allclose(niw.weights[order], torch.tensor(WEIGHTS), atol=0.05)
    support, (x_query, _) = draw_tasks(200, 4)
    post = episodes.posterior(support)
    prediction = post.linearised(x_query)
    for i in range(200):
        shares, moments = exact(support[0][i], support[1][i], x_query[i])
        assert torch.allclose(post.responsibilities[i][order], shares, atol=0.02)
        mean = sum(r * m for r, (m, _) in zip(shares, moments))
        assert torch.allclose(prediction.mean[i, :, 0], mean, atol=0.1)


def test_learners_of_a_mixture_are_learners():
    niw = NIW([network() for _ in range(2)], 0.1, rank=2)
    (x, y), _ = tasks()
    learner = niw.clone()
    learner.adapt(F.mse_loss(learner(x[0]), y[0]))
    assert learner.posterior().free_energy.dim() == 0
    assert learner.clone().niw is niw.components[learner.component]


def test_a_wrapper_that_was_adapted_has_a_learners_posterior():
    niw = copy.deepcopy(NIW(network(), 0.1))
    (x, y), _ = tasks()
    niw.adapt(mse(niw, x[0], y[0]))
    assert niw.posterior().mean.keys() == niw.posterior(lambda net: mse(net, x[0], y[0]), steps=3).mean.keys()


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_without_steps_or_data_the_weights_are_pi(options):
    niw = NIW([network() for _ in range(2)], 0.1, **options)
    (x, y), _ = tasks()
    with torch.no_grad():
        niw.log_weights.copy_(torch.tensor([0.2, 0.8]).log())
    post = niw.posterior(lambda net: mse(net, x[0], y[0]), steps=0, from_mode=True)
    batched = BatchedEpisodes(niw, mse).posterior((x, y), elbo_steps=0)
    assert batched.responsibilities.shape == (B, 2)
    if "rank" in options or "curvature" in options:  # a chain's mode has a loss all the same
        assert torch.allclose(post.responsibilities, torch.tensor([0.2, 0.8]))
        assert torch.allclose(batched.responsibilities, torch.tensor([0.2, 0.8]).expand(B, 2))


def test_subclasses_have_one_component():
    class Own(NIW):
        pass

    assert type(Own(network(), 0.1)) is Own
    for model, given in ((network(), {"components": 2}), ([network(), network()], {})):
        with pytest.raises(ArgumentError, match="NIWMixture"):
            Own(model, 0.1, **given)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"rank": 2}], ids=["chain", "rank"])
def test_episodes_may_be_changed(options):
    for models in ([network(), network()], network()):
        niw = NIW(models, 0.1, **options)
        support, query = tasks()
        episodes, other = BatchedEpisodes(niw, mse, steps=1), BatchedEpisodes(niw, mse, steps=3)
        before = episodes(support, query)
        episodes.steps = 3
        assert not torch.equal(episodes(support, query), before)
        assert torch.equal(episodes(support, query), other(support, query))


@pytest.mark.parametrize("way", ["loop", "batch"])
def test_under_the_mode_the_free_energy_is_that_of_a_known_covariance(way, double):
    """n_0 says how well Sigma is known: it is no matter once the mode stands for it."""
    niw = make_exact()
    with torch.no_grad():
        for part, n0 in zip(niw.components, (1.0, 50.0)):
            part.module.weight.copy_(MEANS[0])
            part.hyper.raw_n0.fill_(math.log(n0))
            part.hyper.log_variance[0].copy_(2 * STDS[0].log() + math.log((part._latent().n0 + 3) / part._latent().n0))
    (x, y), _ = draw_tasks(2, 4)
    if way == "loop":
        post = niw.posterior(lambda net: nll(net, x[0], y[0]), steps=3, from_mode=True)
        energies = [part.free_energy for part in post.components]
    else:
        post = BatchedEpisodes(niw, nll, steps=3).posterior((x, y), elbo_steps=3)
        energies = [part.free_energy[0] for part in post.components]
    covariance = x[0] @ torch.diag(STDS[0] ** 2) @ x[0].mT + NOISE**2 * torch.eye(4)
    expected = -MultivariateNormal(x[0] @ MEANS[0], covariance).log_prob(y[0, :, 0])
    assert torch.allclose(torch.stack(energies), expected.expand(2), atol=1e-6)


def test_an_energy_that_is_not_finite_is_named():
    niw = NIW([network() for _ in range(2)], 0.1)
    (x, y), _ = tasks()
    with torch.no_grad():
        niw.components[1].module[2].bias.fill_(math.nan)
    with pytest.raises(LossError, match="component 1"):
        niw.posterior(lambda net: mse(net, x[0], y[0]), steps=0, from_mode=True)
    assert niw.diagnostics()["responsibilities"] is None


def test_a_state_that_does_not_fit_leaves_all_as_it_was():
    niw = NIW([network() for _ in range(2)], 0.1)
    before = {k: v.clone() for k, v in niw.state_dict().items()}
    for name in ("components.1.hyper.log_variance.0", "log_weights"):
        wrong = {k: v + 1.0 if v.is_floating_point() else v for k, v in before.items()}
        wrong[name] = torch.full_like(wrong[name], math.nan)
        with pytest.raises(CheckpointError, match=f"{name.split('.', 2)[-1]}' is not finite"):
            niw.load_state_dict(wrong)
        assert all(torch.equal(v, before[k]) for k, v in niw.state_dict().items())
    with pytest.raises(CheckpointError, match="is unknown"):
        niw.load_state_dict(NIW(network(), 0.1).state_dict(), strict=False)


def test_a_warning_comes_once_for_all_components():
    niw = NIW([nn.Sequential(nn.Linear(2, 1), nn.Tanh(), nn.LayerNorm(1)) for _ in range(3)], 0.1)
    (x, y), _ = tasks()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(3):
            learner = niw.clone(component=k)
            learner.adapt(mse(learner, x[0], y[0]))
    assert ["last_layer" in str(own.message) for own in caught] == [True]


def test_a_posterior_has_no_graph_and_can_be_copied():
    niw = NIW([network() for _ in range(2)], 0.1)
    (x, y), _ = tasks()
    post = copy.deepcopy(niw.posterior(lambda net: mse(net, x[0], y[0]), steps=2))
    assert post.draw()(x[0]).shape == (N, 1)
    assert all(part._module[0].weight.is_leaf for part in post.components)
    with pytest.raises(ArgumentError, match="several tasks"):
        BatchedEpisodes(niw, mse).posterior((x, y)).draw()


def test_networks_are_drawn_by_their_components_responsibility():
    torch.manual_seed(0)
    niw = NIW([nn.Linear(1, 1, bias=False) for _ in range(2)], 0.1, temperature=0.0)
    with torch.no_grad():
        niw.log_weights.copy_(torch.tensor([0.25, 0.75]).log())
        for k, part in enumerate(niw.components):
            part.module.weight.fill_(float(k))
            part.hyper.log_variance[0].fill_(-60.0)
    prior = niw.prior()
    drawn = torch.stack([prior.draw()(torch.ones(1, 1)) for _ in range(2000)])
    assert drawn.round().mean().item() == pytest.approx(0.75, abs=0.03)


def test_a_frozen_component_is_named():
    niw = NIW([network() for _ in range(2)], 0.1, allow_nograd=True)
    niw.components[1].requires_grad_(False)
    with pytest.raises(ModelError, match="frozen"):
        niw.clone(component=1)


def test_what_steps_of_adapt_do_not_have_is_refused():
    niw = NIW(network(), 0.1)
    (x, y), _ = tasks()
    with pytest.raises(ArgumentError, match="from_mode"):
        niw.posterior(lambda net: mse(net, x[0], y[0]), lr=0.1)
