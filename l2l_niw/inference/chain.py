"""The Langevin chain of one episode (Sec. 3, "Quadratic approximation of episodic loss via SGLD")."""

import math
from typing import Any, Collection, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from l2l_niw.inference.functional import in_blocks, picker
from l2l_niw.inference.prior import Prior

Pull = Union[float, Sequence[Tensor]]


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
    """Running moments of the kept iterates (Welford), with the means of what they move with: O(d) memory."""

    mean: List[Tensor]
    center: List[Tensor]
    slope: List[Optional[Tensor]]
    squares: List[Tensor]
    count: int


class Chain(NamedTuple):
    """
    **Description**

    The state of an episode. States are never written to: a loss computed after an earlier step keeps its own.

    * `theta` - The last iterate. It has a graph where the steps' second derivatives are kept.
    * `center` - What an iterate without a graph moves with: m_0, or where a clone of an adapted learner began.
    * `slope` - d theta / d log V_0 of an iterate without a graph, weight by weight, beside what `center` depends on:
        gradients and noise are constants, steps are proportional to D and noise to its root. None for 0.
    * `moments` - Of the kept iterates; None where the last one stands for all.
    * `observed` - What the curvature strategy saw, summed over the steps, if it looks.
    * `used` - Which weights a loss has depended on.
    * `variance` - What one step's noise adds, where D is 1.
    """

    theta: List[Tensor]
    center: List[Tensor]
    slope: List[Optional[Tensor]]
    moments: Optional[Moments] = None
    observed: Optional[List[Tensor]] = None
    used: Tuple[bool, ...] = ()
    variance: float = 0.0
    steps: int = 0


def init(m0: Sequence[Tensor], kept: Collection[int] = ()) -> Chain:
    """A chain before its first step, with a graph for the weights whose steps keep one."""
    theta = [m if i in kept else m.detach() for i, m in enumerate(m0)]
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
    theta: Sequence[Tensor],
    gradient: Sequence[Tensor],
    m0: Sequence[Tensor],
    scale: Optional[Sequence[Tensor]],
    pull: Pull,
    slope: Optional[Sequence[Tensor]],
    center: Sequence[Tensor],
    lr: float,
    size: float,
) -> Tuple[List[Tensor], Optional[List[Tensor]]]:
    """
    **Description**

    One Langevin step on l_i = n * loss at temperature T, in units of the mean loss, where D scales the step of each
    weight, then the proximal step of the prior, the exact minimiser of its energy plus the distance moved:

    $$\\theta \\gets \\theta - lr\\,D\\,\\nabla loss + \\sqrt{2\\,lr\\,D\\,T / n}\\;\\xi, \\qquad
    \\theta \\gets \\frac{\\theta + c\\,m_0}{1 + c}, \\quad c = lr\\,D\\,T P_0 / n.$$

    The drift is MAML's step. For small lr the stationary law is the tempered posterior, whatever D.

    **Arguments**

    * **scale** (list) - D, or None for 1.
    * **pull** (float or list) - c / (1 + c).
    * **slope**, **center** (list) - As in `Chain`; no slopes where a graph is kept.
    * **size** (float) - The square root of 2 lr T / n; 0 for no noise.

    **Returns** the next iterates and their slopes.

    **References**

    1. Welling and Teh. 2011. "Bayesian Learning via Stochastic Gradient Langevin Dynamics." ICML.
    """
    noise = list(map(noise_like, theta)) if size else []
    if scale is None:
        new = torch._foreach_add(theta, gradient, alpha=-lr)
        new = torch._foreach_add(new, noise, alpha=size) if size else new
    else:
        root = torch._foreach_sqrt(scale) if size else []
        new = torch._foreach_addcmul(theta, gradient, scale, value=-lr)
        new = torch._foreach_addcmul(new, noise, root, value=size) if size else new
        if slope is not None:
            slope = torch._foreach_addcmul(slope, gradient, scale, value=-lr)
            slope = torch._foreach_addcmul(slope, noise, root, value=0.5 * size) if size else slope
    if isinstance(pull, float):
        if pull:
            new = torch._foreach_lerp(new, m0, pull)
            slope = None if slope is None else torch._foreach_mul(slope, 1.0 - pull)
    else:
        if slope is not None:  # D is 1, and c alone depends on V_0
            slope = [(1.0 - p) * (s + p * (t - c)) for s, p, t, c in zip(slope, pull, new, center)]
        new = torch._foreach_lerp(new, m0, pull)
    return list(new), slope if slope is None else list(slope)


@torch.no_grad()
def constant_step(*columns: Any) -> Tuple[List[Tensor], Optional[List[Tensor]]]:
    """`langevin_step` without a graph, of large tensors in blocks. Gradients are let go as they are used."""
    lists = [k for k, column in enumerate(columns) if isinstance(column, (list, tuple))]

    def on_lists(*given: Sequence[Tensor]) -> Sequence[List[Tensor]]:
        own = list(columns)
        for k, column in zip(lists, given):
            own[k] = column
        new, slope = langevin_step(*own)
        return (new,) if slope is None else (new, slope)

    new, *slope = in_blocks(on_lists, [columns[k] for k in lists], consumed=columns[1])
    return new, slope[0] if slope else None


