import pytest
import torch
from prior_cases import make_prior
from torch import nn

from l2l_niw import NIW
from l2l_niw.errors import ArgumentError, ChainError
from l2l_niw.inference.chain import Settings, init, mean_of, step
from l2l_niw.inference.curvature import GGN, SGLD
from l2l_niw.heads.labels import encode
from l2l_niw.heads.predictions import Classes, Gaussian


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def exact_diagonal(model, x, nll):
    """The Hessian's diagonal of a summed loss, for models linear in their weights where it is the GGN."""
    parameters = dict(model.named_parameters())

    def loss(flat):
        parts = flat.split([p.numel() for p in parameters.values()])
        weights = {k: part.view_as(p) for (k, p), part in zip(parameters.items(), parts)}
        return nll(torch.func.functional_call(model, weights, (x,)))

    return torch.autograd.functional.hessian(loss, torch.cat([p.flatten() for p in model.parameters()]).detach()).diag()


def linear_case(likelihood):
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    if likelihood == "gaussian":
        y = torch.randn(6, 3)
        return model, x, lambda out: 0.5 * ((out - y) / 0.3).square().sum()
    y = torch.randint(3, (6,))
    return model, x, lambda out: nn.functional.cross_entropy(out, y, reduction="sum")


def diagonal(ggn, outputs, weights):
    """What a strategy sees in one forward: its scalars' squared gradients, flat."""
    total = 0.0
    for scalar in ggn.scalars(outputs):
        gradients = torch.autograd.grad(scalar, weights, retain_graph=True)
        total = total + torch.cat([g.flatten() for g in gradients]).square()
    return total


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_exact_ggn_is_the_hessians_diagonal_of_a_linear_model(likelihood):
    model, x, nll = linear_case(likelihood)
    ggn = GGN(likelihood, noise=0.3, samples=None)
    assert torch.allclose(diagonal(ggn, model(x), list(model.parameters())), exact_diagonal(model, x, nll))


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_sampled_ggn_is_unbiased(likelihood):
    model, x, nll = linear_case(likelihood)
    ggn = GGN(likelihood, noise=0.3)
    draws = torch.stack([diagonal(ggn, model(x), list(model.parameters())) for _ in range(4000)])
    error = draws.mean(0) - exact_diagonal(model, x, nll)
    assert (error.abs() < 5 * draws.std(0) / len(draws) ** 0.5).all()


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_a_model_that_returns_a_distribution_says_its_own_likelihood(likelihood):
    model, x, nll = linear_case(likelihood)
    weights = list(model.parameters())
    if likelihood == "gaussian":
        outputs = Gaussian(model(x), torch.tensor(0.3))
    else:
        outputs = Classes(model(x), encode(torch.tensor([4, 9, 2])))
    draws = torch.stack([diagonal(GGN(), outputs, weights) for _ in range(4000)])
    error = draws.mean(0) - exact_diagonal(model, x, nll)
    assert (error.abs() < 5 * draws.std(0) / len(draws) ** 0.5).all()
    with pytest.raises(ArgumentError, match="samples=None"):
        diagonal(GGN(samples=None), outputs, weights)


def test_several_sampled_labels_are_averaged():
    model, x, _ = linear_case("categorical")
    many = diagonal(GGN("categorical", samples=4000), model(x), list(model.parameters()))
    exact = diagonal(GGN("categorical", samples=None), model(x), list(model.parameters()))
    assert torch.allclose(many, exact, rtol=0.25)


@pytest.mark.parametrize("inference", ["langevin", "closed_form"])
def test_a_ggn_chain_uses_its_average_over_steps_and_the_temperature(inference):
    model, x = nn.Linear(4, 1), torch.randn(6, 4)
    ggn = GGN("gaussian", noise=0.5, samples=None)
    niw = NIW(model, lr=0.05, curvature=ggn, temperature=0.25, prior_precision=100.0, inference=inference)
    learner = niw.clone()
    for _ in range(3):
        learner.adapt(learner(x).square().mean())
    post = learner.posterior()
    a = torch.cat([x.square().sum(0), torch.tensor([6.0])]) / 0.5**2 / 0.25
    variance = torch.cat([v.flatten() for v in post.variance.values()])
    assert torch.allclose(variance, 1 / (a + 100.0))


