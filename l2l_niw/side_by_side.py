"""Episodes side by side, on `torch.func`: what `NIWLearner` does for one, for C of them in one call of each operation.

Weights are (C, d) where a learner has (d,); `vmap` gives each episode its own network, and since episodes do not touch
each other, the gradient of the sum of their losses holds the gradient of each.
"""

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from l2l_niw.chain import Chain, langevin_step, noise_variance
from l2l_niw.checks import check_finite, check_frozen, check_step, check_used
from l2l_niw.elbo import minimise_elbo
from l2l_niw.episode import Episode
from l2l_niw.errors import ArgumentError, LossError
from l2l_niw.forwards import batch_size
from l2l_niw.niw import NIW
from l2l_niw.prior import Prior

Data = Sequence[Tensor]
Loss = Callable[..., Tensor]


class Losses(NamedTuple):
    """Of C episodes: losses, (C,), gradients by parameter, (C, ...), what the curvature saw, (C, d), and n."""

    values: Tensor
    gradients: List[Optional[Tensor]]
    observed: Optional[Tensor]
    n: int


class Network:
    """One episode's network as a function of its inputs, which remembers what it was asked."""

    def __init__(self, module: nn.Module, weights: Dict[str, Tensor]):
        self.module, self.weights = module, weights
        self.calls: List[Tuple[Optional[int], object]] = []

    def __call__(self, *args, **kwargs):
        outputs = functional_call(self.module, self.weights, args, kwargs)
        self.calls.append((batch_size(outputs, (args, kwargs)), outputs))
        return outputs


def evaluate(
    niw: NIW, names: Sequence[str], weights: Sequence[Tensor], loss: Loss, data: Data, observe: bool = False
) -> Tuple[Tensor, Optional[Tensor], int]:
    """Losses of C episodes, (C,), the curvature's scalars if observed, (C, repeats), and the number of data of each."""
    seen: List[Optional[int]] = []

    def one(weights: Sequence[Tensor], data: Data):
        network = Network(niw.module, dict(zip(names, weights)))
        value = loss(network, *data)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise LossError("the loss of an episode must be a scalar tensor; average it over the data first.")
        seen[:] = [n for n, _ in network.calls]
        scalars = [torch.stack(list(niw.options.curvature.scalars(out))) for _, out in network.calls] if observe else []
        return (value.reshape(()), *scalars)

    values, *scalars = vmap(one, randomness="different")(list(weights), tuple(data))
    if not seen:
        raise LossError("the loss of an episode must call the network that it is given: loss(network, ...).")
    if None in seen:
        raise ArgumentError("no tensor of the network's outputs has a batch dimension, so data cannot be counted.")
    return values, sum(scalars) if observe else None, sum(seen)


def losses_and_gradients(
    niw: NIW, prior: Prior, loss: Loss, theta: Tensor, data: Data, what: str, observe: bool = False
) -> Losses:
    """The losses of C episodes at their weights, and each one's gradient."""
    layout = prior.layout
    leaves = [w.detach().requires_grad_() for w in layout.split(theta)]
    with torch.enable_grad():
        values, scalars, n = evaluate(niw, layout.names, leaves, loss, data, observe)
    if not values.requires_grad:
        raise LossError(f"the {what} loss does not depend on the network that it is given: loss(network, ...).")
    check_finite(values, f"the {what} loss")
    every = torch.ones_like(values)
    gradients = list(torch.autograd.grad(values, leaves, every, allow_unused=True, retain_graph=observe))
    if not observe:
        return Losses(values.detach(), gradients, None, n)
    with torch.enable_grad():
        columns = scalars.unbind(1)
    found = (torch.autograd.grad(s, leaves, every, allow_unused=True, retain_graph=True) for s in columns)
    observed = sum(flat_gradient(prior, g, theta).square() for g in found) / niw.options.curvature.repeats
    return Losses(values.detach(), gradients, observed, n)


