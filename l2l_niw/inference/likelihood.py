"""What a model's outputs parametrise, and a square root W of the Gauss-Newton matrix of the loss on them."""

import math
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, Normal
from torch.nn import functional as F

from l2l_niw.errors import ArgumentError, LossError
from l2l_niw.heads.predictions import Classes, Evidence, Gaussian, LeftOut

LOGITS = ("categorical", "bernoulli")
LIKELIHOODS = ("auto", "gaussian", *LOGITS)
KNOWN = "a tensor, a Normal, a Categorical, or the prediction of a head"


class Outputs(NamedTuple):
    """
    **Description**

    What a forward's outputs are made of.

    * `kind` - 'tensor', whose meaning the loss shows; 'normal', of means and standard deviations; 'categorical', of
        logits; 'evidence', of a factor of the covariance and the noise.
    * `tensors` - These, each with as many leading dimensions as there are episodes.
    * `targets` - Dimensions of a target that share an evidence's covariance.
    """

    kind: str
    tensors: Tuple[Tensor, ...]
    targets: int = 1


def parts_of(outputs: Any) -> Outputs:
    """What a forward's outputs are made of."""
    if isinstance(outputs, Tensor):
        return Outputs("tensor", (outputs,))
    if isinstance(outputs, LeftOut):
        return parts_of(outputs.each)
    if isinstance(outputs, Evidence):
        return Outputs("evidence", (outputs.factor, outputs.noise), outputs.event_shape[-1])
    if isinstance(outputs, Categorical):
        return Outputs("categorical", (outputs.logits,))
    base = outputs.base_dist if isinstance(outputs, Independent) else outputs
    if isinstance(base, Normal):
        return Outputs("normal", (base.loc, base.scale))
    raise ArgumentError(
        f"rank and curvature='full' need a model that returns {KNOWN}, and this one returns a "
        f"{type(outputs).__name__}, whose curvature is not known."
    )


def rebuilt(outputs: Any, tensors: Sequence[Tensor]) -> Any:
    """The same outputs, made of other tensors."""
    if isinstance(outputs, Tensor):
        return tensors[0]
    if isinstance(outputs, LeftOut):
        return LeftOut(rebuilt(outputs.each, tensors))
    if isinstance(outputs, Evidence):
        return Evidence(*tensors, outputs.event_shape[-1])  # type: ignore[call-arg, arg-type]
    if isinstance(outputs, Classes):
        found = Classes(tensors[0], outputs.labels)
    elif isinstance(outputs, Categorical):
        return Categorical(logits=tensors[0], validate_args=False)
    elif isinstance(outputs, Gaussian):
        found = Gaussian(*tensors)  # type: ignore[assignment]
    else:
        normal = Normal(tensors[0], tensors[1], validate_args=False)
        wrapped = isinstance(outputs, Independent)
        return Independent(normal, outputs.reinterpreted_batch_ndims, validate_args=False) if wrapped else normal
    found.penalty = outputs.penalty
    return found


def without_graph(outputs: Any) -> Any:
    """The same outputs, detached."""
    return rebuilt(outputs, [t.detach() for t in parts_of(outputs).tensors])


def curvature_along(name: str, outputs: Tensor, direction: Tensor, std: Tensor) -> Tensor:
    """The Hessian of the summed negative log-likelihood in the outputs, times a direction."""
    if name == "gaussian":
        return direction / std.square()
    outputs = outputs.detach()
    if name == "bernoulli":
        p = outputs.sigmoid()
        return p * (1.0 - p) * direction
    p = outputs.softmax(-1)
    return p * (direction - (p * direction).sum(-1, keepdim=True))


