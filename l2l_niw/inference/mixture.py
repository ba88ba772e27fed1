"""A mixture of NIWs: which component a task belongs to, what training minimises, and a posterior of several modes.

z_i ~ Cat(pi), theta_i | z_i = k ~ N(mu_k, Sigma_k), and each phi_k = (mu_k, Sigma_k) has its own NIW. An episode's
support has the free energy F_k = E_q[l_i] + KL under component k, an upper bound of -log p(S | k).
"""

import math
from typing import Any, Callable, List, NamedTuple, Optional, Sequence

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, MixtureSameFamily, Normal
from torch.nn.functional import logsigmoid

from l2l_niw.errors import ArgumentError
from l2l_niw.heads.predictions import Prediction
from l2l_niw.inference.gaussian import GaussianWeights, Outputs
from l2l_niw.utils._checks import check_number


class Energies(NamedTuple):
    """
    **Description**

    What B episodes cost under one component, in nats, (B,) each.

    * `support` - F, the support's free energy.
    * `query` - The query's summed loss.
    * `kl` - What is added to the query's loss: kl_weight times the KL, or 0 where F is what is added.
    * `constant` - Of the query's negative log-likelihood, what its loss leaves out: the noise's of a squared error.
    * `unit` - The mean query loss that is one nat in all.
    """

    support: Tensor
    query: Tensor
    kl: Tensor
    constant: Tensor
    unit: Tensor


def log_responsibilities(log_weights: Tensor, free_energies: Tensor) -> Tensor:
    """
    **Description**

    log r of the components, (..., K), given a support:

    $$r_k = \\frac{\\pi_k \\exp(-F_k)}{\\sum_j \\pi_j \\exp(-F_j)}.$$

    **Arguments**

    * **log_weights** (Tensor) - log pi, (K,), up to a constant.
    * **free_energies** (Tensor) - F, (..., K), in nats.
    """
    return (log_weights.to(free_energies.dtype) - free_energies).log_softmax(-1)


class Objective(NamedTuple):
    """Of B episodes: the query's loss, the evidence's and the KL's part beside it, (B,), and log r, (B, K)."""

    loss: Tensor
    rest: Tensor
    log_responsibilities: Tensor


def mixture_objective(
    log_weights: Tensor, parts: Sequence[Energies], evidence_weight: float, uniform: bool = False
) -> Objective:
    """
    **Description**

    What training minimises, per episode, in units of the query's mean loss: the query's predictive under the support's
    responsibilities, and with weight w the support's own,

    $$-\\log \\sum_k r_k \\exp(-l^Q_k) - w \\log \\sum_k \\pi_k \\exp(-F_k).$$

    With w = 1 they are -log sum_k pi_k exp(-F_k - l^Q_k) together, which is the mixture's marginal likelihood where F
    and the query's loss are exact. A chain's KL is added to its query's loss instead, and w is 0. With one component it
    is that component's objective, and so it is with several that are the same. With `uniform` responsibilities it is
    the components' mean.

    **Arguments**

    * **log_weights** (Tensor) - log pi, (K,), up to a constant.
    * **parts** (sequence) - Every component's energies.
    * **evidence_weight** (float) - w.
    * **uniform** (bool, *optional*, default=False) - Whether every component has the same share of every task.
    """
    support, query, kl, constant, unit = (torch.stack(column, -1) for column in zip(*parts))
    shares = log_responsibilities(log_weights, support)
    if uniform:
        return Objective((unit * query).mean(-1), (unit * (kl + evidence_weight * support)).mean(-1), shares.detach())
    scale, query, offset = unit.mean(-1), query + constant, constant.mean(-1)
    loss = -torch.logsumexp(shares - query, -1) - offset
    total = -torch.logsumexp(shares - query - kl, -1) - offset
    prior = log_weights.to(support.dtype).log_softmax(-1)
    evidence = -torch.logsumexp(prior - support, -1)
    return Objective(scale * loss, scale * (total - loss + evidence_weight * evidence), shares.detach())


