"""A batch of episodes in one call: B chains, B posteriors and one meta-gradient."""

import warnings
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from l2l_niw import side_by_side
from l2l_niw.chain import noise_variance
from l2l_niw.checks import check_finite, check_frozen, check_number, check_used
from l2l_niw.elbo import minimise_elbo
from l2l_niw.episode import Episode
from l2l_niw.errors import ArgumentError, NIWError
from l2l_niw.learner import NIWLearner
from l2l_niw.niw import NIW
from l2l_niw.posterior import Posterior
from l2l_niw.prior import FlatPrior, Prior
from l2l_niw.side_by_side import Data, Facts, Loss, Problem, Result, check_chains, chunks
from l2l_niw.weights import Layout

BATCH_NORM = "its BatchNorm writes running statistics; l2l_niw.models.batch_statistics(model) removes them."


class Episodes:
    """
    **Description**

    Runs a batch of episodes as the loop of `clone`, `adapt` and a query loss does, with the same numbers for
    the same random draws, but side by side: one call of each operation serves them all. On small
    networks, where a loop spends its time between operations, that is many times faster.

    Calling it gives the mean query loss. Its `backward` gives every parameter of `niw.parameters()` the
    gradient of the mean over episodes of query loss + kl_weight * KL / n, as the loop does; with
    `auto_kl=False` the KL is part of the value too. Roles are given rather than told apart by inputs, so
    that the query may be the support itself. Data of the query that require gradients, such as features of a
    network that all tasks share, get theirs; the chains take the support's as constants.

    A model that cannot be vmapped (BatchNorm with running statistics, control flow that looks at values) and
    trace='full' run in a loop instead, and one warning says why.

    **Arguments**

    * **niw** (NIW) - The wrapper.
    * **loss** (callable) - `loss(network, *support)`: the mean loss of one episode, whose network is `network(x)`.
    * **query_loss** (callable, *optional*, default=None) - `query_loss(network, *query)`. Defaults to `loss`.
    * **steps** (int, *optional*, default=5) - Inner steps.
    * **memory** (int, *optional*, default=2**30) - Bytes that episodes in flight may take. As many run side by side as
        are estimated to fit, and one at least.
    * **compile** (bool, *optional*, default=False) - Whether `torch.compile` makes one program of all steps: half a
        minute once for each shape of the data, and then several times faster on small networks.

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
        self,
        niw: NIW,
        loss: Loss,
        query_loss: Optional[Loss] = None,
        steps: int = 5,
        memory: int = 2**30,
        compile: bool = False,
    ):
        check_number("steps", steps, 1, whole=True)
        check_number("memory", memory, 1)
        self.niw, self.loss, self.query_loss = niw, loss, query_loss or loss
        self.steps, self.memory = steps, memory
        self._objective = torch.compile(side_by_side.objective, dynamic=False) if compile else side_by_side.objective
        self._one_by_one = False
        self._facts: Dict[tuple, Facts] = {}

    def __call__(self, support: Data, query: Data) -> Tensor:
        """The mean query loss of the episodes; every tensor has a leading dimension of B episodes."""
        size = count_episodes(support=support, query=query)
        prior = self.niw._prior()
        traced = [i for i, t in enumerate(query) if t.requires_grad] if torch.is_grad_enabled() else []
        inputs = [query[i] for i in traced]
        support, query = ([t.detach() for t in data] for data in (support, query))
        found = self._try(lambda: self._side_by_side(prior, support, query, traced))
        value, gradients = found or self._loop(prior, support, query, traced)
        return Ready.apply(value / size, [g / size for g in gradients], *prior.leaves, *inputs)

    def _side_by_side(
        self, prior: Prior, support: Data, query: Data, traced: Sequence[int]
    ) -> Tuple[Tensor, List[Tensor]]:
        """The sums over episodes of the query loss and of the gradients, and those of traced data."""
        options, layout = self.niw.options, prior.layout
        problems = self._problems(layout)
        with torch.no_grad():
            flat = FlatPrior(*(t.detach() for t in prior.flat))
            facts = tuple(self._look(p, flat.m0, data) for p, data in zip(problems, (support, query)))
            value, totals, inputs = 0.0, None, []
            for part in chunks(self._chunk(facts, layout), support, query):
                # a compiled program has other random numbers than torch's own, which are drawn before it
                noise = torch.randn_like(flat.m0.expand(self.steps, len(part[0][0]), -1)) if self._compiled else None
                found = self._objective(*problems, facts, self.steps, prior, flat, noise, *part, traced)
                check_chains(found.result)
                check_finite(found.query, "the query loss")
                value = value + found.query.sum()
                if options.kl_weight and not options.auto_kl:
                    value = value + options.kl_weight / facts[1].n * found.kl.sum()
                totals = found.gradients if totals is None else [a + b for a, b in zip(totals, found.gradients)]
                inputs.append(found.inputs)
            self._episode(problems[0], facts[0], prior, flat, found.result)
        m0, log_variance, raw_n0 = totals
        inputs = [torch.cat(parts) for parts in zip(*inputs)]
        return value, [*layout.split(m0), *layout.split(log_variance, cast=False), raw_n0, *inputs]

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
        moments = self._try(lambda: self._moments(prior, support, elbo_steps, lr, samples))
        if moments is None:
            found = [self._loop_posterior([t[i] for t in support], elbo_steps, lr, samples) for i in range(size)]
            moments = [torch.stack(t) for t in zip(*((p._mean, p._variance) for p in found))]
        return Posterior(self.niw.module, prior.layout, *moments, together=False if self._one_by_one else None)

    def _moments(self, prior: Prior, support: Data, elbo_steps: Optional[int], lr: float, samples: int) -> List[Tensor]:
        """Means and variances, (B, d)."""
        layout, problem = prior.layout, self._problems(prior.layout)[0]
        flat = prior.flat
        facts = self._look(problem, flat.m0, support)
        moments = []
        for (data,) in chunks(self._chunk((facts,), layout), support):
            if elbo_steps is None:
                with torch.no_grad():
                    scale = side_by_side.growth(self.niw, prior, flat)
                    result = side_by_side.run_chains(problem, facts, self.steps, flat.m0, scale, None, data)
                check_chains(result)
                moments.append(self._episode(problem, facts, prior, flat, result).posterior())
            else:
                moments.append(self._elbo(prior, problem, facts, data, elbo_steps, lr, samples))
        return [torch.cat(t) for t in zip(*moments)]

    def _episode(self, problem: Problem, facts: Facts, prior: Prior, flat: FlatPrior, result: Result) -> Episode:
        """C episodes as one, which the wrapper remembers for its diagnostics."""
        options = self.niw.options
        with torch.no_grad():
            scale = side_by_side.growth(self.niw, prior, flat)
        variance = noise_variance(self.niw.lr, options.temperature, facts.n)
        episode = Episode(prior, result.chain, options, result.observed, facts.used, facts.n, variance, scale)
        self.niw._remember(episode)
        return episode

    @torch.no_grad()
    def _elbo(
        self, prior: Prior, problem: Problem, facts: Facts, data: Data, steps: int, lr: float, samples: int
    ) -> Tuple[Tensor, Tensor]:
        def gradients(theta: Tensor) -> Tuple[Tensor, int]:
            found, losses = problem.gradients(theta, data)
            check_finite(losses, "the support loss")
            return found, facts.n

        mean, variance = (t.expand(len(data[0]), -1) for t in prior.mode())
        return minimise_elbo(gradients, mean, variance, lr, steps, samples, self.niw.options.kl_weight)

    def _problems(self, layout: Layout) -> Tuple[Problem, Problem]:
        return (
            Problem(self.niw, layout, self.loss, "support"),
            Problem(self.niw, layout, self.query_loss, "query"),
        )

    def _look(self, problem: Problem, m0: Tensor, data: Data) -> Facts:
        """A problem's facts, once for data of the same shapes."""
        check_frozen(problem.layout, self.niw.allow_nograd)
        key = (problem.name, problem.place, tuple(problem.layout.names), *(t.shape[1:] for t in data))
        if key not in self._facts:
            self._facts[key] = problem.look(m0, data)
        facts = self._facts[key]
        if problem.name == "support":
            check_used(problem.layout.names, facts.used, self.niw.allow_unused)
        return facts

    @property
    def _compiled(self) -> bool:
        return self._objective is not side_by_side.objective

    def _chunk(self, facts: Sequence[Facts], layout: Layout) -> int:
        """How many episodes fit into `memory`: what a graph saves, and about ten vectors of weights, take its bytes."""
        vectors = 10 + (self.steps if self._compiled else 0)
        own = max(f.bytes for f in facts) + self.steps * facts[0].readout
        return max(1, int(self.memory) // (own + vectors * layout.d * layout.dtype.itemsize))

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
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            if self._compiled:
                self._objective = side_by_side.objective
                warnings.warn(f"Episodes are not compiled: {reason}", stacklevel=3)
                return self._try(run)
            norms = any(isinstance(m, _BatchNorm) and m.training and m.track_running_stats for m in self.niw.modules())
            self._warn(BATCH_NORM if norms else reason)
            return None  # if it was not vmap's doing, the loop will raise it again

    def _warn(self, reason: str) -> None:
        if not self._one_by_one:
            warnings.warn(f"Episodes run one after another instead of side by side: {reason}", stacklevel=4)
        self._one_by_one = True

    def _loop(self, prior: Prior, support: Data, query: Data, traced: Sequence[int]) -> Tuple[Tensor, List[Tensor]]:
        """The same, one episode after another."""
        value, totals, inputs = 0.0, [torch.zeros_like(leaf) for leaf in prior.leaves], []
        for i in range(len(support[0])):
            learner = self._loop_chain([t[i] for t in support]).as_query()
            data = [t[i].requires_grad_(k in traced) for k, t in enumerate(query)]
            with torch.enable_grad():
                loss = self.query_loss(learner, *data)
                if not self.niw.options.auto_kl:
                    loss = learner.objective(loss)
            check_finite(loss, "the query loss")
            own = [data[k] for k in traced]
            found = torch.autograd.grad(loss, [*learner._prior.leaves, *own], allow_unused=True)
            value = value + loss.detach()
            totals = [total if g is None else total + g for total, g in zip(totals, found)]
            inputs.append([torch.zeros_like(t) if g is None else g for t, g in zip(own, found[len(totals) :])])
        return value, [*totals, *(torch.stack(parts) for parts in zip(*inputs))]

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
