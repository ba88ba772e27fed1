"""Many sampled networks at once: the outputs of all of them in one call of each operation."""

import warnings
from typing import Any, Dict, List, Tuple, Type, Union

import torch
from torch import Tensor, nn
from torch.func import vmap

from l2l_niw.errors import ArgumentError, NIWError
from l2l_niw.predictions import Prediction
from l2l_niw.weights import Stateless

Outputs = Union[Tensor, Prediction]
Weights = Dict[str, Tensor]


class Call:
    """
    **Description**

    One call of a module, as a function of its weights and of the tensors among its arguments, that gives
    tensors: what `vmap` can map. `pack` makes the module's own kind of output of them again.

    **Arguments**

    * **module** (Module) - The network.
    * **args**, **kwargs** - Its arguments; what is no tensor is the same for every network.
    """

    def __init__(self, module: nn.Module, args: tuple, kwargs: dict):
        self.run, self.args, self.kwargs = Stateless(module), args, kwargs
        self.kind: Union[Type[Tensor], Type[Prediction]] = Tensor

    @property
    def tensors(self) -> List[Tensor]:
        return [a for a in (*self.args, *self.kwargs.values()) if isinstance(a, Tensor)]

    def __call__(self, weights: Weights, tensors: List[Tensor]) -> Tuple[Tensor, ...]:
        given = iter(tensors)
        args = [next(given) if isinstance(a, Tensor) else a for a in self.args]
        kwargs = {k: next(given) if isinstance(a, Tensor) else a for k, a in self.kwargs.items()}
        outputs = self.run(weights, tuple(args), kwargs)
        if isinstance(outputs, Prediction):
            self.kind = type(outputs)
            return outputs.tensors()
        if not isinstance(outputs, Tensor):
            raise ArgumentError(
                f"predict: the model returns a {type(outputs).__name__}, and only tensors can be stacked. "
                "Call post.network(post.sample()) on the inputs, once a sample."
            )
        return (outputs,)

    def pack(self, tensors: Tuple[Tensor, ...]) -> Outputs:
        return tensors[0] if self.kind is Tensor else self.kind.rebuild(*tensors)


def run_networks(module: nn.Module, weights: Weights, args: tuple, kwargs: dict, together: bool) -> List[Outputs]:
    """
    **Description**

    The outputs of S networks on the same inputs, or of S networks for each of B tasks on that task's: a list of S.
    Every network works on its own copies of the buffers. A model that cannot be vmapped runs in a loop.

    **Arguments**

    * **module** (Module) - The network.
    * **weights** (dict) - By name, (S, ...) or (S, B, ...).
    * **args**, **kwargs** - The module's; for tasks, every tensor among them has a leading dimension B.
    * **together** (bool) - Whether to run them at once.
    """
    name, first = next(iter(weights.items()))
    lead = first.shape[: first.dim() - dict(module.named_parameters())[name].dim()]
    everything = {**weights, **{k: b.expand(lead + b.shape).clone() for k, b in module.named_buffers()}}
    call = Call(module, args, kwargs)
    over_tasks = len(lead) > 1
    if together:
        mapped = vmap(call, randomness="different") if over_tasks else call
        try:
            outputs = vmap(mapped, in_dims=(0, None), randomness="different")(everything, call.tensors)
            return [call.pack(tuple(t[s] for t in outputs)) for s in range(lead[0])]
        except NIWError:
            raise
        except RuntimeError as error:  # not vmap's doing, if the loop raises it again
            reason = str(error).splitlines()[0]
            warnings.warn(
                f"Sampled networks run one after another instead of at once: {reason} With together=False they do "
                "so without a warning.",
                stacklevel=3,
            )
            everything.update({k: b.expand(lead + b.shape).clone() for k, b in module.named_buffers()})
    return [loop(call, {k: t[s] for k, t in everything.items()}, over_tasks) for s in range(lead[0])]


def loop(call: Call, weights: Weights, over_tasks: bool) -> Outputs:
    if not over_tasks:
        return call.pack(call(weights, call.tensors))
    tasks = range(len(next(iter(weights.values()))))
    outputs = [call({k: t[i] for k, t in weights.items()}, [t[i] for t in call.tensors]) for i in tasks]
    return call.pack(tuple(torch.stack(parts) for parts in zip(*outputs)))


def stack(outputs: List[Any]) -> Outputs:
    """The average of several networks' predictions, or their outputs stacked."""
    return outputs[0].mix(outputs) if isinstance(outputs[0], Prediction) else torch.stack(outputs)
