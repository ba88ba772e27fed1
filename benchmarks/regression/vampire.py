"""VAMPIRE: a variational posterior over the weights."""

import math

import torch
from regression.base import Functional, query_loss, temperature
from regression.pmaml import draw, kl
from torch.func import grad, vmap

from l2l_niw.heads.predictions import GaussianMixture


class VAMPIRE(Functional):
    """
    **Description**

    A Gaussian over the weights with a diagonal covariance. Both its mean and its log standard deviation are learned,
    and take a task's steps on the support's variational free energy,

        E_q[mean squared error] + temperature KL(q || p),

    where p is the learned Gaussian, at which q begins, and the temperature that of targets with their own noise.
    The loss is the query's, averaged over samples of q; a prediction is the mixture of the samples.

    **Arguments**

    * **head** (str) - The network's.
    * **steps** (int) - Inner steps.
    * **lr** (float) - Their size.
    * **scale** (float, *optional*, default=0.03) - The first standard deviations.
    * **samples** (int, *optional*, default=10) - Of the loss and of a prediction.
    * **step_samples** (int, *optional*, default=5) - Of an inner step.

    **References**

    1. Nguyen, Do and Carneiro. 2020. "Uncertainty in Model-Agnostic Meta-Learning using Variational Inference." WACV.
    """

    prediction = GaussianMixture

    def __init__(self, head, steps, lr, scale=0.03, samples=10, step_samples=5, compile=True):
        super().__init__(head, compile)
        self.lr, self.counts = lr, [step_samples] * steps + [samples]
        self.leaves["log_scale"] = [torch.full_like(w, math.log(scale)) for w in self.leaves["weights"]]

    def noise(self, tasks):
        return torch.randn(tasks, sum(self.counts), sum(w.numel() for w in self.leaves["weights"]))

    def free_energy(self, q, p, noise, x, y):
        errors = vmap(lambda w: self.inner_loss(self.call(w), x, y))(draw(*q, noise))
        return errors.mean() + temperature(len(y)) * kl(q, p)

    def adapt(self, leaves, noise, x, y):
        """Weights of several networks, sampled from the task's q."""
        p = q = leaves["weights"], leaves["log_scale"]
        *steps, last = noise.split(self.counts)
        for step in steps:
            gradients = grad(self.free_energy)(q, p, step, x, y)
            q = [[t - self.lr * g for t, g in zip(*both)] for both in zip(q, gradients)]
        return draw(*q, last)

    def task_loss(self, leaves, noise, x, y, x_query, y_query):
        weights = self.adapt(leaves, noise, x, y)
        return vmap(lambda w: query_loss(self.call(w), x, y, x_query, y_query))(weights).mean()

    def task_outputs(self, leaves, noise, x, y, x_query):
        return self.components(self.adapt(leaves, noise, x, y), x, y, x_query)
