"""Meta-test inference: the support's ELBO, minimised from the mode phi* (Eq. 18, Alg. 2)."""

from functools import partial
from typing import Callable, List, Tuple

import torch
from torch import Tensor


def proximal_step(
    mean: Tensor,
    std: Tensor,
    mean_gradient: Tensor,
    std_gradient: Tensor,
    prior_mean: Tensor,
    prior_variance: Tensor,
    lr: float,
    weight: float,
) -> Tuple[Tensor, Tensor]:
    """
    **Description**

    One proximal gradient step on loss(m, s) + weight * KL(N(m, s^2) || N(m_0, Sigma)): a gradient
    step of size lr on the loss, then the exact minimiser of the KL plus the distance moved. So s
    stays positive, and a prior however narrow cannot make the step unstable:

    $$m \\gets \\frac{m - lr\\,g_m + c\\,m_0}{1 + c}, \\qquad
    s \\gets \\frac{z + \\sqrt{z^2 + 4\\,lr\\,weight\\,(1 + c)}}{2 (1 + c)}, \\qquad
    z = s - lr\\,g_s, \\quad c = lr\\,weight / \\Sigma.$$

    Without a KL, and without a variance, it is gradient descent on the mean.

    **References**

    1. Domke. 2020. "Provable Smoothness Guarantees for Black-Box Variational Inference." ICML.
    """
    if weight == 0:
        return mean - lr * mean_gradient, (std - lr * std_gradient).clamp(min=0.0)
    pull = lr * weight / prior_variance
    mean = (mean - lr * mean_gradient + pull * prior_mean) / (1.0 + pull)
    z = std - lr * std_gradient
    std = (z + torch.sqrt(z * z + 4.0 * lr * weight * (1.0 + pull))) / (2.0 * (1.0 + pull))
    return mean, std


def minimise_elbo(
    gradient_at: Callable[[List[Tensor]], Tuple[List[Tensor], int]],
    prior_mean: List[Tensor],
    prior_variance: List[Tensor],
    lr: float,
    steps: int,
    samples: int,
    kl_weight: float,
) -> Tuple[List[Tensor], List[Tensor]]:
    """
    **Description**

    The mean and variance of v(theta) after `steps` steps on the mean loss plus kl_weight * KL / n,
    with reparametrised gradients from `samples` draws per step. A prior without variance stays without.

    **Arguments**

    * **gradient_at** (callable) - Weights to the gradients of the support's mean loss and its number n of examples.
    """
    mean, std = [m.clone() for m in prior_mean], [v.sqrt() for v in prior_variance]
    spike = not any(v.any() for v in prior_variance)
    for _ in range(steps):
        in_mean, in_std = ([torch.zeros_like(m) for m in mean] for _ in range(2))
        for _ in range(samples):
            noise = [torch.randn_like(s) for s in std]
            gradients, n = gradient_at([torch.addcmul(m, s, e) for m, s, e in zip(mean, std, noise)])
            for i, gradient in enumerate(gradients):
                in_mean[i].add_(gradient, alpha=1.0 / samples)
                in_std[i].addcmul_(gradient, noise[i], value=0.0 if spike else 1.0 / samples)
        step = partial(proximal_step, lr=lr, weight=0.0 if spike else kl_weight / n)
        pairs = list(map(step, mean, std, in_mean, in_std, prior_mean, prior_variance))
        mean, std = [m for m, _ in pairs], [s for _, s in pairs]
    return mean, [s.square() for s in std]