class MixtureWeights:
    """
    **Description**

    A posterior of several modes over the weights of one task, or of B tasks: every component's Gaussian, and how much
    of the task is each one's.

    **Arguments**

    * **components** (sequence) - A `GaussianWeights` each, or a `LatentWeights`.
    * **log_responsibilities** (Tensor) - log r, (K,) or (B, K).

    **Example**

    ~~~python
    post = niw.posterior(lambda network: loss(network(x), y), steps=5)
    post.responsibilities                                             # (K,)
    probabilities = post.predict(x_query, samples=12).softmax(-1).mean(0)
    ~~~
    """

    def __init__(self, components: Sequence[GaussianWeights], log_responsibilities: Tensor):
        self.components, self.log_responsibilities = list(components), log_responsibilities

    @property
    def responsibilities(self) -> Tensor:
        """r, (K,) or (B, K)."""
        return self.log_responsibilities.exp()

    def draw(self) -> Callable:
        """A network of one task: a component by its responsibility, and weights from that one's posterior."""
        if self.log_responsibilities.dim() > 1:
            raise ArgumentError("draw: these are posteriors of several tasks. Use predict, or infer one task.")
        part = self.components[int(torch.multinomial(self.responsibilities, 1))]
        return part.network(part.sample())

    def counts(self, samples: int) -> Tensor:
        """How many of the networks are each component's, by systematic sampling: r times their number on average."""
        ends = self.responsibilities.double().cumsum(-1) * samples
        ends[..., -1] = samples
        offset = torch.rand(ends.shape[:-1], dtype=ends.dtype, device=ends.device).unsqueeze(-1)
        numbers = torch.ceil(ends - offset).clamp(0, samples).long()
        return torch.diff(numbers, prepend=torch.zeros_like(numbers[..., :1]))

    def predict(self, *args: Any, samples: int = 10, vectorize: Optional[bool] = None, **kwargs: Any) -> Outputs:
        """
        **Description**

        Outputs of `samples` networks drawn from the mixture, stacked on dimension 0, as those of one component's
        posterior: average probabilities, `predict(x).softmax(-1).mean(0)`. How many of them are of each component is
        its responsibility times their number, on average. The predictions of an `EpisodicModel` are averaged here, to
        one distribution, in which components are weighed by the responsibilities themselves.

        **Arguments**

        * **samples** (int, *optional*, default=10) - Networks.
        * **vectorize** (bool, *optional*, default=None) - As in `GaussianWeights.predict`.
        """
        check_number("samples", samples, 1, whole=True)
        counts = self.counts(samples)
        drawn: List[Any] = [
            part.predict(*args, samples=max(1, int(own.max())), vectorize=vectorize, **kwargs)
            for part, own in zip(self.components, counts.unbind(-1))
        ]
        if isinstance(drawn[0], Prediction):
            return self._mixed(drawn)
        if counts.dim() == 1:
            return torch.cat([outputs[:number] for outputs, number in zip(drawn, counts.tolist())])
        tasks = [
            torch.cat([outputs[:number, b] for outputs, number in zip(drawn, own)])
            for b, own in enumerate(counts.tolist())
        ]
        return torch.stack(tasks, 1)

    def linearised(self, *args: Any, **kwargs: Any) -> Distribution:
        """
        **Description**

        The mixture of the components' linearised predictives, weighed by the responsibilities: with `rank` or
        curvature='full'. For B tasks every tensor among the arguments has a leading dimension B.
        """
        for part in self.components:
            if not hasattr(part, "linearised"):
                raise ArgumentError("linearised: it goes with rank or curvature='full'. Use predict(x, samples).")
        return self._mixed([part.linearised(*args, **kwargs) for part in self.components])  # type: ignore[attr-defined]

    def _mixed(self, parts: List[Any]) -> Any:
        """The components' predictions as one."""
        first, shares = parts[0], self.log_responsibilities
        if isinstance(first, Prediction):
            return type(first).mix(parts, shares)
        if isinstance(first, Categorical):
            logits = torch.stack([part.logits for part in parts])
            return Categorical(logits=torch.logsumexp(logits + ahead(shares, logits), 0), validate_args=False)
        if isinstance(first, Bernoulli):
            logs = [torch.stack([logsigmoid(sign * part.logits) for part in parts]) for sign in (1, -1)]
            yes, no = (torch.logsumexp(log + ahead(shares, log), 0) for log in logs)
            return Bernoulli(logits=yes - no, validate_args=False)
        event = len(first.event_shape)
        means, scales = (
            torch.stack([getattr(part, name) for part in parts], -1 - event) for name in ("mean", "stddev")
        )
        normals = Independent(Normal(means, scales, validate_args=False), event, validate_args=False)
        weights = ahead(shares, means.movedim(-1 - event, 0)).movedim(0, -1 - event)
        weights = weights.flatten(-1 - event) if event else weights
        own = Categorical(logits=weights.expand(normals.batch_shape), validate_args=False)
        return MixtureSameFamily(own, normals, validate_args=False)

    def __repr__(self) -> str:
        return f"MixtureWeights({', '.join(map(repr, self.components))})"


def ahead(shares: Tensor, stacked: Tensor) -> Tensor:
    """log r, (K,) or (B, K), as what can be added to what components say, (K, ...) or (K, B, ...)."""
    shares = shares.movedim(-1, 0).to(stacked.dtype)
    return shares.reshape(shares.shape + (1,) * (stacked.dim() - shares.dim()))


def entropy(log_shares: Tensor) -> Tensor:
    """Of responsibilities, (...), in nats: 0 where one component has a task to itself, log K where all share it."""
    return -(log_shares.exp() * log_shares.clamp(min=math.log(torch.finfo(log_shares.dtype).tiny))).sum(-1)
