"""The Langevin chain of one episode (Sec. 3, "Quadratic approximation of episodic loss via SGLD")."""

import math
from typing import Collection, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from l2l_niw.inference.prior import Prior
from l2l_niw.utils._functional import in_blocks, picker

Tensors = Union[Tuple[Tensor, ...], List[Tensor]]
Pull = Union[float, Tensors]


def noise_variance(lr: float, temperature: float, n: float) -> float:
    """The variance that one step's noise adds: 2 lr T / n."""
    return 2.0 * lr * temperature / n


class Settings(NamedTuple):
    """
    **Description**

    How a chain steps.

    * `lr` - The step size: MAML's.
    * `temperature` - T.
    * `noisy` - Whether steps are Langevin's, or gradient descent's.
    * `learn_step_sizes` - Whether the steps of each weight are scaled by D = V_0 / n_0, relative to the start.
    * `prior_in_chain` - Whether the chain samples exp(-l_i / T) N(m_0, 1 / P_0), or exp(-l_i / T) alone.
    * `burn_in` - Iterates left out of the chain's moments; None for the moments of the last iterate alone.
    * `precision_bounds` - Floor and ceiling of the chain's precision.
    """

    lr: float
    temperature: float = 0.0
    noisy: bool = True
    learn_step_sizes: bool = False
    prior_in_chain: bool = False
    burn_in: Optional[int] = None
    precision_bounds: Tuple[float, float] = (1e-4, math.inf)


class Moments(NamedTuple):
    """Running moments of the kept iterates (Welford), with their origins' and sensitivities' means: O(d) memory."""

    mean: List[Tensor]
    origin: List[Tensor]
    sensitivity: List[Optional[Tensor]]
    squares: List[Tensor]
    count: int  # type: ignore[assignment]


class Chain(NamedTuple):
    """
    **Description**

    The state of an episode. States are never written to: a loss computed after an earlier step keeps its own.

    * `theta` - The last iterate, a constant.
    * `origin` - What it moves with: m_0, or where a clone of an adapted learner began, and the gradients of those steps
        that keep their graph. Only its derivatives count, but where all steps do: there it is the iterate itself.
    * `sensitivity` - d theta / d log V_0 beside what `origin` depends on, weight by weight: steps are proportional to D
        and noise to its square root. None for 0.
    * `moments` - Of the kept iterates; None where the last one stands for all.
    * `observed` - What the curvature strategy saw, summed over the steps, if it looks.
    * `used` - Which weights a loss has depended on.
    * `variance` - What one step's noise adds, where D is 1.
    """

    theta: List[Tensor]
    origin: List[Tensor]
    sensitivity: List[Optional[Tensor]]
    moments: Optional[Moments] = None
    observed: Optional[List[Tensor]] = None
    used: Tuple[bool, ...] = ()
    variance: float = 0.0
    steps: int = 0


def init(m0: Sequence[Tensor], lead: Tuple[int, ...] = ()) -> Chain:
    """A chain before its first step, or chains with these leading dimensions."""
    theta = [m.detach().expand((*lead, *m.shape)) for m in m0]
    return Chain(theta, list(m0), [None] * len(theta), used=(False,) * len(theta))