def run_chains(niw: NIW, prior: Prior, loss: Loss, support: Data, steps: int) -> Episode:
    """The chains of C episodes and what follows from them, as `NIWLearner.adapt` has it for one."""
    options, layout = niw.options, prior.layout
    check_frozen(layout, niw.allow_nograd)
    scale = prior.growth() if options.precondition else None
    temperature = options.temperature if options.curvature.noisy else 0.0
    observed, used = None, [False] * len(layout.names)
    with torch.no_grad():
        chain = Chain(prior.flat().m0.expand(len(support[0]), -1))
        for _ in range(steps):
            losses = losses_and_gradients(
                niw, prior, loss, chain.theta, support, "support", options.curvature.needs_outputs
            )
            check_used(layout.names, losses.gradients, niw.allow_unused)
            used = [before or g is not None for before, g in zip(used, losses.gradients)]
            if losses.observed is not None:
                observed = losses.observed if observed is None else observed + losses.observed
            gradient = flat_gradient(prior, losses.gradients, chain.theta)
            theta = langevin_step(chain.theta, gradient, niw.lr, temperature, losses.n, scale)
            theta = layout.keep(theta, chain.theta, losses.gradients)
            check_step(layout, gradient, theta)
            chain = chain.append(theta, options.burn_in)
    pseudo = noise_variance(niw.lr, options.temperature, losses.n) * (1.0 if scale is None else scale)
    return Episode(prior, chain, options, observed, used, pseudo, losses.n)


def flat_gradient(prior: Prior, gradients: Sequence[Optional[Tensor]], theta: Tensor) -> Tensor:
    shapes = prior.layout.split(theta, cast=False)
    return prior.layout.flatten_batch([torch.zeros_like(w) if g is None else g for w, g in zip(shapes, gradients)])


def objective(
    niw: NIW, prior: Prior, loss: Loss, query_loss: Loss, support: Data, query: Data, steps: int
) -> Tuple[Tensor, List[Tensor]]:
    """The sum over C episodes of the query loss, and the gradients of L_0's leaves for it and for the KL."""
    options = niw.options
    episode = run_chains(niw, prior, loss, support, steps)
    with torch.no_grad():
        flat = prior.flat()
        theta = episode.draw(flat)
        losses = losses_and_gradients(niw, prior, query_loss, theta, query, "query")
        kl_weight, value = options.kl_weight / losses.n, losses.values.sum()
        if kl_weight and not options.auto_kl:
            value = value + kl_weight * episode.kl(flat).sum()
    niw._remember(episode)
    return value, episode.pull_back(flat_gradient(prior, losses.gradients, theta), kl_weight)


@torch.no_grad()
def elbo_moments(
    niw: NIW, prior: Prior, loss: Loss, support: Data, steps: int, lr: float, samples: int
) -> Tuple[Tensor, Tensor]:
    """Means and variances of C tasks' weights after `steps` steps on the support's ELBO from the mode."""
    mean, variance = (t.expand(len(support[0]), -1) for t in prior.mode(prior.flat()))

    def total(weights: Tensor) -> Tuple[Tensor, int]:
        values, _, n = evaluate(niw, prior.layout.names, prior.layout.split(weights), loss, support)
        check_finite(values, "the support loss")
        return values.sum(), n

    return minimise_elbo(total, mean, variance, lr, steps, samples, niw.options.kl_weight)


def saved_bytes(niw: NIW, prior: Prior, loss: Loss, data: Data) -> int:
    """What one episode takes while it runs: what its graph saves, and about ten vectors of its weights."""
    saved: Dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    theta = prior.flat().m0.detach().unsqueeze(0)
    leaves = [w.detach().requires_grad_() for w in prior.layout.split(theta)]
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        evaluate(niw, prior.layout.names, leaves, loss, [t[:1] for t in data])
    return sum(saved.values()) + 10 * theta.numel() * theta.element_size()
