"""A Gaussian over a task's weights, and its predictions (Sec. 3.2)."""

from typing import Callable, Dict, Union

import torch
from torch import Tensor, nn
from torch.func import functional_call

from l2l_niw.checks import check_number
from l2l_niw.errors import ArgumentError
from l2l_niw.predictions import Prediction
from l2l_niw.weights import Layout


class Posterior:
    """
    **Description**

    N(mean, diag(variance)) over the random weights of one task. Frozen parameters and buffers stay
    the model's; `predict` works on copies of the buffers, so that it never writes to the model.

    **Arguments**

    * **module** (Module) - The network whose weights these are.
    * **layout** (Layout) - Where its random weights stand in the flat vectors.
    * **mean** (Tensor) - Flat vector of means.
    * **variance** (Tensor) - Flat vector of variances.

    **Example**

    ~~~python
    post = learner.posterior()
    probabilities = post.predict(x, samples=10).softmax(-1).mean(0)
    ~~~
    """

    def __init__(self, module: nn.Module, layout: Layout, mean: Tensor, variance: Tensor):
        self._module, self._layout = module, layout
        self._mean, self._variance = mean, variance

    @property
    def mean(self) -> Dict[str, Tensor]:
        """The mean of each parameter, by name."""
        return self._layout.named(self._mean)

    @property
    def variance(self) -> Dict[str, Tensor]:
        """The variance of each parameter's elements, by name."""
        return self._layout.named(self._variance, cast=False)

    def rsample(self) -> Dict[str, Tensor]:
        """One network's weights, reparametrised: gradients reach whatever the posterior depends on."""
        noise = torch.randn_like(self._mean)
        return self._layout.named(self._mean + self._variance.sqrt() * noise)

    @torch.no_grad()
    def sample(self) -> Dict[str, Tensor]:
        """One network's weights, without a graph."""
        return self.rsample()

    def network(self, weights: Dict[str, Tensor]) -> Callable:
        """The model as a function of its inputs, with these weights."""
        buffers = {name: b.clone() for name, b in self._module.named_buffers()}
        return lambda *args, **kwargs: functional_call(self._module, {**weights, **buffers}, args, kwargs)

    def predict(self, *args, samples: int = 10, **kwargs) -> Union[Tensor, Prediction]:
        """
        **Description**

        Outputs of `samples` networks drawn from the posterior, stacked on dimension 0. Average
        probabilities, not logits: `predict(x).softmax(-1).mean(0)`. The predictions of an
        `EpisodicModel` are averaged here, to one distribution.
        """
        check_number("samples", samples, 1, whole=True)
        outputs = [self.network(self.rsample())(*args, **kwargs) for _ in range(samples)]
        if isinstance(outputs[0], Prediction):
            return outputs[0].mix(outputs)
        if not isinstance(outputs[0], Tensor):
            raise ArgumentError(
                f"predict: the model returns a {type(outputs[0]).__name__}, and only tensors can be stacked. "
                "Call post.network(post.sample()) on the inputs, once a sample."
            )
        return torch.stack(outputs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(d={self._layout.d})"
