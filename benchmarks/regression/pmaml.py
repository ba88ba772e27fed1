"""Probabilistic MAML (PLATIPUS)."""

import math

import torch
from regression.base import Functional, query_loss, unflatten

from l2l_niw.heads.predictions import GaussianMixture


def draw(mean, log_scale, noise):
    """Weights of one network or of several, from noise (..., D)."""
    return [m + s.exp() * e for m, s, e in zip(mean, log_scale, unflatten(noise, mean))]


def kl(q, p):
    """KL(q || p) of Gaussians with diagonal covariances, each a mean and a log standard deviation."""
    return sum(
        (ps - qs + 0.5 * (torch.exp(2 * (qs - ps)) + ((qm - pm) * torch.exp(-ps)).square() - 1)).sum()
        for qm, qs, pm, ps in zip(*q, *p)
    )


class PMAML(Functional):
    """
    **Description**

    Task weights begin at a random theta, then take MAML's steps on the support. In training theta comes from
    q = N(mu - gamma_q grad(support and query), v_q), at test from p = N(mu - gamma_p grad(support), sigma^2), and the
    loss is the query's at the adapted weights plus beta KL(q || p) / m. A prediction averages several theta.

    **Arguments**

    * **head** (str) - The network's.
    * **steps** (int) - Inner steps.
    * **lr** (float) - Their size, and the first gamma_q and gamma_p, which are learned weight by weight.
    * **beta** (float, *optional*, default=0.1) - Of the KL: with 1 the posterior collapses to the prior.
    * **scale** (float, *optional*, default=0.01) - The first sigma and sqrt(v_q), learned weight by weight.
    * **samples** (int, *optional*, default=10) - Of a prediction.

    **References**

    1. Finn et al. 2018. "Probabilistic Model-Agnostic Meta-Learning." NeurIPS. (Algorithms 1 and 2.)
    """

    def __init__(self, head, steps, lr, beta=0.1, scale=0.01, samples=10, compile=True):
        super().__init__(head, compile)
        self.steps, self.lr, self.beta, self.samples = steps, lr, beta, samples
        for name, value in (("log_sigma", scale), ("log_v", scale), ("log_gamma_p", lr), ("log_gamma_q", lr)):
            self.leaves[name] = [torch.full_like(w, math.log(value)) for w in self.leaves["weights"]]

    def noise(self, tasks):
        return torch.randn(tasks, sum(w.numel() for w in self.leaves["weights"]))

    def law(self, leaves, rates, scales, x, y):
        """Mean and log standard deviation of theta, given data."""
        gradients = self.inner_gradient(leaves["weights"], x, y)
        triples = zip(leaves["weights"], leaves[rates], gradients)
        return [w - rate.exp() * g for w, rate, g in triples], leaves[scales]

    def adapt(self, weights, x, y):
        for _ in range(self.steps):
            weights = [w - self.lr * g for w, g in zip(weights, self.inner_gradient(weights, x, y))]
        return weights

    def task_loss(self, leaves, noise, x, y, x_query, y_query):
        everything = torch.cat([x, x_query]), torch.cat([y, y_query])
        q, p = self.law(leaves, "log_gamma_q", "log_v", *everything), self.law(leaves, "log_gamma_p", "log_sigma", x, y)
        weights = self.adapt(draw(*q, noise), x, y)
        return query_loss(self.call(weights), x, y, x_query, y_query) + self.beta * kl(q, p) / len(x_query)

    def task_outputs(self, leaves, noise, x, y, x_query):
        weights = self.adapt(draw(*self.law(leaves, "log_gamma_p", "log_sigma", x, y), noise), x, y)
        return self.call(weights)(x, y, x_query).tensors()

    @torch.no_grad()
    def predict(self, tasks):
        parts = [super(PMAML, self).predict(tasks) for _ in range(self.samples)]
        return GaussianMixture(*(torch.stack([getattr(p, name) for p in parts], -2) for name in ("mean", "stddev")))
