"""NIW: a posterior over a network's weights, task by task."""

import torch
from regression.base import SPREAD, NeuralProcess, Plain, network, query_loss, support_loss

from l2l_niw import NIW, BatchedEpisodes
from l2l_niw.inference.curvature import GGN


def wrap(model, steps, lr, temperature=1e-7, curvature="sgld", burn_in=None, **options):
    """
    The last iterate of a cold chain, and a spread that is learned: over few steps the chain's way counts for more
    than its noise, so that moments of several iterates would take the way for spread.
    """
    return NIW(
        model,
        lr,
        allow_unused=True,  # the noise, where the support's loss has its own
        second_order="none",
        inference="closed_form",
        temperature=temperature,
        average_iterates=burn_in is not None,
        burn_in=burn_in or 0,
        curvature=GGN("gaussian") if curvature == "ggn" else curvature,
        **options,
    )


def groups(niw, lr):
    """Parameter groups for an optimiser."""
    return [
        {"params": list(niw.module.parameters()), "lr": lr},
        {"params": list(niw.hyper.parameters()), "lr": SPREAD * lr},
    ]


class NIWMethod(Plain):
    """
    **Description**

    A network all of whose weights are random: inner steps on what the support says of itself, and an average over
    posterior samples of the task.

    **Arguments**

    * **head** (str) - The network's.
    * **steps, lr** - Of the inner steps.
    * **samples** (int, *optional*, default=10) - Posterior samples of a prediction.
    * **options** - Of `NIW`.
    """

    def __init__(self, head, steps=5, lr=0.003, samples=10, **options):
        super().__init__(head)
        self.samples = samples
        self.niw = wrap(self.model, steps, lr, **options)
        self.episodes = BatchedEpisodes(self.niw, support_loss(head), query_loss, steps=steps)

    def groups(self, lr):
        return groups(self.niw, lr)

    def backward(self, tasks):
        loss = self.episodes(tasks.support, tuple(tasks))
        loss.backward()
        return loss.item()

    @torch.no_grad()
    def predict(self, tasks):
        posterior = self.episodes.posterior(tasks.support)
        return posterior.predict(tasks.x, tasks.y, tasks.x_query, samples=self.samples, vectorize=True)


class RankMethod(Plain):
    """
    **Description**

    A network whose weights differ between tasks along a few learned directions, with the full covariance of their
    posterior: Gauss-Newton steps, and the linearised predictive.

    **Arguments**

    * **head** (str) - The network's.
    * **steps** (int, *optional*, default=3) - Gauss-Newton steps.
    * **options** - Of `NIW`.
    """

    def __init__(self, head, steps=3, **options):
        super().__init__(head)
        self.niw = NIW(self.model, lr=1.0, random=lambda name, p: "noise" not in name, **options)
        self.episodes = BatchedEpisodes(self.niw, support_nll, query_loss, steps=steps)

    def groups(self, lr):
        return [{"params": list(self.niw.parameters()), "lr": lr}]

    def backward(self, tasks):
        loss = self.episodes(tasks.support, tuple(tasks))
        loss.backward()
        return loss.item()

    def predict(self, tasks):
        with torch.no_grad():
            return self.episodes.posterior(tasks.support).linearised(tasks.x, tasks.y, tasks.x_query)


def support_nll(network, x, y):
    return network(x, y).nll(y)


class RankProcess(NeuralProcess):
    """
    **Description**

    A neural process whose decoder's weights differ between tasks along a few learned directions: Gauss-Newton steps on
    the support's data, each predicted from the others.

    **Arguments** - As those of `RankMethod`.
    """

    def __init__(self, head, steps=2, **options):
        super().__init__(head)
        self.niw = NIW(self.decoder, lr=1.0, **options)
        self.episodes = BatchedEpisodes(self.niw, told_loss, steps=steps)

    def groups(self, lr):
        own = {id(p) for p in self.decoder.parameters()}
        shared = [p for p in self.model.parameters() if id(p) not in own]
        return [{"params": [*shared, *self.niw.parameters()], "lr": lr}]

    def query_loss(self, told_query, told, tasks):
        return self.episodes((told, tasks.y), (told_query, tasks.y_query))

    def predict(self, tasks):
        with torch.no_grad():
            told_query, told = self.tell(tasks)
            return self.episodes.posterior((told, tasks.y)).linearised(told_query)


def told_loss(decoder, told, y):
    return decoder(told).nll(y)


class NIWProcess(NeuralProcess):
    """
    **Description**

    A neural process whose decoder is random, and whose other weights all tasks share, as in ANIL: inner steps are on
    the support's data, each predicted from the others.

    **Arguments** - As those of `NIWMethod`.
    """

    def __init__(self, head, steps=3, lr=0.01, samples=10, **options):
        super().__init__(head)
        self.samples = samples
        self.niw = wrap(self.decoder, steps, lr, **options)
        self.episodes = BatchedEpisodes(self.niw, told_loss, steps=steps)

    def groups(self, lr):
        own = {id(p) for p in self.decoder.parameters()}
        shared = [p for p in self.model.parameters() if id(p) not in own]
        return [{"params": shared, "lr": lr}, *groups(self.niw, lr)]

    def query_loss(self, told_query, told, tasks):
        return self.episodes((told, tasks.y), (told_query, tasks.y_query))

    @torch.no_grad()
    def predict(self, tasks):
        told_query, told = self.tell(tasks)
        return self.episodes.posterior((told, tasks.y)).predict(told_query, samples=self.samples, vectorize=True)


class MixtureMethod(Plain):
    """
    **Description**

    A mixture of NIWs, each around a network of its own: all components infer every task, and those train on it that
    explain its data. Predictions are weighed by the support's free energies.

    **Arguments**

    * **head** (str) - The networks'.
    * **components** (int) - How many.
    * **steps** (int, *optional*, default=3) - Inner steps: Gauss-Newton's with `rank`, else a chain's.
    * **samples** (int, *optional*, default=1) - Posterior samples of each component, without `rank`.
    * **responsibilities** (str, *optional*, default='evidence') - As in `BatchedEpisodes`.
    * **options** - Of `NIW`.
    """

    def __init__(self, head, components, steps=3, lr=1.0, samples=1, responsibilities="evidence", rank=0, **options):
        models = [network(head) for _ in range(components)]
        if rank:
            self.niw = NIW(models, lr, random=lambda name, p: "noise" not in name, rank=rank, **options)
        else:
            self.niw = wrap(models, steps, lr, **options)
        self.samples, self.rank = samples, rank
        loss = support_nll if rank else support_loss(head)
        self.episodes = BatchedEpisodes(self.niw, loss, query_loss, steps, responsibilities)

    def groups(self, lr):
        if self.rank:
            return [{"params": list(self.niw.parameters()), "lr": lr}]
        spreads = [p for part in self.niw.components for p in part.hyper.parameters()]
        return [
            {"params": [*self.niw.module.parameters(), self.niw.log_weights], "lr": lr},
            {"params": spreads, "lr": SPREAD * lr},
        ]

    def backward(self, tasks):
        loss = self.episodes(tasks.support, tuple(tasks))
        loss.backward()
        return loss.item()

    def predict(self, tasks):
        with torch.no_grad():
            posterior = self.episodes.posterior(tasks.support)
            if self.rank:
                return posterior.linearised(tasks.x, tasks.y, tasks.x_query)
            return posterior.predict(tasks.x, tasks.y, tasks.x_query, samples=self.samples, vectorize=True)
