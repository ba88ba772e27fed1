"""The Langevin chain of one episode (Sec. 3, "Quadratic approximation of episodic loss via SGLD")."""

import math
from typing import Any, Collection, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from l2l_niw.inference.functional import picker
from l2l_niw.inference.prior import Prior

BLOCK = 2**16  # weights: what a step touches of so many stays in a core's cache
Lags = List[Optional[Tensor]]


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
    """Running moments of the kept iterates (Welford): O(d) memory, nothing stored per step."""

    mean: List[Tensor]
    lag: Lags
    squares: List[Tensor]
    count: int


class Chain(NamedTuple):
    """
    **Description**

    The state of an episode. States are never written to: a loss computed after an earlier step keeps its own.

    * `theta` - The last iterate. It has a graph where the steps' second derivatives are kept.
    * `lag` - Where no graph is kept, by how much less an iterate changes with log V_0 than by all of its displacement:
        d theta / d log V_0 = theta - start - lag, weight by weight, with gradients taken as constants. Steps are
        proportional to D, and noise to its root. None for 0.
    * `moments` - Of the kept iterates; None where the last one stands for all.
    * `observed` - What the curvature strategy saw, summed over the steps, if it looks.
    * `used` - Which weights a loss has depended on.
    * `variance` - What one step's noise adds, where D is 1.
    """

    theta: List[Tensor]
    lag: Lags
    moments: Optional[Moments] = None
    observed: Optional[List[Tensor]] = None
    used: Tuple[bool, ...] = ()
    variance: float = 0.0
    steps: int = 0


def init(theta: List[Tensor]) -> Chain:
    """A chain before its first step."""
    return Chain(theta, [None] * len(theta), used=(False,) * len(theta))


