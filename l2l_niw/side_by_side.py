"""Episodes side by side, on `torch.func`: what `NIWLearner` does for one, for C of them in one call of each operation.

Weights are (C, d) where a learner has (d,), and `vmap` gives each episode its own network. The functions here look at
no value: they are pure, so that `torch.compile` can make one program of all steps, and the checks come afterwards.
"""

import math
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vjp, vmap

from l2l_niw.chain import Chain, langevin_step, noise_variance
from l2l_niw.checks import check_finite
from l2l_niw.closed_form import draw
from l2l_niw.episode import chain_precision, kl_to_prior, pull_back
from l2l_niw.errors import ArgumentError, LossError
from l2l_niw.forwards import batch_size
from l2l_niw.niw import NIW
from l2l_niw.prior import FlatPrior, Prior
from l2l_niw.weights import Layout, Stateless

Data = Sequence[Tensor]
Loss = Callable[..., Tensor]


class Network:
    """One episode's network as a function of its inputs, which remembers what it was asked."""

    def __init__(self, run: Stateless, weights: Dict[str, Tensor]):
        self.run, self.weights = run, weights
        self.calls: List[Tuple[Optional[int], object]] = []

    def __call__(self, *args, **kwargs):
        outputs = self.run(self.weights, args, kwargs)
        self.calls.append((batch_size(outputs, (args, kwargs)), outputs))
        return outputs


class Facts(NamedTuple):
    """What one look at a loss tells: the number of data, which parameters it uses, the bytes that its graph saves."""

    n: int
    used: Tuple[bool, ...]
    bytes: int


class Problem:
    """
    **Description**

    The loss of one episode as a function of its flat weights: the support's or the query's.

    **Arguments**

    * **niw** (NIW) - The wrapper.
    * **layout** (Layout) - Where its random weights stand in the flat vector.
    * **loss** (callable) - `loss(network, *data)`.
    * **name** (str) - 'support' or 'query', for errors.
    """

    def __init__(self, niw: NIW, layout: Layout, loss: Loss, name: str):
        self.niw, self.layout, self.loss, self.name = niw, layout, loss, name
        self.run = Stateless(niw.module)

    def value(self, theta: Tensor, data: Data) -> Tensor:
        return self.loss(Network(self.run, self.layout.named(theta)), *data)

    def with_scalars(self, theta: Tensor, data: Data) -> Tuple[Tensor, Tensor]:
        """The loss, and the curvature strategy's scalars of the outputs behind it."""
        network = Network(self.run, self.layout.named(theta))
        value = self.loss(network, *data)
        return value, sum(torch.stack(list(self.niw.options.curvature.scalars(out))) for _, out in network.calls)

    def gradients(self, theta: Tensor, data: Data) -> Tuple[Tensor, Tensor]:
        """Of C episodes: each one's gradient, (C, d), and loss, (C,)."""
        return vmap(grad_and_value(self.value), randomness="different")(theta, tuple(data))

    def all_gradients(self, theta: Tensor, data: Data, traced: Sequence[int]) -> Tuple[Tensor, List[Tensor], Tensor]:
        """The same, and the gradients of those of the data that are `traced`."""

        def one(theta: Tensor, inputs: Data, data: Data) -> Tensor:
            given = dict(zip(traced, inputs))
            return self.value(theta, [given.get(i, t) for i, t in enumerate(data)])

        run = vmap(grad_and_value(one, argnums=(0, 1)), randomness="different")
        (gradient, inputs), losses = run(theta, tuple(data[i] for i in traced), tuple(data))
        return gradient, list(inputs), losses

    def gradients_and_curvature(self, theta: Tensor, data: Data) -> Tuple[Tensor, Tensor, Tensor]:
        """The same, and what the curvature strategy sees, (C, d)."""

        def one(theta: Tensor, data: Data) -> Tuple[Tensor, Tensor, Tensor]:
            (value, scalars), pull = vjp(lambda t: self.with_scalars(t, data), theta)
            one, none = torch.ones_like(value), torch.zeros_like(value)
            squares = [pull((none, unit))[0].square() for unit in torch.eye(len(scalars)).to(scalars)]
            return pull((one, torch.zeros_like(scalars)))[0], value, sum(squares) / self.niw.options.curvature.repeats

        return vmap(one, randomness="different")(theta, tuple(data))

    def look(self, theta: Tensor, data: Data) -> Facts:
        """Runs the first episode, to check its loss and to learn what does not depend on values."""
        saved: Dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        weights = [w.detach().requires_grad_() for w in self.layout.split(theta)]
        buffers = {name: b.clone() for name, b in self.niw.module.named_buffers()}  # a look writes to nothing
        network = Network(self.run, {**dict(zip(self.layout.names, weights)), **buffers})
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            value = self.loss(network, *(t[0] for t in data))
        counts = [n for n, _ in network.calls]
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise LossError(f"the {self.name} loss of an episode must be a scalar tensor; average it over the data.")
        if not counts or not value.requires_grad:
            raise LossError(f"the {self.name} loss does not depend on its network: compute it as loss(network, ...).")
        if None in counts:
            raise ArgumentError(f"the {self.name} loss: no output has a batch dimension, so data cannot be counted.")
        found = torch.autograd.grad(value, weights, allow_unused=True)
        return Facts(sum(counts), tuple(g is not None for g in found), sum(saved.values()))


