"""A batch of episodes in one call: B chains, B posteriors and one meta-gradient."""

import warnings
from typing import Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor

from l2l_niw import side_by_side
from l2l_niw.checks import check_finite, check_number
from l2l_niw.errors import ArgumentError, NIWError
from l2l_niw.learner import NIWLearner
from l2l_niw.niw import NIW
from l2l_niw.posterior import Posterior
from l2l_niw.prior import Prior
from l2l_niw.side_by_side import Data, Loss


class Episodes:
    """
    **Description**

    Runs a batch of episodes as the loop of `clone`, `adapt` and a query loss does, with the same numbers for
    the same random draws, but side by side: one call of each operation serves them all. On small
    networks, where a loop spends its time between operations, that is many times faster.

    Calling it gives the mean query loss. Its `backward` gives every parameter of `niw.parameters()` the
    gradient of the mean over episodes of query loss + kl_weight * KL / n, as the loop does; with
    `auto_kl=False` the KL is part of the value too. Roles are given rather than told apart by inputs, so
    that the query may be the support itself.

    A model that cannot be vmapped (BatchNorm with running statistics, control flow that looks at values) and
    trace='full' run in a loop instead, and one warning says why.

    **Arguments**

    * **niw** (NIW) - The wrapper.
    * **loss** (callable) - `loss(network, *support)`: the mean loss of one episode, whose network is `network(x)`.
    * **query_loss** (callable, *optional*, default=None) - `query_loss(network, *query)`. Defaults to `loss`.
    * **steps** (int, *optional*, default=5) - Inner steps.
    * **memory** (int, *optional*, default=2**30) - Bytes that episodes in flight may take. As many run side by side as
        are estimated to fit, and one at least.

    **Example**

    ~~~python
    episodes = Episodes(niw, lambda network, x, y: F.mse_loss(network(x), y), steps=5)
    opt.zero_grad()
    episodes((x, y), (x_query, y_query)).backward()                       # tensors (B, n, ...)
    opt.step()
    outputs = episodes.posterior((x, y)).predict(x_query, samples=10)     # (10, B, m, ...)
    ~~~
    """

    def __init__(
        self, niw: NIW, loss: Loss, query_loss: Optional[Loss] = None, steps: int = 5, memory: int = 2**30
    ):
        check_number("steps", steps, 1, whole=True)
        check_number("memory", memory, 1)
        self.niw, self.loss, self.query_loss = niw, loss, query_loss or loss
        self.steps, self.memory = steps, memory
        self._one_by_one = False
        self._bytes: Dict[tuple, int] = {}

    def __call__(self, support: Data, query: Data) -> Tensor:
        """The mean query loss of the episodes; every tensor has a leading dimension of B episodes."""
        size = count_episodes(support=support, query=query)
        prior = self.niw._prior()

        def run() -> Tuple[Tensor, List[Tensor]]:
            parts = [
                side_by_side.objective(self.niw, prior, self.loss, self.query_loss, *part, self.steps)
                for part in self._parts(prior, support, query)
            ]
            values, gradients = zip(*parts)
            return sum(values), [sum(found) for found in zip(*gradients)]

        value, gradients = self._try(run) or self._loop(prior, support, query)
        return Ready.apply(value / size, [g / size for g in gradients], *prior.leaves)

    def posterior(
        self, support: Data, elbo_steps: Optional[int] = None, lr: Optional[float] = None, samples: int = 1
    ) -> Posterior:
        """
        **Description**

        The posteriors of B tasks, as one with a leading dimension. From their chains, q_i of Eq. 13, as
        `learner.posterior()`; with `elbo_steps`, by steps on the support's ELBO, as `learner.posterior(nll)`.

        **Arguments**

        * **support** (sequence) - Tensors with a leading dimension B.
        * **elbo_steps** (int, *optional*, default=None) - The paper's M_V.
        * **lr** (float, *optional*, default=None) - Step size on the ELBO. Defaults to the wrapper's.
        * **samples** (int, *optional*, default=1) - Networks drawn a step on the ELBO.
        """
        size = count_episodes(support=support)
        lr = self.niw.lr if lr is None else lr
        if elbo_steps is not None:
            check_number("elbo_steps", elbo_steps, 0, whole=True)
        check_number("lr", lr, 0, strict=True)
        check_number("samples", samples, 1, whole=True)
        prior = self.niw._prior()

        def part(data: Data) -> Tuple[Tensor, Tensor]:
            if elbo_steps is not None:
                return side_by_side.elbo_moments(self.niw, prior, self.loss, data, elbo_steps, lr, samples)
            episode = side_by_side.run_chains(self.niw, prior, self.loss, data, self.steps)
            return episode.posterior(prior.flat())

        moments = self._try(lambda: [torch.cat(t) for t in zip(*(part(p[0]) for p in self._parts(prior, support)))])
        if moments is None:
            found = [self._loop_posterior([t[i] for t in support], elbo_steps, lr, samples) for i in range(size)]
            moments = [torch.stack(t) for t in zip(*((p._mean, p._variance) for p in found))]
        return Posterior(self.niw.module, prior.layout, *moments)

    def _try(self, run: Callable):
        """What `run` returns, or None if this model's episodes cannot run side by side."""
        if self.niw.options.trace == "full":
            self._warn("trace='full' keeps the graph of every episode's steps.")
        if self._one_by_one:
            return None
        try:
            return run()
        except NIWError:
            raise
        except RuntimeError as error:  # if it is not vmap's doing, the loop will raise it again
            self._warn(f"{str(error).splitlines()[0]} (For BatchNorm see l2l_niw.models.batch_statistics.)")
            return None

    def _warn(self, reason: str) -> None:
        if not self._one_by_one:
            warnings.warn(f"Episodes run one after another instead of side by side: {reason}", stacklevel=4)
        self._one_by_one = True

    def _loop(self, prior: Prior, support: Data, query: Data) -> Tuple[Tensor, List[Tensor]]:
        """The sums over episodes of the query loss and of the gradients, one episode after another."""
        value, totals = 0.0, [torch.zeros_like(leaf) for leaf in prior.leaves]
        for i in range(len(support[0])):
            learner = self._loop_chain([t[i] for t in support])
            learner._support = []  # roles are given here: what comes now is the query
            with torch.enable_grad():
                loss = self.query_loss(learner, *(t[i] for t in query))
                if not self.niw.options.auto_kl:
                    loss = learner.objective(loss)
            check_finite(loss, "the query loss")
            found = torch.autograd.grad(loss, learner._prior.leaves, allow_unused=True)
            value = value + loss.detach()
            totals = [total if g is None else total + g for total, g in zip(totals, found)]
        return value, totals

    def _loop_chain(self, support: Data) -> NIWLearner:
        learner = self.niw.clone()
        with torch.enable_grad():
            for _ in range(self.steps):
                learner.adapt(self.loss(learner, *support))
        return learner

    def _loop_posterior(self, support: Data, elbo_steps: Optional[int], lr: float, samples: int) -> Posterior:
        if elbo_steps is None:
            return self._loop_chain(support).posterior()
        return self.niw.clone().posterior(lambda network: self.loss(network, *support), elbo_steps, lr, samples)

    def _parts(self, prior: Prior, *data: Data) -> Iterator[Tuple[List[Tensor], ...]]:
        """The data in chunks of as many episodes as fit into `memory`."""
        shapes = tuple(t.shape[1:] for part in data for t in part)
        if shapes not in self._bytes:
            pairs = zip((self.loss, self.query_loss), data)
            self._bytes[shapes] = max(side_by_side.saved_bytes(self.niw, prior, *pair) for pair in pairs)
        chunk = max(1, int(self.memory) // self._bytes[shapes])
        for start in range(0, len(data[0][0]), chunk):
            yield tuple([t[start : start + chunk] for t in part] for part in data)


class Ready(torch.autograd.Function):
    """A value whose gradients are known already."""

    @staticmethod
    def forward(ctx, value: Tensor, gradients: List[Tensor], *leaves: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx, upstream: Tensor):
        return (None, None, *(upstream * g for g in ctx.gradients))


def count_episodes(**data: Data) -> int:
    """B, the leading dimension of all tensors."""
    sizes = {}
    for name, tensors in data.items():
        if isinstance(tensors, Tensor) or not tensors or not all(isinstance(t, Tensor) and t.dim() for t in tensors):
            raise ArgumentError(f"{name} must be a tuple of tensors with a leading dimension of episodes, as (x, y).")
        sizes.update({f"{name}[{i}]": len(t) for i, t in enumerate(tensors)})
    if len(set(sizes.values())) > 1 or 0 in sizes.values():
        raise ArgumentError(f"all tensors must have the same number of episodes, one at least; got {sizes}.")
    return next(iter(sizes.values()))
