"""For which weights inner steps keep their graph: none, the last layer's, or all.

The last layer's is small. A step's graph is cut at the features that the layer gets: behind them the body's graph is
freed, before them it holds that layer, and whatever follows it. The graph of the first step is not cut, and the
features of later steps on the same inputs stand for the first one's. So the last layer's iterates depend on the
features and on each other, and the body's are constants that move with where they began.
"""

from typing import Any, Callable, Collection, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from l2l_niw.errors import LossError

SECOND_ORDER = ("none", "last_layer", "all")
Gradients = List[Optional[Tensor]]


class Cut(NamedTuple):
    """Where the last layer begins: its features, and those of the same inputs before the first step, if there are."""

    features: Tensor
    first: Optional[Tensor]


class Lift(torch.autograd.Function):
    """Under `vmap`, calls a function on the tensor of all episodes instead of on one's."""

    @staticmethod
    def forward(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        raise LossError("Lift is for vmap alone.")

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def vmap(info, in_dims: tuple, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tuple[Tensor, int]:
        return function(x if in_dims[0] is None else x.movedim(in_dims[0], 0)), 0


def last_called(model: nn.Module, run: Callable) -> Tuple[Any, Optional[nn.Module], List[Tensor]]:
    """What `run` returns, which of the model's modules with parameters of its own it called last, and on what."""
    own, called = set(model.modules()), []

    def note(module: nn.Module, args: tuple) -> None:
        if module in own and module._parameters:
            called.append((module, args))

    handle = register_module_forward_pre_hook(note)
    try:
        outputs = run()
    finally:
        handle.remove()
    if not called:
        return outputs, None, []
    last = called[-1][0]
    features = [args[0] for module, args in called if module is last and args and isinstance(args[0], Tensor)]
    return outputs, last, [x for x in features if x.requires_grad]


class LayerGraph:
    """
    **Description**

    A step's gradients in the last layer's weights, with their graph to the features and to these weights.

    **Arguments**

    * **gradients** (list) - Of the weights that the loss depends on.
    * **features** (list) - What the layer got. Their own graph is about to be freed.
    * **weights** (list) - The weights.
    """

    def __init__(self, gradients: List[Tensor], features: List[Tensor], weights: List[Tensor]):
        self.gradients, self.inputs = gradients, [*features, *weights]
        self.entered = Entered()
        for x in features:
            x.register_hook(self.entered.check)

    def vjp(self, upstream: Sequence[Tensor], create_graph: bool = False) -> Tuple[Tensor, ...]:
        settings = {"retain_graph": True, "create_graph": create_graph, "materialize_grads": True}
        self.entered.here = True
        try:
            return torch.autograd.grad(self.gradients, self.inputs, upstream, allow_unused=True, **settings)
        finally:
            self.entered.here = False


class Entered:
    """Whether a `LayerGraph` is differentiated by itself. Apart, since its features hold it."""

    here = True

    def check(self, gradient: Tensor) -> None:
        if not self.here:
            raise LossError(
                "a loss was back-propagated on which adapt had taken a second or later step: second_order='last_layer' "
                "has freed the graph behind its features. Compute the loss anew, or choose 'none' or 'all'."
            )


class StepGradient(torch.autograd.Function):
    """
    **Description**

    The gradients of a `LayerGraph` as functions of the first step's features and of the layer's weights. The graph by
    which they were computed hangs on features whose own graph is gone, and is never entered from outside.
    """

    @staticmethod
    def forward(ctx, graph: LayerGraph, *inputs: Optional[Tensor]) -> Tuple[Tensor, ...]:
        ctx.graph = graph
        return tuple(g.detach() for g in graph.gradients)

    @staticmethod
    def backward(ctx, *upstream: Tensor):
        if torch.is_grad_enabled():
            found = StepProduct.apply(ctx.graph, *upstream)
        else:
            found = ctx.graph.vjp(upstream)
        return (None, *(g if needed else None for g, needed in zip(found, ctx.needs_input_grad[1:])))


class StepProduct(torch.autograd.Function):
    """The backward of `StepGradient` as a function of its upstream gradient, to which all else is constant."""

    @staticmethod
    def forward(ctx, graph: LayerGraph, *upstream: Tensor) -> Tuple[Tensor, ...]:
        ctx.graph = graph
        return graph.vjp(upstream)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *directions: Tensor):
        with torch.enable_grad():
            upstream = [torch.zeros_like(g, requires_grad=True) for g in ctx.graph.gradients]
            products = ctx.graph.vjp(upstream, create_graph=True)
        found = torch.autograd.grad(products, upstream, directions, allow_unused=True, materialize_grads=True)
        return (None, *found)


def reaches(loss: Tensor, goal: Collection[object], stop: Collection[object]) -> bool:
    """Whether a loss's graph comes to one of the nodes `goal` by a way on which there is none of `stop`."""
    waiting, seen = [loss.grad_fn], set(stop)
    while waiting:
        node = waiting.pop()
        if node in goal:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return False


def differentiate(
    loss: Tensor, weights: Sequence[Tensor], kept: Sequence[int] = (), cuts: Sequence[Cut] = ()
) -> Gradients:
    """The loss's gradient for each weight, with a graph for those that are `kept`; None where it does not depend."""
    body = [i for i in range(len(weights)) if i not in kept]
    found: Gradients = [None] * len(weights)
    if cuts:
        features = [c.features for c in cuts]
        inputs = [*features, *(weights[i] for i in kept)]
        gradients = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
        behind = [(c, g) for c, g in zip(cuts, gradients) if g is not None]
        pairs = [(i, g) for i, g in zip(kept, gradients[len(cuts) :]) if g is not None]
        if pairs:
            layer = [weights[i] for i, _ in pairs]
            graph = LayerGraph([g for _, g in pairs], [c.features for c, _ in behind], layer)
            outputs = StepGradient.apply(graph, *(c.first for c, _ in behind), *layer)
            for (i, _), g in zip(pairs, outputs):
                found[i] = g
        slopes = [g.detach() for _, g in behind]
        if slopes:
            pulled = torch.autograd.grad([c.features for c, _ in behind], weights, slopes, allow_unused=True)
            if pairs:
                graph.entered.here = False
            found = [b if a is None else a if b is None else a + b for a, b in zip(found, pulled)]
        return found
    for part, graph in ((kept, True), (body, False)):
        if part:
            own = [weights[i] for i in part]
            gradients = torch.autograd.grad(loss, own, retain_graph=True, create_graph=graph, allow_unused=True)
            for i, gradient in zip(part, gradients):
                found[i] = gradient
    return found
