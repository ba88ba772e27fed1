"""A Gaussian over a task's weights, and its predictions (Sec. 3.2)."""

import warnings
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.conv import _ConvNd

from l2l_niw.errors import ArgumentError, LossError, NIWError
from l2l_niw.heads.predictions import Prediction
from l2l_niw.utils._checks import check_finite, check_loss, check_number
from l2l_niw.utils._functional import batch_size, replica_by_name
from l2l_niw.utils._shared import Calls, compute_once

SMALL = 100_000  # weights of a network whose samples a CPU runs at once
Outputs = Union[Tensor, Prediction]
Weights = Dict[str, Tensor]


class GaussianWeights:
    """
    **Description**

    N(mean, diag(variance)) over the random weights of one task, or of B tasks with a leading dimension in
    everything. Frozen parameters and buffers stay the model's; `predict` works on copies of the
    buffers, so that it never writes to the model.

    **Arguments**

    * **module** (Module) - The network whose weights these are.
    * **names** (list) - The names of its random weights.
    * **mean** (list) - Their means, one tensor per weight, or of B tasks, (B, ...).
    * **variance** (list) - Their variances, of the same shapes.
    * **vectorize** (bool, *optional*, default=None) - What `predict` takes, where it is known beforehand.

    **Example**

    ~~~python
    post = learner.posterior()
    probabilities = post.predict(x, samples=10).softmax(-1).mean(0)
    ~~~
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        mean: Sequence[Tensor],
        variance: Sequence[Tensor],
        vectorize: Optional[bool] = None,
    ):
        self._module, self._vectorize = module, vectorize
        self.mean: Weights = dict(zip(names, mean))
        self.variance: Weights = dict(zip(names, variance))
        self.free_energy: Optional[Tensor] = None  # of the support, in nats, where it is known

    def rsample(self) -> Weights:
        """One network's weights, reparametrised: gradients reach whatever the Gaussian depends on."""
        return {name: self._draw(name) for name in self.mean}

    def _draw(self, name: str) -> Tensor:
        mean, variance = self.mean[name], self.variance[name]
        return torch.addcmul(mean.to(variance.dtype), variance.sqrt(), torch.randn_like(variance)).to(mean.dtype)

    @torch.no_grad()
    def sample(self) -> Weights:
        """One network's weights, without a graph."""
        return self.rsample()

    def network(self, weights: Weights) -> Callable:
        """The model as a function of its inputs, with these weights."""
        tensors = {**{name: b.clone() for name, b in self._module.named_buffers()}, **weights}
        replica = replica_by_name(self._module, tensors)
        replica.put(list(tensors.values()))
        return lambda *args, **kwargs: replica.module(*args, **kwargs)

    def detached(self) -> "GaussianWeights":
        """The same without a graph."""
        mean, variance = ([t.detach() for t in part.values()] for part in (self.mean, self.variance))
        found = GaussianWeights(self._module, list(self.mean), mean, variance, self._vectorize)
        found.free_energy = None if self.free_energy is None else self.free_energy.detach()
        return found

    def loss(self, nll: Callable, weights: Sequence[Tensor]) -> Tuple[Tensor, int]:
        """`nll(network)` at these weights, and the number of examples that the network saw."""
        seen: List[int] = []

        def counting(*args: Any, **kwargs: Any) -> Any:
            outputs = network(*args, **kwargs)
            seen.append(batch_size(outputs, (args, kwargs)) or 1)
            return outputs

        network = self.network(dict(zip(self.mean, weights)))
        value = nll(counting)
        if not seen:
            raise LossError("posterior: nll must call the network that it is given, `nll(network)`.")
        return value, sum(seen)

    def gradient(self, nll: Callable, weights: List[Tensor]) -> Tuple[List[Tensor], int]:
        """The gradient of `nll(network)` at these weights, and the number of examples that the network saw."""
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [w.clone().requires_grad_() for w in weights]
            value, seen = self.loss(nll, leaves)
        check_loss(value, "posterior: nll's loss")
        check_finite(value.detach(), "posterior: nll's loss")
        found = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        return list(found), seen

    def predict(self, *args: Any, samples: int = 10, vectorize: Optional[bool] = None, **kwargs: Any) -> Outputs:
        """
        **Description**

        Outputs of `samples` networks drawn from the posterior, stacked on dimension 0. Average
        probabilities, not logits: `predict(x).softmax(-1).mean(0)`. The predictions of an
        `EpisodicModel` are averaged here, to one distribution. For B tasks every tensor among the
        arguments has a leading dimension B, and the outputs have it next to the samples'.

        **Arguments**

        * **samples** (int, *optional*, default=10) - The paper's M_S.
        * **vectorize** (bool, *optional*, default=None) - Whether all networks run at once, by `vmap`, rather than one
            after another. Defaults to whether that is faster: yes, unless the model runs on a CPU and has convolutions
            or 100,000 weights, where each network by itself is a better use of it.
        """
        check_number("samples", samples, 1, whole=True)
        vectorize = self._vectorize if vectorize is None else vectorize
        if vectorize is None:
            large = sum(p.numel() for p in self._module.parameters()) >= SMALL
            convolves = any(isinstance(m, _ConvNd) for m in self._module.modules())
            vectorize = not ((large or convolves) and next(iter(self.mean.values())).device.type == "cpu")
        outputs: List[Any] = []
        calls: Dict[str, Calls] = {}
        for size in [samples] if vectorize else [1] * samples:  # networks that are held at a time
            drawn = [self.rsample() for _ in range(size)]
            weights = {name: torch.stack([w[name] for w in drawn]) for name in self.mean}
            outputs += run_networks(self._module, weights, args, kwargs, vectorize, calls)
        return outputs[0].mix(outputs) if isinstance(outputs[0], Prediction) else torch.stack(outputs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(d={sum(t.numel() for t in self.mean.values())})"


def run_networks(
    module: nn.Module,
    weights: Weights,
    args: tuple,
    kwargs: dict,
    vectorize: bool,
    calls: Optional[Dict[str, Calls]] = None,
) -> List[Any]:
    """
    **Description**

    The outputs of S networks on the same inputs, or of S networks for each of B tasks on that task's: a list of S.
    Every network works on its own copies of the buffers. A model that cannot be vmapped runs in a loop.

    **Arguments**

    * **module** (Module) - The network.
    * **weights** (dict) - By name, (S, ...) or (S, B, ...).
    * **args**, **kwargs** - The module's; for tasks, every tensor among them has a leading dimension B.
    * **vectorize** (bool) - Whether to run them at once.
    * **calls** (dict, *optional*, default=None) - What modules without random weights have computed for other networks,
        which run one after another: it is not computed again.
    """
    name, first = next(iter(weights.items()))
    lead = first.shape[: first.dim() - dict(module.named_parameters())[name].dim()]
    buffers = dict(module.named_buffers())
    replica = replica_by_name(module, [*weights, *buffers])
    if calls is not None and not vectorize:
        compute_once(replica.module, list(weights), calls)
    inputs = [*args, *kwargs.values()]
    mapped = [a for a in inputs if isinstance(a, Tensor)]  # what is no tensor is the same for every network
    kinds: List[type] = []

    def call(own: List[Tensor], tensors: List[Tensor]) -> Tuple[Tensor, ...]:
        given = iter(tensors)
        every = [next(given) if isinstance(a, Tensor) else a for a in inputs]
        replica.put(own)
        outputs = replica.module(*every[: len(args)], **dict(zip(kwargs, every[len(args) :])))
        kinds.append(type(outputs))
        if isinstance(outputs, Prediction):
            return outputs.tensors()
        if not isinstance(outputs, Tensor):
            raise ArgumentError(
                f"predict: the model returns a {type(outputs).__name__}, and only tensors can be stacked. "
                "Call post.network(post.sample()) on the inputs, once per sample."
            )
        return (outputs,)

    def over_tasks(own: List[Tensor], tensors: List[Tensor]) -> Tuple[Tensor, ...]:
        found = [call([t[i] for t in own], [t[i] for t in tensors]) for i in range(lead[1])]
        return tuple(torch.stack(parts) for parts in zip(*found))

    def pack(tensors: Sequence[Tensor]) -> Any:
        return kinds[0].rebuild(*tensors) if issubclass(kinds[0], Prediction) else tensors[0]

    def everything() -> List[Tensor]:
        return [*weights.values(), *(b.expand(lead + b.shape).clone() for b in buffers.values())]

    if vectorize:
        per_task = vmap(call, randomness="different") if len(lead) > 1 else call
        try:
            outputs = vmap(per_task, in_dims=(0, None), randomness="different")(everything(), mapped)
            return [pack([t[s] for t in outputs]) for s in range(lead[0])]
        except NIWError:
            raise
        except RuntimeError as error:  # not vmap's doing, if the loop raises it again
            reason = str(error).splitlines()[0]
            warnings.warn(
                f"Sampled networks run one after another instead of at once: {reason} With vectorize=False they do "
                "so without a warning.",
                stacklevel=3,
            )
    tensors, run = everything(), over_tasks if len(lead) > 1 else call
    return [pack(run([t[s] for t in tensors], mapped)) for s in range(lead[0])]
