"""What a method of the Sine-Line benchmark is: a loss of a batch of tasks, and predictions of queries."""

import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, vmap

from l2l_niw import EpisodicModel
from l2l_niw.heads import ANP, CNP, BayesianRidge, Linear, Ridge, RidgeMixture
from l2l_niw.heads.leave_one_out import others
from l2l_niw.heads.ridge import with_constant
from l2l_niw.utils._linear_algebra import cholesky
from l2l_niw.models import MLP
from l2l_niw.heads.predictions import Evidence, Gaussian

WIDTH, WIDTHS = 32, (40, 40, 40)
HALF_WIDTH = 5.0  # of the inputs' interval
SPREAD = 5  # times the weights' learning rate is that of step sizes and variances: in log, they have further to go
NOISE = 0.3  # the targets' own: what no prediction of a target can be below


class RidgeNet(Ridge):
    """
    A ridge head whose support speaks by its evidence. Ridge regression is the mean of a Bayesian one with weights of
    N(0, s^2 I) and noise of s^2 lam; s is what explains the support's targets best. (Of one task, or under vmap.)
    """

    def __init__(self):
        super().__init__("regression", lam=0.1, learn_noise=True)

    def explain(self, support, y):
        phi, lam = with_constant(support), self.lam()
        lower = cholesky(phi @ phi.mT + lam * torch.eye(phi.shape[-2]))
        white = torch.linalg.solve_triangular(lower, y, upper=False)
        s = white.square().mean((-2, -1)).sqrt()
        return Evidence(s[..., None, None] * phi, s * lam.sqrt(), y.shape[-1])


class Scaled(nn.Module):
    """A module whose inputs are scaled to [-1, 1]."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x / HALF_WIDTH)


def network(head):
    """
    The model of every row with this head: an MLP of three layers, or a neural process on one. Heads that solve for
    their last layer have features without an activation: a sine is then two weights, not a balance of many.
    """
    if head in ("cnp", "anp"):
        processes = {
            "cnp": lambda: CNP(WIDTH, width=WIDTH, depth=3),
            "anp": lambda: ANP(WIDTH, width=WIDTH, self_layers=1, cross_layers=1, latent=False),
        }
        return EpisodicModel(MLP(1, (WIDTH,), activate_last=True), processes[head]())
    if head == "plain":  # what a MAML script has: an ordinary network with an ordinary last layer
        return EpisodicModel(
            Scaled(MLP(1, (40, 40), activate_last=True)), Linear(40, 1, "regression", learn_noise=True)
        )
    heads = {
        "linear": lambda: Linear(WIDTHS[-1], 1, "regression", learn_noise=True),
        "ridge": RidgeNet,
        "bayesian-ridge": lambda: BayesianRidge(noise=NOISE),
        "ridge-mixture": lambda: RidgeMixture(WIDTHS[-1], components=8, noise=NOISE),
    }
    return EpisodicModel(MLP(1, WIDTHS, activate_last=head == "linear"), heads[head]())


def support_loss(head):
    """What inner steps minimise: `loss(network, x, y)`."""
    if head in ("linear", "plain"):  # the noise is no matter of a task
        return lambda network, x, y: (network(x, y).mean - y).square().mean()
    return lambda network, x, y: network(x, y).nll(y)


def temperature(n):
    """What a mean squared error of n examples is divided by to be minus the log-likelihood of targets with `NOISE`."""
    return 2 * NOISE**2 / n


def unflatten(flat, tensors):
    """Parts of (..., D), each of the shape (..., that of one of the tensors)."""
    parts = flat.split([t.numel() for t in tensors], -1)
    return [part.reshape((*part.shape[:-1], *t.shape)) for part, t in zip(parts, tensors)]


def query_loss(network, x, y, x_query, y_query):
    return network(x, y, x_query).nll(y_query)


class Plain:
    """
    **Description**

    A row of the table: a model that is trained as it stands, on the queries' negative log-likelihood.

    * `backward(tasks)` - Gives the parameters the gradients of a batch, and returns its mean query loss.
    * `predict(tasks)` - A distribution of the queries' targets, (B, m, 1).
    * `groups(lr)` - Parameter groups for an optimiser.
    """

    def __init__(self, head):
        self.head, self.model = head, network(head)

    def groups(self, lr):
        return [{"params": list(self.model.parameters()), "lr": lr}]

    def backward(self, tasks):
        loss = query_loss(self.model, *tasks)
        loss.backward()
        return loss.item()

    @torch.no_grad()
    def predict(self, tasks):
        return self.model(tasks.x, tasks.y, tasks.x_query)


class Decoder(nn.Module):
    """A neural process's decoder by itself: from what it is told to a distribution."""

    def __init__(self, process):
        super().__init__()
        self.layers, self.read = process.decoder, process.read

    def forward(self, told):
        return self.read(self.layers(told))


