"""What the readout's steps owe to L_0: the part of MAML's second derivative that costs next to nothing.

A model's readout is its last linear layer, where the layer's outputs are the model's. Where a chain takes it depends on
the support's features, and so on all weights. For losses that are sums over data a step of it is a function of a few
small tensors: they are kept, and no graph is, but that of the first step's features, which stand for all steps'.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from l2l_niw.errors import LossError
from l2l_niw.weights import Layout

if TYPE_CHECKING:
    from l2l_niw.forwards import Inputs

OUTPUTS = 128  # of a readout, at most: the Hessian takes as many small backwards
NUMBERS = 2**22  # in the Hessians of a step, at most


class Place(NamedTuple):
    """Where a readout stands: its name among the modules, and its weight and bias among a layout's parameters."""

    name: str
    weight: int
    bias: Optional[int]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Weight and bias as one matrix, (..., C, F + 1), or (..., C, F) without a bias, of all parameters' tensors."""
        if self.bias is None:
            return parts[self.weight]
        return torch.cat([parts[self.weight], parts[self.bias].unsqueeze(-1)], -1)

    def split(self, matrix: Tensor) -> List[Tuple[int, Tensor]]:
        """The same the other way, with their numbers."""
        if self.bias is None:
            return [(self.weight, matrix)]
        return [(self.weight, matrix[..., :-1]), (self.bias, matrix[..., -1])]


def find(model: nn.Module, layout: Layout) -> Optional[Place]:
    """
    A model's last module with parameters, if that is a linear layer with at most `OUTPUTS` outputs whose weights are
    random and no other's.
    """
    owners = [(name, module) for name, module in model.named_modules() if module._parameters]
    name, last = owners[-1]
    if type(last) is not nn.Linear or last.out_features > OUTPUTS:
        return None
    numbers = {key: layout.index.get(id(p)) for key, p in last._parameters.items() if p is not None}
    places = [id(p) for _, owner in owners for p in owner._parameters.values()]
    known = "weight" in numbers and numbers.keys() <= {"weight", "bias"}  # not so if it is reparametrised
    if not known or None in numbers.values() or any(places.count(id(p)) > 1 for p in last.parameters()):
        return None
    return Place(name, numbers["weight"], numbers.get("bias"))


class Call:
    """
    **Description**

    A call of a readout, seen by a hook: its features and its outputs, as long as nothing has been written to them.

    **Arguments**

    * **args** (tuple) - What the layer was called with.
    * **outputs** (Tensor) - What it returned.
    """

    def __init__(self, args: Tuple[Tensor, ...], outputs: Tensor):
        self.features, self.outputs = args[0] if len(args) == 1 else None, outputs
        self._made = outputs.grad_fn, outputs._version

    def gave(self, outputs: Any) -> bool:
        """Whether these are its outputs, as they were, and few enough to be traced."""
        own = outputs is self.outputs and self.features is not None and outputs.grad_fn is not None
        small = own and outputs.numel() * outputs.shape[-1] <= NUMBERS
        return small and (outputs.grad_fn, outputs._version) == self._made


class Step(NamedTuple):
    """
    **Description**

    A step of the readout, on N data, or those of several episodes, (..., N). One that is only known to have been taken
    has nothing but its matrix.

    * `matrix` - Weight and bias before it, (C, F + 1).
    * `lr` - Its size.
    * `inputs` - The features, and ones for the bias, (N, F + 1).
    * `gradient` - Of the loss in the outputs, (N, C).
    * `hessian` - The same once more, for every datum, (N, C, C).
    * `first` - Whether its data are those of the first step.
    """

    matrix: Tensor
    lr: float
    inputs: Optional[Tensor] = None
    gradient: Optional[Tensor] = None
    hessian: Optional[Tensor] = None
    first: bool = True


def with_ones(features: Tensor, bias: bool) -> Tensor:
    return torch.cat([features, torch.ones_like(features[..., :1])], -1) if bias else features


def by_datum(tensor: Tensor) -> Tensor:
    """(N, C), whatever dimensions come before the last."""
    return tensor.reshape(-1, tensor.shape[-1])


def nodes(tensor: Tensor, stop: Optional[Node]) -> Iterator[Node]:
    """The nodes of a tensor's graph, as far as one of them."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if node is not stop:
            waiting += [following for following, _ in node.next_functions]


def depends_only_on(loss: Tensor, outputs: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether a loss is a function of these outputs, and of the weights by no other way."""
    found = set(nodes(loss, outputs.grad_fn))
    return outputs.grad_fn in found and found.isdisjoint(w.grad_fn for w in weights)


