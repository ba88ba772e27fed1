"""What an episode sends back to L_0, and when it looks at values."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from l2l_niw import NIW, checks, learner, niw
from l2l_niw.closed_form import episode_posterior
from l2l_niw.curvature import GGN
from l2l_niw.episode import draw_network, kl_to_prior, pull_back
from l2l_niw.errors import ArgumentError, LossError
from l2l_niw.prior import FlatPrior
from l2l_niw.wishart import WISHARTS


@pytest.mark.parametrize("wishart", WISHARTS)
@pytest.mark.parametrize("curvature", ["sgld", GGN("gaussian")])
@pytest.mark.parametrize(
    ("trace", "precondition"), [("first", True), ("first", False), ("none", True), ("none", False)]
)
@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("kl_weight", [0.0, 0.7])
def test_the_derivatives_written_out_are_autograd_s(double, wishart, curvature, trace, precondition, lead, kl_weight):
    wrapper = NIW(nn.Linear(2, 4), lr=0.1, trace=trace, precondition=precondition, curvature=curvature, wishart=wishart)
    prior, options, d = wrapper._prior(), wrapper.options, 12
    flat = FlatPrior(torch.randn(d), torch.randn(d), torch.randn(()))
    m_bar, a, offset, gradient = torch.randn(*lead, d), torch.rand(*lead, d) * 5, *torch.randn(2, *lead, d)
    found = pull_back(options, prior, flat, m_bar, a, offset, gradient, kl_weight)

    traced = FlatPrior(*(t.clone().requires_grad_() for t in flat))
    value = (draw_network(options, traced, m_bar, a, offset) * gradient).sum()
    value = value + kl_weight * kl_to_prior(prior, traced, m_bar, a).sum()
    expected = torch.autograd.grad(value, traced, allow_unused=True, materialize_grads=True)
    for ours, theirs in zip(found, expected):
        ours = ours.sum(0) if ours.dim() > theirs.dim() else ours
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("wishart", WISHARTS)
def test_posterior_and_kl_have_autograd_s_derivatives(double, wishart):
    wrapper = NIW(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), lr=0.1, wishart=wishart)
    with torch.no_grad():
        for v in wrapper.log_variance:
            v.add_(torch.randn_like(v))
    task, x = wrapper.clone(), torch.randn(4, 3)
    for _ in range(4):
        task.adapt(task(x).square().mean())
    post, leaves = task.posterior(), list(wrapper.parameters())
    weights = torch.randn(2, len(post._mean))
    chosen = (post._mean * weights[0] + post._variance * weights[1]).sum() + 0.3 * task.kl()
    found = torch.autograd.grad(chosen, leaves)

    prior, episode = wrapper._prior(), task._episode
    parts = wrapper.module.parameters(), wrapper.log_variance
    m0, log_variance = (torch.cat([t.reshape(-1) for t in part]) for part in parts)
    flat = FlatPrior(m0, log_variance, wrapper.raw_n0)
    mean, variance = episode_posterior(m0, log_variance, episode.chain.mean, episode.a)
    written = (mean * weights[0] + variance * weights[1]).sum()
    written = written + 0.3 * kl_to_prior(prior, flat, episode.chain.mean, episode.a)
    for ours, theirs in zip(found, torch.autograd.grad(written, leaves)):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)


class Looks(TorchDispatchMode):
    """Counts the operations that make a device's queue wait: values read, and tensors compared for equality."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in (
            torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.is_nonzero,
            torch.ops.aten.nonzero, torch.ops.aten._to_copy,
        )  # fmt: skip
        return function(*args, **(kwargs or {}))


@pytest.fixture
def on_a_device(monkeypatch):
    """As if tensors lived on a device whose values are not at hand."""
    for module in (checks, learner, niw):
        monkeypatch.setattr(module, "at_hand", lambda tensor: False)


@pytest.mark.parametrize("curvature", ["sgld", GGN("gaussian")])
def test_no_step_waits_for_a_device(on_a_device, curvature):
    wrapper = NIW(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), lr=0.1, curvature=curvature)
    x, x_query = torch.randn(4, 3), torch.randn(6, 3)
    with Looks() as looks:
        task = wrapper.clone()
        for _ in range(4):
            task.adapt(task(x).square().mean())
        assert looks.count == 0
        value = task(x_query).square().mean()
    assert 0 < looks.count <= 2  # at the steps and at n_0, once an episode
    value.backward()
    assert all(torch.isfinite(p.grad).all() for p in wrapper.parameters())


@pytest.mark.parametrize("use", ["query", "backward", "posterior", "kl", "diagnostics"])
def test_a_step_that_failed_on_a_device_is_told_when_its_chain_is_used(on_a_device, use):
    wrapper = NIW(nn.Linear(3, 2), lr=0.1)
    task, x = wrapper.clone(), torch.randn(4, 3)
    for factor in (1.0, float("nan"), 1.0):
        task.adapt(task(x).square().mean() * factor)
    uses = {
        "query": lambda: task(torch.randn(6, 3)),
        "backward": lambda: task(x).square().mean().backward(),
        "posterior": task.posterior,
        "kl": task.kl,
        "diagnostics": wrapper.diagnostics,
    }
    with pytest.raises(LossError, match="not finite"):
        uses[use]()


def test_a_loss_that_was_infinite_is_remembered_though_its_step_was_sound(on_a_device):
    task, x = NIW(nn.Linear(3, 2), lr=0.1).clone(), torch.randn(4, 3)
    for constant in (0.0, float("inf"), 0.0):
        task.adapt(task(x).square().mean() + constant)
    with pytest.raises(LossError, match="not finite"):
        task.posterior()


def test_degrees_out_of_their_domain_are_told_on_a_device_too(on_a_device):
    wrapper = NIW(nn.Linear(3, 2), lr=0.1)
    with torch.no_grad():
        wrapper.raw_n0.fill_(800.0)
    task, x = wrapper.clone(), torch.randn(4, 3)
    task.adapt(task(x).square().mean())
    with pytest.raises(ArgumentError, match="raw_n0.*leaves its domain"):
        task.posterior()