class NeuralProcess(Plain):
    """
    **Description**

    A neural process, trained on the queries and, with a small weight, on each example of the support given the others:
    a second view of the same task.
    """

    LEFT_OUT = 0.2

    def __init__(self, head):
        super().__init__(head)
        self.process = self.model.head
        self.decoder = Decoder(self.process)

    def tell(self, tasks):
        """What the decoder is told of the queries, (B, m, ...), and of the support, each by the others, (B, n, ...)."""
        support, query = self.model.features(tasks.x, 1), self.model.features(tasks.x_query, 1)
        rest = others(support.shape[1])
        left_out = self.process.tell(support[:, rest], tasks.y[:, rest], support.unsqueeze(2))
        return self.process.tell(support, tasks.y, query), left_out.squeeze(2)

    def query_loss(self, told_query, told, tasks):
        return self.decoder(told_query).nll(tasks.y_query)

    def backward(self, tasks):
        told_query, told = self.tell(tasks)
        loss = self.query_loss(told_query, told, tasks)
        (loss + self.LEFT_OUT * self.decoder(told).nll(tasks.y)).backward()
        return loss.item()


class Functional(Plain):
    """
    **Description**

    A method with weights of its own for every task, all tasks of a batch side by side. `leaves` is what it trains, a
    dict of lists of tensors, weights first; `task_loss` and `task_outputs` are functions of it and of one task, and
    `prediction` is what the latter are the tensors of.

    **Arguments**

    * **head** (str) - The network's.
    * **compile** (bool, *optional*, default=True) - Whether a batch's gradient is one compiled program.
    """

    prediction = Gaussian

    def __init__(self, head, compile=True):
        super().__init__(head)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.leaves = {"weights": list(self.model.parameters())}
        self.inner_loss = support_loss(head)
        step = grad_and_value(self.objective)
        self._step = torch.compile(step, dynamic=False) if compile else step

    def groups(self, lr):
        weights, *others = self.leaves.values()
        return [{"params": weights, "lr": lr}, *({"params": tensors, "lr": SPREAD * lr} for tensors in others)]

    def call(self, weights):
        """The network with these weights."""
        named = dict(zip(self.names, weights))
        return lambda *data: functional_call(self.model, named, data)

    def inner_gradient(self, weights, x, y):
        return grad(lambda w: self.inner_loss(self.call(w), x, y))(weights)

    def components(self, weights, x, y, x_query):
        """Means and standard deviations of several networks' predictions, (m, networks, 1)."""
        return vmap(lambda w: self.call(w)(x, y, x_query).tensors(), out_dims=-2)(weights)

    def noise(self, tasks):
        """Random numbers, one row per task: drawn before a compiled program, which would have its own."""
        return torch.empty(tasks, 0)

    def values(self):
        return {name: [t.detach() for t in tensors] for name, tensors in self.leaves.items()}

    def objective(self, leaves, noise, *data):
        return vmap(lambda noise, *task: self.task_loss(leaves, noise, *task))(noise, *data).mean()

    def backward(self, tasks):
        gradients, value = self._step(self.values(), self.noise(len(tasks.x)), *tasks)
        for name, tensors in self.leaves.items():
            for tensor, gradient in zip(tensors, gradients[name]):
                tensor.grad = gradient
        return value.item()

    @torch.no_grad()
    def predict(self, tasks):
        leaves = self.values()
        outputs = vmap(lambda noise, *task: self.task_outputs(leaves, noise, *task))(
            self.noise(len(tasks.x)), *tasks[:3]
        )
        return self.prediction(*outputs)
