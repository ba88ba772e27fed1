"""Episodes side by side, on `torch.func`: what `NIWLearner` does for one, for C of them in one call of each operation.

Weights are (C, d) where a learner has (d,), and `vmap` gives each episode its own network. The functions here look at
no value: they are pure, so that `torch.compile` can make one program of all steps, and the checks come afterwards.
"""

import math
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vjp, vmap
from torch.nn import functional as F

from l2l_niw.chain import Chain, langevin_step, noise_variance
from l2l_niw.checks import check_finite
from l2l_niw.closed_form import draw
from l2l_niw.episode import add_readout, chain_precision, kl_to_prior, pull_back
from l2l_niw.errors import ArgumentError, LossError
from l2l_niw.forwards import batch_size
from l2l_niw.niw import NIW
from l2l_niw.prior import FlatPrior, Prior
from l2l_niw.readout import Call, Step, Trace, by_datum, differentiate, with_ones
from l2l_niw.weights import Layout, Replica, Stateless

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


class Split(Network):
    """The same with its readout apart: a function of features, which it remembers too."""

    def __init__(self, run: Stateless, weights: Dict[str, Tensor], readout: Tuple[Tensor, Optional[Tensor]]):
        super().__init__(run, weights)
        self.readout = readout
        self.features: Optional[Tensor] = None

    def __call__(self, *args, **kwargs):
        self.features = super().__call__(*args, **kwargs)
        return F.linear(self.features, *self.readout)


class Facts(NamedTuple):
    """
    What one look at a loss tells: the number of data, which parameters it uses, the bytes that its graph saves, and
    those of a step of the readout, 0 if it is not traced.
    """

    n: int
    used: Tuple[bool, ...]
    bytes: int
    readout: int


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
        self.place = niw._traced_readout(layout, niw.first_order)
        self.body = None if self.place is None else Stateless(Replica(niw.module, layout).without(self.place.name))

    def network(self, theta: Tensor, split: bool = False) -> Network:
        weights = self.layout.named(theta)
        if not split:
            return Network(self.run, weights)
        readout = [None if i is None else weights[self.layout.names[i]] for i in self.place[1:]]
        return Split(self.body, {name: w for name, w in weights.items() if self.body.has(name)}, readout)

    def value(self, theta: Tensor, data: Data) -> Tensor:
        return self.loss(self.network(theta), *data)

    def with_scalars(self, theta: Tensor, data: Data) -> Tuple[Tensor, Tensor]:
        """The loss, and the curvature strategy's scalars of the outputs behind it."""
        network = self.network(theta)
        value = self.loss(network, *data)
        return value, sum(torch.stack(list(self.niw.options.curvature.scalars(out))) for _, out in network.calls)

    def gradients(self, theta: Tensor, data: Data) -> Tuple[Tensor, Tensor]:
        """Of C episodes: each one's gradient, (C, d), and loss, (C,)."""
        return vmap(grad_and_value(self.value), randomness="different")(theta, tuple(data))

    def features(self, theta: Tensor, data: Data) -> Tensor:
        """What the readout gets, of one episode."""
        network = self.network(theta, split=True)
        self.loss(network, *data)
        return network.features

    def gradients_and_features(self, theta: Tensor, data: Data) -> Tuple[Tensor, Tensor, Tensor]:
        """As `gradients`, and what the readouts got."""

        def one(theta: Tensor, data: Data) -> Tuple[Tensor, Tensor]:
            network = self.network(theta, split=True)
            return self.loss(network, *data), network.features

        run = vmap(grad_and_value(one, has_aux=True), randomness="different")
        gradient, (losses, features) = run(theta, tuple(data))
        return gradient, losses, features

    def step(self, theta: Tensor, features: Tensor, data: Data) -> Step:
        """A step of C episodes' readouts, but for where it goes."""

        def one(theta: Tensor, features: Tensor, data: Data) -> Tuple[Tensor, ...]:
            weights = self.network(theta, split=True).readout
            slope = grad(lambda outputs: self.loss(lambda *args, **kwargs: outputs, *data))
            gradient, back = vjp(slope, F.linear(features, *weights))
            units = torch.eye(gradient.shape[-1], dtype=gradient.dtype, device=gradient.device)
            rows = vmap(lambda unit: back(unit.expand_as(gradient))[0])(units)
            inputs = with_ones(by_datum(features), self.place.bias is not None)
            hessian = rows.reshape(len(units), -1, len(units)).movedim(0, -2)
            return inputs, by_datum(gradient), hessian

        found = vmap(one, randomness="different")(theta, features, tuple(data))
        parts = [t.to(self.layout.dtype) for t in found]
        return Step(self.place.join(self.layout.split(theta, cast=False)), self.niw.lr, *parts)

    def pull(self, m0: Tensor, data: Data) -> Callable[[Tensor], List[Tensor]]:
        """From gradients in C episodes' features to those of every parameter, at m_0."""

        def one(slope: Tensor, m0: Tensor, data: Data) -> Tensor:
            features, back = vjp(lambda theta: self.features(theta, data), m0)
            return back(slope.reshape(features.shape).to(features.dtype))[0]

        run = vmap(one, randomness="different")
        return lambda slopes: self.layout.split(run(slopes, m0.expand(len(slopes), -1), tuple(data)), cast=False)

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
        network, first = Network(self.run, {**dict(zip(self.layout.names, weights)), **buffers}), [t[0] for t in data]
        state, seen = torch.get_rng_state(), []
        watched = nn.Identity() if self.place is None else self.niw.module.get_submodule(self.place.name)
        handle = watched.register_forward_hook(lambda module, args, outputs: seen.append(Call(args, outputs)))
        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                value = self.loss(network, *first)
        finally:
            handle.remove()
        counts = [n for n, _ in network.calls]
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise LossError(f"the {self.name} loss of an episode must be a scalar tensor; average it over the data.")
        if not counts or not value.requires_grad:
            raise LossError(f"the {self.name} loss does not depend on its network: compute it as loss(network, ...).")
        if None in counts:
            raise ArgumentError(f"the {self.name} loss: no output has a batch dimension, so data cannot be counted.")
        readout = 0
        if len(seen) == len(counts) == 1 and self.name == "support" and seen[0].gave(network.calls[0][1]):
            readout = self.look_at_readout(value, seen[0], theta, buffers, first, state)
        found = torch.autograd.grad(value, weights, allow_unused=True)
        return Facts(sum(counts), tuple(g is not None for g in found), sum(saved.values()), readout)

    def look_at_readout(
        self, value: Tensor, call: Call, theta: Tensor, buffers: Dict[str, Tensor], data: Data, state: Tensor
    ) -> int:
        """The bytes of a step of the readout, 0 if the loss does not let it be traced."""
        if not differentiate(value, call.outputs)[-1]:
            return 0
        after = torch.get_rng_state()
        torch.set_rng_state(state)  # as the first time
        network = self.network(theta.detach(), split=True)
        network.weights.update({name: b for name, b in buffers.items() if self.body.has(name)})
        try:
            with torch.no_grad():
                self.loss(network, *data)
                same = torch.allclose(F.linear(network.features, *network.readout), call.outputs, atol=1e-4, rtol=1e-3)
        except AttributeError:
            same = False
        finally:
            torch.set_rng_state(after)
        if not same:
            raise RuntimeError("the model is not its last layer of what it is without it.")
        numbers = call.features.numel() + call.outputs.numel() * (1 + call.outputs.shape[-1])
        return (numbers + sum(w.numel() for w in network.readout if w is not None)) * self.layout.dtype.itemsize