def prior_pull(prior: Prior, indices: Sequence[int], n: float, settings: Settings) -> Pull:
    """c / (1 + c): a number where D is proportional to V_0, since D P_0 is one."""
    c = settings.lr * settings.temperature / n * prior.start
    if c == 0 or not settings.prior_in_chain:
        return 0.0
    if settings.learn_step_sizes:
        return c / (1.0 + c)
    return [c / (prior.scale[i] + c) for i in indices]


def step(
    chain: Chain,
    gradients: List[Optional[Tensor]],
    prior: Prior,
    n: float,
    settings: Settings,
    kept: Collection[int] = (),
) -> Chain:
    """
    **Description**

    The chain after one step.

    **Arguments**

    * **gradients** (list) - Of the mean loss; None for weights that it does not depend on, which stay where they are.
        The list is emptied, so that each can be freed when its step is taken.
    * **n** (float) - The number of examples behind the loss.
    * **kept** (collection, *optional*, default=()) - The weights whose steps keep their graph.
    """
    variance = noise_variance(settings.lr, settings.temperature, n)
    size = variance**0.5 if settings.noisy else 0.0
    theta, center, slope = list(chain.theta), list(chain.center), list(chain.slope)
    present = [i for i, g in enumerate(gradients) if g is not None]
    used = tuple([u or g is not None for u, g in zip(chain.used, gradients)])
    taken = [[gradients[i] for i in present if (i in kept) == keep] for keep in (False, True)]
    gradients.clear()
    for keep in (False, True):
        part = tuple([i for i in present if (i in kept) == keep])
        if not part:
            continue
        pick, pull = picker(part), prior_pull(prior, part, n, settings)
        scale = pick(prior.scale) if settings.learn_step_sizes else None
        if scale and scale[0].dtype != theta[part[0]].dtype:
            scale = [prior.scale[i].to(theta[i].dtype) for i in part]
        if not isinstance(pull, float):
            pull = [p.to(theta[i].dtype) for p, i in zip(pull, part)]
        slopes = None
        if not keep and (scale or pull or any([slope[i] is not None for i in part])):
            slopes = [torch.zeros_like(theta[i]) if slope[i] is None else slope[i] for i in part]
        columns = pick(theta), taken[keep], pick(prior.m0), scale, pull, slopes, pick(center), settings.lr, size
        new, slopes = (langevin_step if keep else constant_step)(*columns)
        for k, i in enumerate(part):
            theta[i], slope[i] = new[k], slopes and slopes[k]
            if not keep and pull and center[i] is not prior.m0[i]:
                center[i] = torch.lerp(center[i], prior.m0[i], pull if isinstance(pull, float) else pull[k])
    steps, moments = chain.steps + 1, None
    if settings.burn_in is not None and steps > settings.burn_in:
        moments = add_to_moments(chain.moments, theta, center, slope, kept)
    return Chain(theta, center, slope, moments, chain.observed, used, variance, steps)


def add_to_moments(
    moments: Optional[Moments],
    theta: List[Tensor],
    center: List[Tensor],
    slope: List[Optional[Tensor]],
    kept: Collection[int],
) -> Moments:
    """The moments with one more iterate."""
    if moments is None:
        return Moments(theta, center, slope, [torch.zeros_like(t.detach()) for t in theta], 1)
    count = moments.count + 1
    mean, centers, slopes, squares = [], [], [], []
    for i, t in enumerate(theta):
        before, same = moments.mean[i], moments.center[i] is center[i]
        with torch.set_grad_enabled(i in kept):
            mean.append(before + (t - before) / count)
        centers.append(center[i] if same else torch.lerp(moments.center[i], center[i], 1.0 / count))
        with torch.no_grad():
            own = [torch.zeros_like(t) if s is None else s for s in (moments.slope[i], slope[i])]
            slopes.append(None if slope[i] is moments.slope[i] is None else torch.lerp(*own, 1.0 / count))
            squares.append(torch.addcmul(moments.squares[i], t - before, t - mean[i]))
    return Moments(mean, centers, slopes, squares, count)


def mean_of(chain: Chain) -> List[Tensor]:
    """m_bar: the mean of the kept iterates, or the last one."""
    return chain.theta if chain.moments is None else chain.moments.mean


@torch.no_grad()
def iterate_variance(chain: Chain, part: Sequence[int], scale: Optional[Sequence[Tensor]]) -> List[Tensor]:
    """
    The variance of these weights' kept iterates, with one pseudo-observation of the noise's: the paper's regulariser.
    It vanishes as the chain grows, and is all there is for one iterate.
    """
    if scale is None:
        pseudo = [torch.full_like(chain.theta[i], chain.variance) for i in part]
    else:
        pseudo = torch._foreach_mul([scale[i] for i in part], chain.variance)
    if chain.moments is None:
        return [p.expand_as(chain.theta[i]) for i, p in zip(part, pseudo)]
    return [(chain.moments.squares[i] + p) / chain.moments.count for i, p in zip(part, pseudo)]