@torch.enable_grad()
def differentiate(loss: Tensor, outputs: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """
    A loss's gradient in the outputs, (N, C), the Hessian of every datum, (N, C, C), and whether that is all of it:
    whether the loss is a sum over data.
    """
    (gradient,) = torch.autograd.grad(loss, outputs, create_graph=True)
    try:
        if any(node.name() == "torch::autograd::Error" for node in nodes(gradient, outputs.grad_fn)):
            raise RuntimeError("a part of it is marked once_differentiable")  # autograd would take it for constant
        units = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
        rows = [hessian_times(gradient, outputs, unit.expand_as(outputs)) for unit in units]
        probe = torch.linspace(-1.0, 1.0, outputs.numel(), dtype=outputs.dtype, device=outputs.device).sin()
        probe = probe.view_as(outputs)
        expected = hessian_times(gradient, outputs, probe)
    except RuntimeError as error:
        raise LossError(
            f"adapt: the loss has no second derivatives in the model's outputs: {error}. Pass first_order=True to NIW."
        ) from error
    hessian = torch.stack([by_datum(row) for row in rows], -2)
    expected = by_datum(expected)
    rest = torch.einsum("nc,ncd->nd", by_datum(probe), hessian) - expected
    tolerance = max(0.01, 4 * torch.finfo(outputs.dtype).eps)  # bfloat16's rounding is of that order
    return by_datum(gradient.detach()), hessian, rest.abs().max() <= tolerance * expected.abs().max()


def hessian_times(gradient: Tensor, outputs: Tensor, vector: Tensor) -> Tensor:
    if not gradient.requires_grad:
        return torch.zeros_like(outputs)
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    return torch.autograd.grad(gradient, outputs, vector, **options)[0].detach()


@dataclass(frozen=True)
class Trace:
    """
    **Description**

    The steps of a readout so far.

    **Arguments**

    * **place** (Place) - The readout's.
    * **steps** (tuple, *optional*, default=()) - The steps.
    * **data** (Inputs, *optional*, default=None) - What the first of them was taken on.
    * **pull** (callable, *optional*, default=None) - From a gradient in its features to that of every parameter, or
        None.
    """

    place: Place
    steps: Tuple[Step, ...] = ()
    data: Optional["Inputs"] = None
    pull: Optional[Callable[[Tensor], Sequence[Optional[Tensor]]]] = None

    def append(self, step: Step, data: Optional["Inputs"] = None, pull: Optional[Callable] = None) -> "Trace":
        return replace(self, steps=(*self.steps, step), data=self.data or data, pull=self.pull or pull)

    def back(
        self, in_mean: Tensor, in_end: Tensor, kept: int, end: Tensor, sizes: Optional[Tensor]
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """
        **Description**

        From gradients in the readout's iterates to those in where it began, in the logarithm of its steps' sizes, and
        in the first step's features, which stand for those of every step on the same data (None if none is known).

        **Arguments**

        * **in_mean** (Tensor) - The gradient in the mean of the last `kept` iterates, (..., C, F + 1),
        * **in_end** (Tensor) - and that in the last one.
        * **kept** (int) - How many iterates the mean is of.
        * **end** (Tensor) - The last iterate.
        * **sizes** (Tensor) - Of the steps, weight by weight; None for 1.
        """
        u, in_sizes, in_features = in_end, torch.zeros_like(in_end), None
        for number, step in reversed(list(enumerate(self.steps, start=1))):
            if number > len(self.steps) - kept:
                u = u + in_mean / kept
            in_sizes = in_sizes + u * (end - step.matrix)
            end = step.matrix
            if step.inputs is None:
                continue
            moved = -step.lr * (u if sizes is None else sizes * u)
            in_outputs = torch.einsum("...nc,...ncd->...nd", step.inputs @ moved.mT, step.hessian)
            in_inputs = step.gradient @ moved + in_outputs @ step.matrix
            if step.first:
                in_features = in_inputs if in_features is None else in_features + in_inputs
            u = u + in_outputs.mT @ step.inputs
        if in_features is not None and self.place.bias is not None:
            in_features = in_features[..., :-1]
        return u, in_sizes, in_features