class Result(NamedTuple):
    """
    Chains, and what they were made of: the losses, (steps, C), the curvature's observations, (C, d), and the readouts'
    steps.
    """

    chain: Chain
    losses: Tensor
    observed: Optional[Tensor]
    steps: List[Step]


def run_chains(
    problem: Problem,
    facts: Facts,
    steps: int,
    m0: Tensor,
    scale: Optional[Tensor],
    noise: Optional[Tensor],
    data: Data,
    trace: bool = False,
) -> Result:
    """
    `steps` Langevin steps of C episodes from m_0, with noise (steps, C, d), or drawn here step by step; and the
    readouts' steps, to be traced.
    """
    niw, options = problem.niw, problem.niw.options
    temperature = options.temperature if options.curvature.noisy else 0.0
    chain, losses, observed, readouts = Chain(m0.expand(len(data[0]), -1)), [], None, []
    for step in range(steps):
        if options.curvature.needs_outputs:
            gradient, loss, seen = problem.gradients_and_curvature(chain.theta, data)
            observed = seen if observed is None else observed + seen
            features = vmap(problem.features, randomness="different")(chain.theta, tuple(data)) if trace else None
        elif trace:
            gradient, loss, features = problem.gradients_and_features(chain.theta, data)
        else:
            gradient, loss = problem.gradients(chain.theta, data)
        if trace:
            readouts.append(problem.step(chain.theta, features, data))
        draws = None if noise is None else noise[step]
        theta = langevin_step(chain.theta, gradient, niw.lr, temperature, facts.n, scale, draws)
        chain = chain.append(problem.layout.keep(theta, chain.theta, facts.used), options.burn_in)
        losses.append(loss)
    return Result(chain, torch.stack(losses), observed, readouts)


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
    result = run_chains(support, facts[0], steps, flat.m0, scale, noise, support_data, facts[0].readout > 0)
    variance = noise_variance(niw.lr, options.temperature, facts[0].n)
    a = chain_precision(options, prior.layout, result.chain, result.observed, facts[0].used, variance, scale)
    a = a.clamp(*options.precision_range)
    m_bar, offset = result.chain.mean, options.curvature.offset(result.chain, a)
    drawn = draw(flat.m0, flat.log_variance, m_bar, a, offset)
    gradient, inputs, losses = query.all_gradients(drawn, query_data, traced)
    kl_weight = options.kl_weight / facts[1].n
    slopes = pull_back(options, prior, flat, m_bar, a, offset, gradient, kl_weight)
    if facts[0].readout:
        trace = Trace(support.place, tuple(result.steps), pull=support.pull(flat.m0, support_data))
        add_readout(options, prior, flat, result.chain, a, scale, trace, gradient, slopes)
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
