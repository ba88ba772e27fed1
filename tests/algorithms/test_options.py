"""Options are checked whenever they are set, and extreme numbers are named rather than computed with."""

import pytest
import torch
from torch import nn

from l2l_niw import NIW
from l2l_niw.errors import ArgumentError
from l2l_niw.inference.curvature import GGN


def make(**options):
    return NIW(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), lr=0.1, **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("second_order", "al"),
        ("inference", "langevine"),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", "warm"),
        ("kl_weight", -1.0),
        ("burn_in", 1.5),
        ("burn_in", -1),
        ("average_iterates", 3),
        ("learn_step_sizes", "yes"),
        ("add_kl_gradient", None),
        ("precision_bounds", (0.0, 1.0)),
        ("precision_bounds", (2.0, 1.0)),
        ("precision_bounds", 3.0),
        ("curvature", "hessian"),
    ],
)
def test_a_bad_option_is_refused_when_it_is_set_and_when_niw_is_built(name, value):
    niw = make()
    before = repr(niw.options)
    with pytest.raises(ArgumentError, match=name):
        setattr(niw.options, name, value)
    assert repr(niw.options) == before
    with pytest.raises(ArgumentError, match=name):
        make(**{name: value})


def test_an_unknown_option_is_named():
    with pytest.raises(ArgumentError, match="no option 'trace'"):
        make().options.trace = "full"


def test_the_wishart_cannot_be_changed():
    with pytest.raises(ArgumentError, match="wishart"):
        make().options.wishart = "full"


def test_the_kl_weight_follows_the_temperature_until_it_is_set():
    niw = make()
    niw.options.temperature = 0.3
    assert niw.options.kl_weight == 0.3
    niw.options.kl_weight = 0.1
    niw.options.temperature = 0.5
    assert niw.options.kl_weight == 0.1


@pytest.mark.parametrize("options", [{"kl_weight": 1.0}, {"curvature": "ggn"}, {"curvature": GGN("gaussian")}])
def test_a_spike_has_no_kl_and_no_curvature(options):
    with pytest.raises(ArgumentError, match="temperature=0"):
        make(temperature=0.0, **options)
    niw = make(**options)
    with pytest.raises(ArgumentError, match="temperature=0"):
        niw.options.temperature = 0.0
    assert niw.options.temperature == 1e-4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e-45),
        ("temperature", 1e38),
        ("temperature", float("inf")),
        ("kl_weight", 1e-45),
        ("kl_weight", 1e38),
        ("n0", 1e-40),
        ("n0", 0.0),
        ("n0", 1e300),
        ("prior_precision", 1e300),
        ("prior_precision", 1e-300),
        ("prior_precision", float("nan")),
    ],
)
def test_numbers_that_float32_has_no_room_for_are_named(name, value):
    with pytest.raises(ArgumentError, match=name):
        make(**{name: value})


@pytest.mark.parametrize("inference", ["langevin", "closed_form"])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-12},
        {"temperature": 1e3, "prior_precision": 1e6},
        {"n0": 1e-5},
        {"n0": 1e17},
        {"n0": 1e17, "wishart": "full"},
        {"prior_precision": 1e12},
        {"prior_precision": 1e-12},
    ],
)
def test_numbers_that_are_accepted_give_finite_gradients(inference, options):
    niw, x, y = make(inference=inference, **options), torch.randn(6, 3), torch.arange(6) % 2
    learner = niw.clone()
    for _ in range(3):
        learner.adapt(nn.functional.cross_entropy(learner(x), y))
    nn.functional.cross_entropy(learner.query(x), y).backward()
    assert torch.isfinite(learner.kl())
    assert all(torch.isfinite(p.grad).all() for p in niw.parameters())
    post = niw.clone().posterior(lambda network: nn.functional.cross_entropy(network(x), y), steps=3)
    assert all(torch.isfinite(t).all() for t in (*post.mean.values(), *post.variance.values()))


def test_degrees_of_freedom_that_an_optimiser_has_driven_out_of_their_domain_are_named():
    niw = make()
    with torch.no_grad():
        niw.hyper.raw_n0.fill_(60.0)
    with pytest.raises(ArgumentError, match="raw_n0"):
        niw.clone()
