"""MAML and Meta-SGD, and Reptile: learn2learn's algorithms for all tasks of a batch at once."""

import math

import torch
from regression.base import Functional, query_loss
from torch.func import vmap

from l2l_niw.heads.predictions import Gaussian


class MAML(Functional):
    """
    **Description**

    Second-order MAML, equal to `l2l.algorithms.MAML`. With `learn_lr`, which is `l2l.algorithms.MetaSGD` with rates
    that stay positive, every weight has a step size of its own.

    **Arguments**

    * **head** (str) - The network's.
    * **steps** (int) - Inner steps.
    * **lr** (float) - Their size.
    * **learn_lr** (bool, *optional*, default=False) - Whether it is learned, weight by weight, in log.
    """

    def __init__(self, head, steps, lr, learn_lr=False, compile=True):
        super().__init__(head, compile)
        self.steps, self.lr = steps, lr
        if learn_lr:
            self.leaves["log_lr"] = [torch.full_like(p, math.log(lr)) for p in self.leaves["weights"]]

    def adapt(self, leaves, x, y):
        weights = leaves["weights"]
        rates = [r.exp() for r in leaves["log_lr"]] if "log_lr" in leaves else [self.lr] * len(weights)
        for _ in range(self.steps):
            gradients = self.inner_gradient(weights, x, y)
            weights = [w - rate * g for w, rate, g in zip(weights, rates, gradients)]
        return weights

    def task_loss(self, leaves, noise, x, y, x_query, y_query):
        return query_loss(self.call(self.adapt(leaves, x, y)), x, y, x_query, y_query)

    def task_outputs(self, leaves, noise, x, y, x_query):
        return self.call(self.adapt(leaves, x, y))(x, y, x_query).tensors()


class Reptile(MAML):
    """
    **Description**

    Reptile: the weights go toward those that `steps` inner steps on all data of a task, support and query, end at. At
    test inner steps have the support only. The noise, which no task adapts, is fitted to the queries.
    """

    def objective(self, leaves, noise, x, y, x_query, y_query):
        adapted = vmap(lambda x, y: self.adapt(leaves, x, y))(torch.cat([x, x_query], 1), torch.cat([y, y_query], 1))
        return [w.mean(0) for w in adapted]

    def __init__(self, head, steps, lr, compile=True):
        super().__init__(head, steps, lr, compile=False)
        self._step = torch.compile(self.objective, dynamic=False) if compile else self.objective

    def backward(self, tasks):
        leaves = self.values()
        for w, end in zip(self.leaves["weights"], self._step(leaves, None, *tasks)):
            w.grad = w.detach() - end
        prediction = self.predict(tasks)
        noise = self.model.head.noise
        loss = Gaussian(prediction.mean, noise()).nll(tasks.y_query)
        (noise.log.grad,) = torch.autograd.grad(loss, noise.log)
        return loss.item()
