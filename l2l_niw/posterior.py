"""A Gaussian over a task's weights, and its predictions (Sec. 3.2)."""

from typing import Callable, Dict, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from l2l_niw.checks import check_loss, check_number
from l2l_niw.errors import LossError
from l2l_niw.forwards import batch_size
from l2l_niw.networks import Outputs, run_networks, stack
from l2l_niw.weights import Layout, Stateless


class Posterior:
    """
    **Description**

    N(mean, diag(variance)) over the random weights of one task, or of B tasks with a leading dimension in
    everything. Frozen parameters and buffers stay the model's; `predict` works on copies of the
    buffers, so that it never writes to the model.

    **Arguments**

    * **module** (Module) - The network whose weights these are.
    * **layout** (Layout) - Where its random weights stand in the flat vectors.
    * **mean** (Tensor) - Flat vector of means, (d,), or of B tasks, (B, d).
    * **variance** (Tensor) - Flat vector of variances, of the same shape.
    * **together** (bool, *optional*, default=None) - What `predict` takes, where it is known beforehand.

    **Example**

    ~~~python
    post = learner.posterior()
    probabilities = post.predict(x, samples=10).softmax(-1).mean(0)
    ~~~
    """

    def __init__(
        self, module: nn.Module, layout: Layout, mean: Tensor, variance: Tensor, together: Optional[bool] = None
    ):
        self._module, self._layout, self._together = module, layout, together
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
        return self._layout.named(torch.addcmul(self._mean, self._variance.sqrt(), noise))

    @torch.no_grad()
    def sample(self) -> Dict[str, Tensor]:
        """One network's weights, without a graph."""
        return self.rsample()

    def network(self, weights: Dict[str, Tensor]) -> Callable:
        """The model as a function of its inputs, with these weights."""
        run, buffers = Stateless(self._module), {name: b.clone() for name, b in self._module.named_buffers()}
        return lambda *args, **kwargs: run({**weights, **buffers}, args, kwargs)

    def gradient(self, nll: Callable, weights: Tensor) -> Tuple[Tensor, int]:
        """The gradient of `nll(network)` at flat weights, and the number of data that the network saw."""
        seen = []

        def counting(*args, **kwargs):
            outputs = network(*args, **kwargs)
            seen.append(batch_size(outputs, (args, kwargs)) or 1)
            return outputs

        with torch.enable_grad():
            network = self.network(self._layout.named(weights.requires_grad_()))
            value = nll(counting)
        if not seen:
            raise LossError("posterior: nll must call the network that it is given, `nll(network)`.")
        check_loss(value, "posterior: nll's loss")
        return torch.autograd.grad(value, weights)[0], sum(seen)

    def predict(self, *args, samples: int = 10, together: Optional[bool] = None, **kwargs) -> Outputs:
        """
        **Description**

        Outputs of `samples` networks drawn from the posterior, stacked on dimension 0. Average
        probabilities, not logits: `predict(x).softmax(-1).mean(0)`. The predictions of an
        `EpisodicModel` are averaged here, to one distribution. For B tasks every tensor among the
        arguments has a leading dimension B, and the outputs have it next to the samples'.

        **Arguments**

        * **samples** (int, *optional*, default=10) - The paper's M_S.
        * **together** (bool, *optional*, default=None) - Whether all networks run at once, by `vmap`, rather than one
            after another. Defaults to whether that is faster: yes, unless the model has convolutions and
            runs on a CPU, where each network by itself is a better use of it.
        """
        together = self._together if together is None else together
        if together is None:
            convolves = any(isinstance(m, _ConvNd) for m in self._module.modules())
            together = not (convolves and self._mean.device.type == "cpu")
        check_number("samples", samples, 1, whole=True)
        sizes = [samples] if together else [1] * samples  # networks that are held at a time
        outputs = []
        for size in sizes:
            noise = torch.stack([torch.randn_like(self._mean) for _ in range(size)])  # one by one, as `sample` draws
            weights = self._layout.named(torch.addcmul(self._mean, self._variance.sqrt(), noise))
            outputs += run_networks(self._module, weights, args, kwargs, together)
        return stack(outputs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(d={self._layout.d})"
