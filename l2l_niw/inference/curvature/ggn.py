"""A from the Gauss-Newton matrix of the episode's loss."""

from itertools import product
from typing import Iterator, Optional, Union

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn import functional as F

from l2l_niw.errors import ArgumentError, ChainError
from l2l_niw.inference.chain import Chain

LIKELIHOODS = ("categorical", "gaussian")


class GGN:
    """
    **Description**

    The diagonal of the Gauss-Newton matrix of l_i / T, which for these likelihoods is the Fisher
    information. Labels are sampled from the network's own outputs and their summed negative
    log-likelihood is back-propagated through the graph of the last forward: the squared gradient has
    the diagonal as its expectation, since the scores of n examples are independent with mean zero.
    It is averaged over the chain's steps. The chain runs without noise.

    **Arguments**

    * **likelihood** (str, *optional*, default='categorical') - What a tensor of outputs parametrises:
        'categorical', logits on the last dimension, or 'gaussian', means. A model that returns a
        distribution says it itself.
    * **noise** (float, *optional*, default=1.0) - The Gaussian's standard deviation.
    * **samples** (int, *optional*, default=1) - Labels sampled per step, one backward each. None
        sums over all outputs instead and gives the exact diagonal, at one backward per output.
    """

    noisy = False
    needs_outputs = True

    def __init__(self, likelihood: str = "categorical", noise: float = 1.0, samples: Optional[int] = 1):
        if likelihood not in LIKELIHOODS:
            raise ArgumentError(f"likelihood must be one of {LIKELIHOODS}, got {likelihood!r}.")
        if not noise > 0:
            raise ArgumentError(f"noise must be positive, got {noise}.")
        if samples is not None and (samples < 1 or samples != int(samples)):
            raise ArgumentError(f"samples must be a whole number, or None for the exact diagonal, got {samples}.")
        self.likelihood, self.noise, self.samples = likelihood, noise, samples

    def scalars(self, outputs: Union[Tensor, Distribution]) -> Iterator[Tensor]:
        """Functions of the outputs whose squared gradients, summed, are the diagonal."""
        if isinstance(outputs, Distribution):  # it knows its own likelihood
            if self.samples is None:
                raise ArgumentError("curvature: GGN(samples=None) needs a model that returns a tensor.")
            for _ in range(self.samples):
                yield -outputs.log_prob(outputs.sample()).sum() / self.samples**0.5
            return
        if not isinstance(outputs, Tensor):
            kind = type(outputs).__name__
            raise ChainError(f"curvature='ggn' needs a model that returns a tensor or a distribution, got {kind}.")
        if self.likelihood == "categorical" and outputs.shape[-1] < 2:
            raise ArgumentError(
                f"curvature: outputs of shape {tuple(outputs.shape)} are no logits of a categorical likelihood. For "
                "regression give curvature=GGN('gaussian', noise=...)."
            )
        for score in self._sampled(outputs) if self.samples else self._square_root(outputs):
            yield (score * outputs).sum()

    def _sampled(self, outputs: Tensor) -> Iterator[Tensor]:
        """d(-log p(label | outputs)) / d(outputs) for sampled labels, divided by the root of their number."""
        for _ in range(self.samples or 0):
            if self.likelihood == "gaussian":
                score = torch.randn_like(outputs) / self.noise
            else:
                p = outputs.detach().softmax(-1)
                labels = torch.distributions.Categorical(probs=p, validate_args=False).sample()
                score = p - F.one_hot(labels, p.shape[-1]).to(p.dtype)
            yield score / (self.samples or 1) ** 0.5

    def _square_root(self, outputs: Tensor) -> Iterator[Tensor]:
        """Columns of a square root of the Hessian in the outputs, one example and one output each."""
        width = outputs.shape[-1]
        p = outputs.detach().softmax(-1).reshape(-1, width)
        for row, k in product(range(len(p)), range(width)):
            here = torch.zeros(len(p), 1, dtype=p.dtype, device=p.device)
            here[row] = 1.0
            onehot = F.one_hot(torch.tensor(k, device=p.device), width).to(p)
            gaussian = self.likelihood == "gaussian"
            score = onehot / self.noise if gaussian else p[row, k].sqrt() * (onehot - p[row])
            yield (here * score).view_as(outputs)

    def precision(self, chain: Chain, i: int, scale: Optional[Tensor], temperature: float) -> Tensor:
        """The Gauss-Newton diagonal of l_i / T for weight i, averaged over the chain's steps, of the weight's shape."""
        return (chain.observed or [])[i] / (chain.steps * temperature)

    def deviation(self, chain: Chain, i: int, a: Tensor) -> Tensor:
        """The chain has no noise, so the posterior's draw takes its own."""
        return torch.randn_like(a) / a.sqrt()