def recognise(
    loss: Tensor, outputs: Tensor, names: Sequence[str], lead: int, std: Tensor, create_graph: bool
) -> Tuple[str, Tensor]:
    """
    **Description**

    Which likelihood a loss is the negative logarithm of, but for a factor, by its curvature in one direction: that of a
    squared error is a multiple of the identity, that of a cross-entropy diag(p) - p p^T, that of a binary one
    p (1 - p).

    **Arguments**

    * **loss** (Tensor) - The sum of the episodes' losses.
    * **outputs** (Tensor) - Means or logits that it is computed from.
    * **names** (sequence) - Of likelihoods to try.
    * **lead** (int) - Dimensions of episodes.
    * **std** (Tensor) - A Gaussian's.
    * **create_graph** (bool) - Whether a Gaussian's factor is to be a function of `std`.

    **Returns** the name, and by which factor each episode's loss is to be multiplied to be the sum over its examples.
    """
    (gradient,) = torch.autograd.grad(loss, outputs, create_graph=True)
    axes = tuple(range(lead, outputs.dim()))
    direction = torch.cos(1.7 * torch.arange(outputs[(0,) * lead].numel(), device=outputs.device)).to(outputs.dtype)
    direction = direction.view(outputs.shape[lead:]).expand_as(outputs)
    curved = None
    if gradient.requires_grad:
        options: Dict[str, Any] = {"create_graph": create_graph, "retain_graph": True, "allow_unused": True}
        curved = torch.autograd.grad(gradient, outputs, direction, **options)[0]
    if curved is not None and curved.any():
        fits = {}
        for name in names:
            wanted = curvature_along(name, outputs, direction, std)
            own = curved if name == "gaussian" else curved.detach()
            factor = (wanted * direction).sum(axes, keepdim=True) / (own * direction).sum(axes, keepdim=True)
            if (factor * own - wanted).detach().norm() < 1e-3 * wanted.detach().norm():
                fits[name] = factor
        if len(fits) > 1:  # logits that hardly differ have a squared error's curvature; their labels tell
            labels = outputs.detach().sigmoid() - fits["bernoulli"] * gradient.detach()
            hard = ((labels - labels.round()).abs() < 1e-3) & (labels.round() * (1.0 - labels.round()) == 0)
            fits.pop("gaussian" if hard.all() else "bernoulli")
        for name, factor in fits.items():
            return name, factor.view(outputs.shape[:lead])
    elif "categorical" in names and outputs.detach().logsumexp(-1).abs().max() < 1e-3:  # of which a loss picks some
        examples = outputs[(0,) * lead].numel() / outputs.shape[-1]
        return "categorical", -examples / gradient.detach().sum(axes)
    raise LossError(
        f"adapt: the loss is not a negative log-likelihood that is known ({', '.join(names)}): its curvature in the "
        "outputs is another. Use a squared error, a cross-entropy, a model that returns a distribution and its "
        "log-likelihood, or NIW without rank and curvature='full'."
    )


class Seen(NamedTuple):
    """
    **Description**

    What a loss says of the outputs behind it.

    * `likelihood` - 'gaussian', 'categorical', 'bernoulli' or 'evidence'.
    * `tensors` - The tensors that the likelihood is a function of: means, or means and standard deviations; logits; a
        covariance.
    * `factor` - By which each episode's loss is to be multiplied to be the negative log-likelihood, up to `constant`.
    * `constant` - What a squared error leaves out.
    * `fits_std` - Whether the loss depends on the standard deviations too.
    * `targets` - Of an evidence, how many dimensions of a target have its covariance.
    """

    likelihood: str
    tensors: Tuple[Tensor, ...]
    factor: Tensor
    constant: Union[float, Tensor] = 0.0
    fits_std: bool = False
    targets: int = 1


class Known(NamedTuple):
    """
    What an episode's first step has shown of its loss, for the next ones on as many outputs: the likelihood, `Seen`'s
    factor (of a squared error, that of noise 1), the outputs' shape, and whether standard deviations are fitted.
    """

    likelihood: str
    factor: Tensor
    shape: torch.Size
    fits_std: bool = False