def noise_like(tensor: Tensor) -> Tensor:
    """
    **Description**

    Independent noise of mean 0 and variance 1. Normal, but uniform on 256 values for many weights on a CPU, where
    normal numbers would take longer than the step: the weak scheme of the same order, of which the sum over steps and
    weights is what counts.

    **References**

    1. Kloeden and Platen. 1992. "Numerical Solution of Stochastic Differential Equations." Sec. 14.1.
    """
    if tensor.numel() < 2048 or tensor.device.type != "cpu":
        return torch.randn_like(tensor)
    words = torch.empty((tensor.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
    levels = words.view(torch.int8)[: tensor.numel()].view(tensor.shape).to(tensor.dtype)
    return levels.add_(0.5).mul_(math.sqrt(12.0 / (256.0**2 - 1.0)))


def langevin_step(
    theta: Tensors,
    gradient: Tensors,
    m0: Tensors,
    log_variance: Optional[Tensors],
    shrinkage: Pull,
    sensitivity: Optional[Tensors],
    lr: float,
    size: float,
) -> Tuple[Tensors, ...]:
    """
    **Description**

    One Langevin step on l_i = n * loss at temperature T, in units of the mean loss, where D scales the step of each
    weight, then the proximal step of the prior, the exact minimiser of its energy plus the distance moved:

    $$\\theta \\gets \\theta - lr\\,D\\,\\nabla loss + \\sqrt{2\\,lr\\,D\\,T / n}\\;\\xi, \\qquad
    \\theta \\gets \\frac{\\theta + c\\,m_0}{1 + c}, \\quad c = lr\\,D\\,T P_0 / n.$$

    The drift is MAML's step. For small lr the stationary law is the tempered posterior, whatever D.

    **Arguments**

    * **log_variance** (list) - log(V_0 / n_0), to whose exponential D is proportional, or None for D = 1.
    * **shrinkage** (float or list) - c / (1 + c).
    * **sensitivity** (list) - As in `Chain`, or None.
    * **lr**, **size** (float) - lr and the square root of 2 lr T / n, or 0 for no noise; where D is not 1, for
        V_0 / n_0 = 1.

    **Returns** the next iterates and, if given, their sensitivities.

    **References**

    1. Welling and Teh. 2011. "Bayesian Learning via Stochastic Gradient Langevin Dynamics." ICML.
    """
    noise: Tensors = [noise_like(t) for t in theta] if size else []
    if log_variance is None:
        new = torch._foreach_add(theta, gradient, alpha=-lr)
    else:
        scale: Tensors = torch._foreach_exp(log_variance)
        if theta and scale[0].dtype != theta[0].dtype:
            scale = [d.to(t.dtype) for d, t in zip(scale, theta)]
        new = torch._foreach_addcmul(theta, gradient, scale, value=-lr)
        sensitivity = sensitivity and torch._foreach_addcmul(sensitivity, gradient, scale, value=-lr)
        noise = torch._foreach_mul(noise, torch._foreach_sqrt(scale)) if size else noise
    if size:
        torch._foreach_add_(new, noise, alpha=size)
        if sensitivity and log_variance is not None:
            torch._foreach_add_(sensitivity, noise, alpha=0.5 * size)
    if sensitivity and shrinkage:
        if isinstance(shrinkage, float):
            sensitivity = torch._foreach_mul(sensitivity, 1.0 - shrinkage)
        else:  # D is 1, and c alone depends on V_0
            sensitivity = [(1.0 - p) * (s + p * (t - m)) for s, p, t, m in zip(sensitivity, shrinkage, new, m0)]
    new = torch._foreach_lerp(new, m0, shrinkage) if shrinkage else new
    return (new,) if sensitivity is None else (new, sensitivity)


def prior_shrinkage(prior: Prior, indices: Sequence[int], n: float, settings: Settings) -> Pull:
    """c / (1 + c): a number where D is proportional to V_0, since D P_0 is one."""
    c = settings.lr * settings.temperature / n * prior.start
    if c == 0 or not settings.prior_in_chain:
        return 0.0
    if settings.learn_step_sizes:
        return c / (1.0 + c)
    return [(c / (prior.scale(i) + c)).to(prior.m0[i].dtype) for i in indices]


def step(
    chain: Chain,
    gradients: List[Optional[Tensor]],
    prior: Prior,
    n: float,
    settings: Settings,
    with_graph: Collection[int] = (),
    in_place: bool = False,
) -> Chain:
    """
    **Description**

    The chain after one step.

    **Arguments**

    * **gradients** (list) - Of the mean loss; None for weights that it does not depend on, which stay where they are.
        The list is emptied, so that each can be freed when its step is taken.
    * **n** (float) - The number of examples behind the loss.
    * **with_graph** (collection, *optional*, default=()) - The weights whose steps keep their graph.
    * **in_place** (bool, *optional*, default=False) - Whether sensitivities may be written to, since nothing else needs
        them; those of weights with a graph are not.
    """
    variance = noise_variance(settings.lr, settings.temperature, n)
    size = variance**0.5 if settings.noisy else 0.0
    theta, origin, sensitivity = list(chain.theta), list(chain.origin), list(chain.sensitivity)
    part = tuple([i for i, g in enumerate(gradients) if g is not None])
    used = tuple([u or g is not None for u, g in zip(chain.used, gradients)])
    own = [g for g in gradients if g is not None]
    gradients.clear()
    pick, shrinkage = picker(part), prior_shrinkage(prior, part, n, settings)
    m0, start = pick(prior.m0), pick(theta)
    lr, variances = settings.lr, None
    if settings.learn_step_sizes:
        lr, size, variances = lr * prior.start, size * prior.start**0.5, pick(prior.log_variance)
    if part and len(with_graph) == len(theta):  # an ordinary graph, exact to any order
        (new,) = langevin_step(pick(origin), own, m0, variances, shrinkage, None, lr, size)
        for k, i in enumerate(part):
            theta[i], origin[i], sensitivity[i] = new[k].detach(), new[k], None
    elif part:
        for k, i in enumerate(part):
            if i in with_graph:
                if variances is None:
                    origin[i] = torch.add(origin[i], own[k], alpha=-lr)
                else:
                    scale = variances[k].detach().exp().to(own[k].dtype)
                    origin[i] = torch.addcmul(origin[i], own[k], scale, value=-lr)
            if shrinkage and origin[i] is not m0[k]:
                origin[i] = torch.lerp(
                    origin[i], m0[k], shrinkage if isinstance(shrinkage, float) else shrinkage[k].detach()
                )
        given, sensitivities = pick(sensitivity), None
        if variances or shrinkage or True in [s is not None for s in given]:
            sensitivities = [torch.zeros_like(t) if s is None else s for t, s in zip(start, given)]
            sensitivities = [s.clone() if in_place and i in with_graph else s for i, s in zip(part, sensitivities)]
        with torch.no_grad():
            columns = start, own, m0, variances, shrinkage, sensitivities, lr, size
            new, *found = in_blocks(langevin_step, columns, 1, (1, 5) if in_place and sensitivities else None)
        for k, i in enumerate(part):
            theta[i], sensitivity[i] = new[k], found[0][k] if found else None
    if not in_place:  # or a later step that is would write to what this chain shares with the one before
        for i in set(range(len(theta))) - set(part):
            sensitivity[i] = s.clone() if (s := sensitivity[i]) is not None else None
    steps, moments = chain.steps + 1, None
    if settings.burn_in is not None and steps > settings.burn_in:
        moments = add_to_moments(chain.moments, theta, origin, sensitivity)
    return Chain(theta, origin, sensitivity, moments, chain.observed, used, variance, steps)


def add_to_moments(
    moments: Optional[Moments], theta: List[Tensor], origin: List[Tensor], sensitivity: List[Optional[Tensor]]
) -> Moments:
    """The moments with one more iterate."""
    if moments is None:
        return Moments(theta, origin, sensitivity, [torch.zeros_like(t) for t in theta], 1)
    count = moments.count + 1
    mean, origins, sensitivities, squares = [], [], [], []
    for i, t in enumerate(theta):
        before, own = moments.mean[i], moments.origin[i]
        mean.append(before + (t - before) / count)
        origins.append(own if own is origin[i] else torch.lerp(own, origin[i], 1.0 / count))
        pair = [torch.zeros_like(t) if s is None else s for s in (moments.sensitivity[i], sensitivity[i])]
        sensitivities.append(
            None if sensitivity[i] is moments.sensitivity[i] is None else torch.lerp(pair[0], pair[1], 1.0 / count)
        )
        squares.append(torch.addcmul(moments.squares[i], t - before, t - mean[i]))
    return Moments(mean, origins, sensitivities, squares, count)


def mean_of(chain: Chain) -> Tuple[List[Tensor], List[Tensor], List[Optional[Tensor]]]:
    """m_bar, the mean of the kept iterates, or the last one, with its origin and sensitivity."""
    return chain[:3] if chain.moments is None else chain.moments[:3]


def as_functions_of_prior(
    values: Sequence[Tensor],
    origin: Sequence[Tensor],
    sensitivity: Sequence[Optional[Tensor]],
    log_variance: Sequence[Tensor],
) -> List[Tensor]:
    """Iterates, or their means, as functions of L_0."""
    found = [t + (r - r.detach()) for t, r in zip(values, origin)]
    for i, (s, v) in enumerate(zip(sensitivity, log_variance)):
        if s is not None:
            found[i] = torch.addcmul(found[i], s, (v - v.detach()).to(s.dtype))
    return found


@torch.no_grad()
def iterate_variance(chain: Chain, i: int, scale: Optional[Tensor]) -> Tensor:
    """
    The variance of one weight's kept iterates, with one pseudo-observation of the noise's: the paper's regulariser. It
    vanishes as the chain grows, and is all there is for one iterate. `scale` is D, or None for 1.
    """
    pseudo = torch.full_like(chain.theta[i], chain.variance) if scale is None else scale * chain.variance
    if chain.moments is None:
        return pseudo.expand_as(chain.theta[i])
    return (chain.moments.squares[i] + pseudo) / chain.moments.count
