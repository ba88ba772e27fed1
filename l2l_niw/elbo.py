"""Meta-test inference: the support's ELBO, minimised from the mode phi* (Eq. 18, Alg. 2)."""

from typing import Callable, Tuple

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

    **References**

    1. Domke. 2020. "Provable Smoothness Guarantees for Black-Box Variational Inference." ICML.
    """
    pull = lr * weight / prior_variance
    mean = (mean - lr * mean_gradient + pull * prior_mean) / (1.0 + pull)
    z = std - lr * std_gradient
    std = (z + torch.sqrt(z * z + 4.0 * lr * weight * (1.0 + pull))) / (2.0 * (1.0 + pull))
    return mean, std


def minimise_elbo(
    gradient_at: Callable[[Tensor], Tuple[Tensor, int]],
    prior_mean: Tensor,
    prior_variance: Tensor,
    lr: float,
    steps: int,
    samples: int,
    kl_weight: float,
) -> Tuple[Tensor, Tensor]:
    """
    **Description**

    The mean and variance of v(theta) after `steps` steps on the mean loss plus kl_weight * KL / n,
    with reparametrised gradients from `samples` draws a step.

    **Arguments**

    * **gradient_at** (callable) - Flat weights to the gradient of the support's mean loss and its number n of data.
    """
    mean, std = prior_mean.clone(), prior_variance.sqrt()
    for _ in range(steps):
        mean_gradient, std_gradient = torch.zeros_like(mean), torch.zeros_like(std)
        for _ in range(samples):
            noise = torch.randn_like(mean)
            gradient, n = gradient_at(torch.addcmul(mean, std, noise))
            mean_gradient.add_(gradient, alpha=1.0 / samples)
            std_gradient.addcmul_(gradient, noise, value=1.0 / samples)
        mean, std = proximal_step(
            mean, std, mean_gradient, std_gradient, prior_mean, prior_variance, lr, kl_weight / n
        )
    return mean, std.square()
