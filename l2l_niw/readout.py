"""What the readout's steps owe to L_0: the part of MAML's second derivative that costs next to nothing.

A model's readout is its last linear layer, where the layer's outputs are the model's. Where a chain takes it depends on
the support's features, and so on all weights. For losses that are sums over data a step of it is a function of a few
small tensors: they are kept, and no graph is, but that of the first step's features.
"""

from dataclasses import dataclass, replace
from typing import Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from l2l_niw.errors import LossError
from l2l_niw.weights import Layout

LIMIT = 128  # outputs: of every datum the square of their number is kept


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
    A model's last module with parameters, if that is a linear layer with at most `LIMIT` outputs whose weights are
    random and no other's.
    """
    owners = [(name, module) for name, module in model.named_modules() if module._parameters]
    name, last = owners[-1]
    if type(last) is not nn.Linear or last.out_features > LIMIT:
        return None
    numbers = {key: layout.index.get(id(p)) for key, p in last._parameters.items() if p is not None}
    places = [id(p) for _, owner in owners for p in owner._parameters.values()]
    if None in numbers.values() or any(places.count(id(p)) > 1 for p in last.parameters()):
        return None
    return Place(name, numbers["weight"], numbers.get("bias"))


class Step(NamedTuple):
    """
    **Description**

    A step of the readout, on N data, or those of several episodes, (..., N). One that is only known to have been taken
    has nothing but its matrix.

    * `matrix` - Weight and bias before it, (C, F + 1).
    * `inputs` - The features, and ones for the bias, (N, F + 1).
    * `gradient` - Of the loss in the outputs, (N, C).
    * `hessian` - The same once more, for every datum, (N, C, C).
    """

    matrix: Tensor
    inputs: Optional[Tensor] = None
    gradient: Optional[Tensor] = None
    hessian: Optional[Tensor] = None


def with_ones(features: Tensor, bias: bool) -> Tensor:
    return torch.cat([features, torch.ones_like(features[..., :1])], -1) if bias else features


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


def differentiate(loss: Tensor, outputs: Tensor) -> Tuple[Tensor, Tensor]:
    """A loss's gradient in the outputs, (N, C), and the Hessian of every datum, (N, C, C)."""
    (gradient,) = torch.autograd.grad(loss, outputs, create_graph=True)
    try:
        if any("Error" in node.name() for node in nodes(gradient, outputs.grad_fn)):  # autograd would take it for 0
            raise RuntimeError("a part of it is marked once_differentiable")
        rows = [hessian_row(gradient, outputs, i) for i in range(outputs.shape[-1])]
    except RuntimeError as error:
        raise LossError(
            f"adapt: the loss has no second derivatives in the model's outputs: {error}. Pass first_order=True to NIW."
        ) from error
    gradient, *rows = (t.detach().flatten(0, -2) for t in (gradient, *rows))
    return gradient, torch.stack(rows, -2)


def hessian_row(gradient: Tensor, outputs: Tensor, i: int) -> Tensor:
    """Every datum's second derivatives in its output i and another one."""
    if not gradient.requires_grad:
        return torch.zeros_like(outputs)
    column = gradient[..., i].sum()
    (row,) = torch.autograd.grad(column, outputs, retain_graph=True, allow_unused=True, materialize_grads=True)
    return row


@dataclass(frozen=True)
class Trace:
    """
    **Description**

    The steps of a readout so far.

    **Arguments**

    * **place** (Place) - The readout's.
    * **lr** (float) - Of the chain's steps.
    * **steps** (tuple, *optional*, default=()) - The steps.
    * **pull** (callable, *optional*, default=None) - From a gradient in the first step's features to that of every
        parameter, or None.
    """

    place: Place
    lr: float
    steps: Tuple[Step, ...] = ()
    pull: Optional[Callable[[Tensor], Sequence[Optional[Tensor]]]] = None

    def append(self, step: Step, pull: Optional[Callable] = None) -> "Trace":
        return replace(self, steps=(*self.steps, step), pull=self.pull or pull)

    def back(
        self, in_mean: Tensor, in_end: Tensor, kept: int, end: Tensor, sizes: Optional[Tensor]
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """
        **Description**

        From gradients in the readout's iterates to those in where it began, in the logarithm of its steps' sizes, and
        in the first step's features, which stand for every step's (None if no step is known).

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
            moved = -self.lr * (u if sizes is None else sizes * u)
            in_outputs = torch.einsum("...nc,...ncd->...nd", step.inputs @ moved.mT, step.hessian)
            in_inputs = step.gradient @ moved + in_outputs @ step.matrix
            in_features = in_inputs if in_features is None else in_features + in_inputs
            u = u + in_outputs.mT @ step.inputs
        if in_features is not None and self.place.bias is not None:
            in_features = in_features[..., :-1]
        return u, in_sizes, in_features