def test_a_ggn_draws_deviation_has_the_variance_one_over_a():
    a = torch.tensor([0.04, 1.0, 25.0])[:, None].expand(3, 200_000)
    deviation = GGN().deviation(init([torch.zeros_like(a)]), 0, a)
    assert torch.allclose(deviation.mean(1), torch.zeros(3), atol=0.1)
    assert torch.allclose(deviation.var(1), 1 / a[:, 0], rtol=0.02)


def test_queries_of_a_ggn_chain_run_networks_of_the_posteriors_variance():
    """In closed form, a model whose output is its weight shows the draw itself."""
    model = nn.Linear(1, 3000, bias=False)
    ggn = GGN("gaussian", noise=2.0)
    options = {"temperature": 0.5, "prior_precision": 4.0, "inference": "closed_form", "second_order": "none"}
    niw, x = NIW(model, lr=0.1, curvature=ggn, learn_step_sizes=False, **options), torch.ones(1, 1)
    learner = niw.clone()
    learner.adapt(learner(x).square().mean())
    learner.__dict__["_chain"] = learner._chain._replace(observed=[torch.full((3000, 1), 3.0)])  # A = 6
    deviation = learner.query(x).flatten() - learner.posterior().mean["weight"].flatten()
    assert deviation.var().item() == pytest.approx(1 / (6.0 + 4.0), rel=0.15)


def test_an_sgld_chains_deviation_is_its_own():
    prior = make_prior([torch.randn(5)], [torch.zeros(5)])
    chain = init(prior.m0)
    for _ in range(4):
        chain = step(chain, [torch.randn(5)], prior, 2, Settings(0.1, 1.0, burn_in=1))
    assert torch.equal(SGLD().deviation(chain, 0, torch.ones(5)), chain.theta[0] - mean_of(chain)[0][0])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("burn_in", [None, 0])
def test_an_sgld_chains_precision_is_one_over_its_iterates_variance(scaled, burn_in):
    shapes = [(5,), (2, 3)]
    prior = make_prior([torch.randn(s) for s in shapes], [torch.randn(s) for s in shapes])
    settings, chain, iterates = Settings(0.1, 0.7, learn_step_sizes=scaled, burn_in=burn_in), init(prior.m0), []
    for _ in range(4):
        chain = step(chain, [torch.randn(s) for s in shapes], prior, 2, settings)
        iterates.append(chain.theta)
    for i, shape in enumerate(shapes):
        scale = prior.scale(i) if scaled else None
        noise = 2 * 0.1 * 0.7 / 2 * (torch.exp(prior.log_variance[i]) if scaled else torch.ones(shape))
        spread = torch.stack([theta[i] for theta in iterates]).var(0, unbiased=False)
        expected = noise if burn_in is None else spread + noise / 4
        assert torch.allclose(1 / SGLD().precision(chain, i, scale, 0.7), expected)
        assert SGLD().precision(chain, i, scale, 0.0).isinf().all()


def test_a_ggn_chains_precision_is_what_it_saw_per_step_and_temperature():
    observed = [torch.rand(5), torch.rand(2, 3)]
    chain = init([torch.zeros(5), torch.zeros(2, 3)])._replace(observed=observed, steps=3)
    for i in range(2):
        assert torch.allclose(GGN().precision(chain, i, None, 0.25), observed[i] / 3 / 0.25)


def test_ggn_without_a_forward_says_what_to_do():
    niw = NIW(nn.Linear(4, 3), lr=0.1, curvature="ggn")
    learner = niw.clone()
    with pytest.raises(ChainError, match="call the learner itself"):
        learner.adapt(sum(p.norm() for p in learner.parameters()))


@pytest.mark.parametrize("bad", [{"likelihood": "poisson"}, {"noise": 0.0}, {"samples": 0}])
def test_bad_strategies_are_named(bad):
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        GGN(**bad)


def test_unknown_curvature_is_named():
    with pytest.raises(ArgumentError, match="curvature must be one of"):
        NIW(nn.Linear(2, 1), lr=0.1, curvature="hessian")