def look(
    losses: Tensor,
    outputs: Outputs,
    likelihood: str,
    noise: Tensor,
    n: float,
    create_graph: bool,
    known: Optional[Known] = None,
) -> Tuple[Seen, Optional[Known]]:
    """
    **Description**

    What is needed of a forward's outputs for W.

    **Arguments**

    * **losses** (Tensor) - Each episode's, (...).
    * **outputs** (Outputs) - Of a forward behind them.
    * **likelihood** (str) - Of outputs that are a tensor, or 'auto'.
    * **noise** (Tensor) - Standard deviation of targets around outputs that are means.
    * **n** (float) - Examples of an episode.
    * **create_graph** (bool) - Whether the result has a graph.
    * **known** (Known, *optional*, default=None) - What an earlier step has shown.

    **Returns** it, and what further steps need not look at again.
    """
    lead, total, (kind, tensors, targets) = losses.dim(), losses.sum(), outputs
    if kind == "evidence":
        root_of_it, own = tensors
        identity = torch.eye(root_of_it.shape[-2], dtype=own.dtype, device=own.device)
        covariance = root_of_it @ root_of_it.mT + own.square()[..., None, None] * identity
        return Seen(kind, (covariance,), torch.full_like(losses, n), targets=targets), None
    means, std = (tensors[0], noise) if kind == "tensor" else (tensors[0], tensors[-1])
    names: Sequence[str] = ("gaussian" if kind == "normal" else kind,)
    if kind == "tensor":
        names = LIKELIHOODS[1:] if likelihood == "auto" else (likelihood,)
    if known is None or known.shape != means.shape:
        unit = torch.ones_like(noise) if kind == "tensor" else std
        name, factor = recognise(total, means, names, lead, unit, create_graph)
        known = Known(name, factor, means.shape, kind == "normal" and depends(total, std))
    name, factor, _, fits_std = known
    if name != "gaussian":
        return Seen(name, (means,), factor), known
    if kind == "tensor":
        constant = means[(0,) * lead].numel() * (noise.log() + 0.5 * math.log(2.0 * math.pi))
        known = known._replace(factor=factor.detach())
        return Seen(name, (means, noise.expand_as(means)), known.factor / noise.square(), constant), known
    likely = torch.allclose(factor.detach(), torch.full_like(factor, n), rtol=1e-3)  # rather than a squared error
    if likely:
        factor = torch.full_like(factor, n)
    return Seen(name, (means, std), factor, fits_std=fits_std), known._replace(factor=factor) if likely else None