def noise_like(tensor: Tensor) -> Tensor:
    """
    **Description**

    Independent noise of mean 0 and variance 1. Normal, but uniform on 256 values for many weights on a CPU, where
    normal numbers would take longer than the step: the weak scheme of the same order, of which the sum over steps and
    weights is what counts.

    **References**

    1. Kloeden and Platen. 1992. "Numerical Solution of Stochastic Differential Equations." Sec. 14.1.
    """
    if tensor.device.type != "cpu" or tensor.numel() < 2048:
        return torch.randn_like(tensor)
    words = torch.empty((tensor.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
    levels = words.view(torch.int8)[: tensor.numel()].view(tensor.shape).to(tensor.dtype)
    return levels.add_(0.5).mul_(math.sqrt(12.0 / (256.0**2 - 1.0)))


def langevin_step(
    theta: List[Tensor],
    gradient: List[Tensor],
    m0: List[Tensor],
    scale: Optional[List[Tensor]],
    lag: Optional[List[Tensor]],
    pull: Union[float, List[Tensor]],
    lr: float,
    size: float,
) -> Tuple[List[Tensor], Optional[List[Tensor]]]:
    """
    **Description**

    One Langevin step on l_i = n * loss at temperature T, in units of the mean loss, where a constant D scales the step
    of each weight, then the proximal step of the prior, the exact minimiser of its energy plus the distance moved:

    $$\\theta \\gets \\theta - lr\\,D\\,\\nabla loss + \\sqrt{2\\,lr\\,D\\,T / n}\\;\\xi, \\qquad
    \\theta \\gets \\frac{\\theta + c\\,m_0}{1 + c}, \\quad c = lr\\,D\\,T P_0 / n.$$

    The drift is MAML's step. For small lr the stationary law is the tempered posterior, whatever D.

    **Arguments**

    * **scale** (list) - D, or None for 1.
    * **lag** (list) - As in `Chain`; None if all are 0.
    * **pull** (float or list) - c / (1 + c).
    * **size** (float) - The square root of 2 lr T / n; 0 for no noise.

    **Returns** the next iterates and their lags.

    **References**

    1. Welling and Teh. 2011. "Bayesian Learning via Stochastic Gradient Langevin Dynamics." ICML.
    """
    if scale is None:
        new = torch._foreach_add(theta, gradient, alpha=-lr)
    else:
        new = torch._foreach_addcmul(theta, gradient, scale, value=-lr)
    noise = None
    if size:
        noise = list(map(noise_like, new))
        if scale is not None:
            noise = torch._foreach_mul(noise, torch._foreach_sqrt(scale))
        new = torch._foreach_add(new, noise, alpha=size)
    pulled = not isinstance(pull, float) or pull != 0
    if pulled:
        new = torch._foreach_lerp(new, m0, pull)
    if torch.is_grad_enabled():
        return new, None
    rest = 1.0 - pull if isinstance(pull, float) else [1.0 - p for p in pull]
    if scale is None:
        moved = torch._foreach_sub(new, theta)
        lag = moved if lag is None else torch._foreach_add(moved, lag)
    elif noise is not None:
        half = 0.5 * size
        lag = torch._foreach_mul(noise, half) if lag is None else torch._foreach_add(lag, noise, alpha=half)
    return new, torch._foreach_mul(lag, rest) if pulled and lag is not None else lag


def in_blocks(*columns: Any) -> Tuple[List[Tensor], Optional[List[Tensor]]]:
    """
    `langevin_step` of tensors without a graph, in groups that stay in a core's cache: of whole small tensors, and of
    blocks of large ones.
    """
    theta, lists = columns[0], [c for c in columns if isinstance(c, (list, tuple))]
    large = [t.numel() > BLOCK and t.device.type == "cpu" for t in theta]
    if True not in large or any(t.shape != theta[k].shape for c in lists for k, t in enumerate(c)):
        return langevin_step(*columns)  # several episodes have one m_0
    new: List[Tensor] = []
    lag: List[Tensor] = []
    for k, is_large in enumerate(large):
        own = [c[k] if isinstance(c, (list, tuple)) else c for c in columns]
        tensors = [o for o in own if isinstance(o, Tensor)]
        parts = iter(zip(*(t.reshape(-1).split(BLOCK) if is_large else (t,) for t in tensors)))
        new.append(torch.empty_like(theta[k], memory_format=torch.contiguous_format))
        lags = None
        for block, part in zip(new[k].view(-1).split(BLOCK) if is_large else (new[k],), parts):
            given = iter(part)
            values, found = langevin_step(*([next(given)] if isinstance(o, Tensor) else o for o in own))
            block.copy_(values[0])
            if found is not None:
                lags = (lags or []) + [found[0]]
        if lags is not None:
            lag.append(torch.cat(lags).view_as(new[k]) if is_large else lags[0])
    return new, lag or None


def prior_pull(prior: Prior, indices: Sequence[int], n: float, settings: Settings) -> Union[float, List[Tensor]]:
    """c / (1 + c): a number where D is proportional to V_0, since D P_0 is one."""
    if not settings.prior_in_chain or settings.temperature == 0:
        return 0.0
    c = settings.lr * settings.temperature / n
    if settings.learn_step_sizes:
        c = c * math.exp(-prior.initial_log_variance)
        return c / (1.0 + c)
    pulls = [c * torch.exp(-prior.log_variance[i]) for i in indices]
    return [p / (1.0 + p) for p in pulls]


def step(
    chain: Chain,
    gradients: Sequence[Optional[Tensor]],
    prior: Prior,
    n: float,
    settings: Settings,
    kept: Collection[int] = (),
    scale: Optional[Sequence[Tensor]] = None,
) -> Chain:
    """
    **Description**

    The chain after one step.

    **Arguments**

    * **gradients** (list) - Of the mean loss; None for weights that it does not depend on, which stay where they are.
    * **n** (float) - The number of examples behind the loss.
    * **kept** (collection, *optional*, default=()) - The weights whose steps keep their graph.
    * **scale** (list, *optional*, default=None) - D, if the steps are scaled.
    """
    variance = noise_variance(settings.lr, settings.temperature, n)
    size = variance**0.5 if settings.noisy else 0.0
    theta, lag = list(chain.theta), list(chain.lag)
    present = tuple([i for i, g in enumerate(gradients) if g is not None])
    for keep in (False, True):
        part = tuple([i for i in present if (i in kept) == keep])
        if not part:
            continue
        pick, pull = picker(part), prior_pull(prior, part, n, settings)
        columns = pick(theta), pick(gradients), pick(prior.m0)
        if keep:
            own = None if scale is None else [prior.step_scale(i) for i in part]
            new, lags = langevin_step(*columns, own, None, pull, settings.lr, size)
        else:
            own, lags = None if scale is None else pick(scale), pick(lag)
            missing = [h is None for h in lags]
            if all(missing):
                lags = None
            elif True in missing:  # weights that are used for the first time
                lags = [torch.zeros_like(theta[i].detach()) if lag[i] is None else lag[i] for i in part]
            with torch.no_grad():
                new, lags = in_blocks(*columns, own, lags, pull, settings.lr, size)
        for k, i in enumerate(part):
            theta[i], lag[i] = new[k], None if lags is None else lags[k]
    steps, moments = chain.steps + 1, None
    if settings.burn_in is not None and steps > settings.burn_in:
        moments = add_to_moments(chain.moments, theta, lag, kept)
    used = tuple(map(bool.__or__, chain.used, [i in present for i in range(len(theta))]))
    return Chain(theta, lag, moments, chain.observed, used, variance, steps)


def add_to_moments(moments: Optional[Moments], theta: List[Tensor], lag: Lags, kept: Collection[int]) -> Moments:
    """The moments with one more iterate."""
    if moments is None:
        return Moments(theta, lag, [torch.zeros_like(t.detach()) for t in theta], 1)
    count = moments.count + 1
    mean, lags, squares = [], [], []
    for i, (t, own) in enumerate(zip(theta, lag)):
        with torch.set_grad_enabled(i in kept):
            mean.append(moments.mean[i] + (t - moments.mean[i]) / count)
        with torch.no_grad():
            before = moments.lag[i]
            lags.append(None if own is None else (own + (count - 1) * (0.0 if before is None else before)) / count)
            squares.append(torch.addcmul(moments.squares[i], t - moments.mean[i], t - mean[i]))
    return Moments(mean, lags, squares, count)


def mean_of(chain: Chain) -> List[Tensor]:
    """m_bar: the mean of the kept iterates, or the last one."""
    return chain.theta if chain.moments is None else chain.moments.mean


def iterate_variance(chain: Chain, i: int, scale: Optional[Sequence[Tensor]]) -> Tensor:
    """
    The variance of one weight's kept iterates, with one pseudo-observation of the noise's: the paper's regulariser.
    It vanishes as the chain grows, and is all there is for one iterate.
    """
    pseudo = torch.full_like(chain.theta[i], chain.variance) if scale is None else chain.variance * scale[i]
    if chain.moments is None:
        return pseudo.expand_as(chain.theta[i])
    return (chain.moments.squares[i] + pseudo) / chain.moments.count


def constant(chain: Chain) -> Chain:
    """The chain without graphs."""
    moments = chain.moments and chain.moments._replace(mean=[t.detach() for t in chain.moments.mean])
    return chain._replace(theta=[t.detach() for t in chain.theta], moments=moments)


def restarted(chain: Chain, theta: List[Tensor]) -> Chain:
    """The chain at new tensors of the same values, with which its iterates move from now on."""
    moments = constant(chain).moments
    if moments is not None:
        pairs = zip(moments.lag, chain.lag)
        moments = moments._replace(lag=[m if h is None else -h if m is None else m - h for m, h in pairs])
    return chain._replace(theta=list(theta), lag=[None] * len(theta), moments=moments)