class Result(NamedTuple):
    """Chains, and what they were made of: the losses, (steps, C), and the curvature's observations, (C, d)."""

    chain: Chain
    losses: Tensor
    observed: Optional[Tensor]


def run_chains(
    problem: Problem, facts: Facts, steps: int, m0: Tensor, scale: Optional[Tensor], noise: Optional[Tensor], data: Data
) -> Result:
    """`steps` Langevin steps of C episodes from m_0, with noise (steps, C, d), or drawn here step by step."""
    niw, options = problem.niw, problem.niw.options
    temperature = options.temperature if options.curvature.noisy else 0.0
    chain, losses, observed = Chain(m0.expand(len(data[0]), -1)), [], None
    for step in range(steps):
        if options.curvature.needs_outputs:
            gradient, loss, seen = problem.gradients_and_curvature(chain.theta, data)
            observed = seen if observed is None else observed + seen
        else:
            gradient, loss = problem.gradients(chain.theta, data)
        draws = None if noise is None else noise[step]
        theta = langevin_step(chain.theta, gradient, niw.lr, temperature, facts.n, scale, draws)
        chain = chain.append(problem.layout.keep(theta, chain.theta, facts.used), options.burn_in)
        losses.append(loss)
    return Result(chain, torch.stack(losses), observed)


def growth(niw: NIW, prior: Prior, flat: FlatPrior) -> Optional[Tensor]:
    return torch.exp(flat.log_variance - prior.log_start) if niw.options.precondition else None


class Objective(NamedTuple):
    """The chains, the query's losses, (C,), the KL, (C,), the gradients of flat L_0, and those of traced query data."""

    result: Result
    query: Tensor
    kl: Optional[Tensor]
    gradients: Tuple[Tensor, ...]
    inputs: List[Tensor]


def objective(
    support: Problem,
    query: Problem,
    facts: Tuple[Facts, Facts],
    steps: int,
    prior: Prior,
    flat: FlatPrior,
    noise: Optional[Tensor],
    support_data: Data,
    query_data: Data,
    traced: Sequence[int] = (),
) -> Objective:
    """The episodes' objective, and its gradient summed over them, from L_0 to the query and back."""
    niw, options = support.niw, support.niw.options
    scale = growth(niw, prior, flat)
    result = run_chains(support, facts[0], steps, flat.m0, scale, noise, support_data)
    variance = noise_variance(niw.lr, options.temperature, facts[0].n)
    a = chain_precision(options, prior.layout, result.chain, result.observed, facts[0].used, variance, scale)
    a = a.clamp(*options.precision_range)
    m_bar, offset = result.chain.mean, options.curvature.offset(result.chain, a)
    drawn = draw(flat.m0, flat.log_variance, m_bar, a, offset)
    gradient, inputs, losses = query.all_gradients(drawn, query_data, traced)
    kl_weight = options.kl_weight / facts[1].n
    slopes = pull_back(options, prior, flat, m_bar, a, offset, gradient, kl_weight)
    kl = None if options.auto_kl else kl_to_prior(prior, flat, m_bar, a)
    return Objective(result, losses, kl, (slopes.m0.sum(0), slopes.log_variance.sum(0), slopes.raw_n0), inputs)


def chunks(size: int, *data: Data) -> Iterator[Tuple[List[Tensor], ...]]:
    for start in range(0, len(data[0][0]), size):
        yield tuple([t[start : start + size] for t in part] for part in data)


def check_chains(result: Result) -> None:
    """Looks at chains once they have run: at the losses of every step, and where they came to."""
    if not math.isfinite(result.losses.sum().item()):
        for losses in result.losses:
            check_finite(losses, "the support loss")
    if not math.isfinite(result.chain.theta.sum().item()):
        raise LossError("the last step's result is not finite. Lower lr or the temperature, or check the inputs.")
