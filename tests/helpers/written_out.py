"""An episode written out with plain autograd, from the paper's formulas: what the wrapper's gradients are held to."""

import torch
from torch import nn
from torch.nn import functional as F

STEPS, LR = 4, 0.3
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
BODY = 2  # how many of these are the body's


def network():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))


def task(support=5, query=11):
    return torch.randn(support, 3), torch.arange(support) % 2, torch.randn(query, 3), torch.arange(query) % 2


def body(weights, x):
    return torch.tanh(F.linear(x, *weights[:BODY]))


def outputs(weights, x):
    return F.linear(body(weights, x), *weights[BODY:])


def adapted(niw, data, steps=STEPS):
    learner = niw.clone()
    for _ in range(steps):
        learner.adapt(F.cross_entropy(learner(data[0]), data[1]))
    return learner


class Noise:
    """Stands in for `torch.randn_like`: other numbers at each step, the same for the same shape and step."""

    def __init__(self):
        self.calls = {}

    def at(self, shape, step):
        seed = 1000 * step + 17 * shape.numel() + len(shape)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def __call__(self, tensor, **_):
        step = self.calls.get(tensor.shape, 0)
        self.calls[tensor.shape] = step + 1
        return self.at(tensor.shape, step).to(tensor.dtype)


def step_gradient(theta, first, data, second_order):
    """
    The mean support loss's gradient in each weight. Of the last layer's weights alone, a gradient is a function of them
    and of the features before the first step, whose place those of later steps take.
    """
    x, y = data[:2]
    if second_order == "all":
        return torch.autograd.grad(F.cross_entropy(outputs(theta, x), y), theta, create_graph=True)
    leaves = [t.detach().requires_grad_() for t in theta]
    found = list(torch.autograd.grad(F.cross_entropy(outputs(leaves, x), y), leaves))
    if second_order == "last_layer":
        features = body(leaves, x).detach() + first - first.detach()
        loss = F.cross_entropy(F.linear(features, *theta[BODY:]), y)
        found[BODY:] = torch.autograd.grad(loss, theta[BODY:], create_graph=True)
    return found


def iterates(niw, m0, log_variance, data, noise, steps):
    """The chain's iterates as functions of L_0: a step on the loss scaled by D, noise, the prior's proximal step."""
    options, n = niw.options, len(data[1])
    first = body(m0, data[0])
    start = niw.hyper.initial_log_variance.item()
    theta, found = list(m0), []
    for step in range(steps):
        gradients = step_gradient(theta, first, data, "none" if niw.first_order else options.second_order)
        new = []
        for t, g, m, v in zip(theta, gradients, m0, log_variance):
            scale = (v - start).exp() if options.learn_step_sizes else torch.ones_like(v)
            t = t - niw.lr * scale * g
            if options.temperature:
                t = t + (2 * niw.lr * scale * options.temperature / n).sqrt() * noise.at(m.shape, step)
            if options.inference == "langevin":
                c = niw.lr * scale * options.temperature * (-v).exp() / n
                t = (t + c * m) / (1 + c)
            new.append(t)
        theta = new
        found.append(theta)
    return found


def moments(niw, chain, log_variance, n):
    """m_bar with its graph, and the iterates' variance, a constant, regularised by one step's noise."""
    options = niw.options
    kept = chain[options.burn_in :] if options.average_iterates else []
    kept = kept or chain[-1:]
    means, variances = [], []
    for i, v in enumerate(log_variance):
        values = torch.stack([theta[i] for theta in kept])
        scale = (v.detach() - niw.hyper.initial_log_variance).exp() if options.learn_step_sizes else 1.0
        pseudo = 2 * niw.lr * options.temperature / n * scale
        means.append(values.mean(0))
        variances.append(((values - values.mean(0)).square().sum(0).detach() + pseudo) / len(kept))
    return means, variances


def expected_kl(mean, variance, m0, log_variance, raw, full):
    """E_q(phi) KL(q_i || p(theta | phi)) as the supplement has it."""
    mean, variance, m0, log_variance = (torch.cat([t.flatten() for t in p]) for p in (mean, variance, m0, log_variance))
    d, p0 = m0.numel(), (-log_variance).exp()
    n0 = raw.exp() + (d - 1 if full else 0)
    psi = torch.digamma(n0 / 2 + (1 - torch.arange(1, d + 1)) / 2).sum() if full else d * torch.digamma(n0 / 2)
    total = -d * torch.log(torch.tensor(2 * torch.e)) + (log_variance + n0.log() - variance.log()).sum() - psi
    return 0.5 * (total + (p0 * (mean - m0).square()).sum() + (p0 * variance).sum())


def episode(niw, data, noise, steps=STEPS):
    """The query loss, the KL (None at temperature 0) and the gradient of loss + kl_weight * KL / n in all of L_0."""
    x_query, y_query = data[2:]
    options, n = niw.options, len(data[1])
    m0 = [p.detach().clone().requires_grad_() for p in niw.module.parameters()]
    log_variance = [v.detach().clone().requires_grad_() for v in niw.hyper.log_variance]
    raw = niw.hyper.raw_n0.detach().clone().requires_grad_()
    chain = iterates(niw, m0, log_variance, data, noise, steps)
    mean, variance = moments(niw, chain, log_variance, n)
    if options.inference == "closed_form":
        a = [1 / v for v in variance]
        share = [1 / (1 + (-v).exp() / k) for v, k in zip(log_variance, a)]
        if options.temperature == 0:  # the likelihood is a spike
            share = [torch.ones_like(v) for v in log_variance]
        drawn = [
            m + s * (own - m) + s.sqrt() * (last - own).detach() for m, s, own, last in zip(m0, share, mean, chain[-1])
        ]
        q = [m + s * (own - m) for m, s, own in zip(m0, share, mean)]
        q_variance = [1 / (k + (-v).exp()) for k, v in zip(a, log_variance)]
    else:
        drawn, q, q_variance = chain[-1], mean, variance
    loss = F.cross_entropy(outputs(drawn, x_query), y_query)
    kl, total = None, loss
    if options.temperature:
        kl = expected_kl(q, q_variance, m0, log_variance, raw, options.wishart == "full")
        total = loss + options.kl_weight * kl / len(y_query)
    leaves = [*m0, raw, *log_variance]
    gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return loss.detach(), kl, gradients, [t.detach() for t in chain[-1]]