def root(seen: Seen, z: Tensor, jacobian: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """
    **Description**

    W, (..., rows, coordinates): W^T W is the Gauss-Newton matrix of the negative log-likelihood in z, which for these
    likelihoods is the Fisher information.

    | likelihood | W |
    |---|---|
    | Gaussian of mean f and standard deviation s | df / s and, where s depends on z, sqrt(2) ds / s |
    | categorical of logits f, probabilities p | sqrt(p) (df - p^T df) |
    | Bernoulli of logit f, probability p | sqrt(p (1 - p)) df |
    | evidence N(0, C), C = L L^T, of k targets | sqrt(k / 2) L^-1 dC L^-T |
    """
    lead = z.dim() - 1
    if seen.likelihood == "gaussian":
        mean, std = seen.tensors
        w = jacobian(mean.flatten(lead), z) / std.flatten(lead).unsqueeze(-1)
        if not seen.fits_std or not depends(std, z):
            return w
        own = math.sqrt(2.0) * jacobian(std.flatten(lead), z) / std.flatten(lead).unsqueeze(-1)
        return torch.cat([w, own], -2)
    (outputs,) = seen.tensors
    j = jacobian(outputs.flatten(lead), z)
    if seen.likelihood == "bernoulli":
        logit = outputs.flatten(lead)
        return half_exp(F.logsigmoid(logit) + F.logsigmoid(-logit)).unsqueeze(-1) * j
    j = j.unflatten(-2, outputs.shape[lead:])
    if seen.likelihood == "categorical":
        p = outputs.softmax(-1).unsqueeze(-1)
        j = half_exp(outputs.log_softmax(-1)).unsqueeze(-1) * (j - (p * j).sum(-2, keepdim=True))
    else:
        lower = torch.linalg.cholesky(outputs).unsqueeze(lead)
        j = j.movedim(-1, lead).to(lower.dtype)
        j = torch.linalg.solve_triangular(lower, j, upper=False)
        j = torch.linalg.solve_triangular(lower, j.mT, upper=False).movedim(lead, -1) * math.sqrt(seen.targets / 2.0)
    return j.flatten(lead, -2)


def half_exp(log: Tensor) -> Tensor:
    """The square root of what a logarithm is of: its derivative is finite where a probability comes to 0."""
    return (0.5 * log).exp()


def depends(tensor: Tensor, z: Tensor) -> bool:
    """Whether a tensor is a function of z."""
    if not (tensor.requires_grad and z.requires_grad):
        return False
    return torch.autograd.grad(tensor.sum(), z, retain_graph=True, allow_unused=True)[0] is not None


class Energy(NamedTuple):
    """
    **Description**

    l_i / T of an episode, or of several, around z.

    * `value` - Each episode's, (...).
    * `gradient` - In z, (..., coordinates).
    * `w` - W, (..., rows, coordinates).
    """

    value: Tensor
    gradient: Tensor
    w: Tensor


def energy(
    losses: Tensor,
    seen: Sequence[Seen],
    z: Tensor,
    temperature: float,
    jacobian: Callable[[Tensor, Tensor], Tensor],
    create_graph: bool,
) -> Energy:
    """
    **Description**

    The energy of a support from its mean loss and what that says of the outputs behind it.

    **Arguments**

    * **losses** (Tensor) - Each episode's, (...).
    * **seen** (list) - Of each forward behind them.
    * **z** (Tensor) - What the outputs depend on, (..., coordinates).
    * **temperature** (float) - T.
    * **jacobian** (callable) - Of outputs, (..., outputs), in z.
    * **create_graph** (bool) - Whether the result has a graph.
    """
    w = torch.cat([root(one, z, jacobian) for one in seen], -2).to(z.dtype) / math.sqrt(temperature)
    gradient = torch.autograd.grad(losses.sum(), z, create_graph=create_graph, retain_graph=True)[0]
    factor = seen[0].factor / temperature
    value = factor * losses + sum([one.constant for one in seen]) / temperature
    return Energy(value, factor.unsqueeze(-1).to(z.dtype) * gradient, w)


def widened(outputs: Any, likelihood: Optional[str], variances: Callable[[Tensor], Tensor], lead: int) -> Any:
    """
    **Description**

    The linearised predictive: outputs whose own spread has that of the posterior added. A Gaussian's variance grows by
    it; logits shrink by 1 / sqrt(1 + pi / 8 variance), MacKay's approximation of the averaged probabilities, those of
    several classes as log-probabilities, so that what all of them have in common counts for nothing; means without a
    spread stay.

    **Arguments**

    * **outputs** - A forward's.
    * **likelihood** (str) - Of outputs that are a tensor.
    * **variances** (callable) - Of outputs, (..., outputs), under the posterior.
    * **lead** (int) - Dimensions of episodes.

    **References**

    1. MacKay. 1992. "The Evidence Framework Applied to Classification Networks." Neural Computation.
    2. Immer et al. 2021. "Improving Predictions of Bayesian Neural Nets via Local Linearization." AISTATS.
    """
    kind, tensors, _ = parts_of(outputs)
    means = tensors[0]
    if kind == "evidence" or kind == "tensor" and likelihood not in ("categorical", "bernoulli"):
        return outputs
    if kind == "tensor" and likelihood == "categorical":
        means = means.log_softmax(-1)
    spread = variances(means.flatten(lead)).view_as(means)
    if kind == "normal":
        return rebuilt(outputs, (means, (tensors[1].square() + spread).sqrt()))
    return rebuilt(outputs, (means / torch.sqrt(1.0 + math.pi / 8.0 * spread),))
