"""For which weights inner steps keep their graph: none, the last layer's, or all.

The last layer's is small. All that is behind its features is one node, `Body`, whose gradients are constants to a step.
From the second step on, once the step is taken that node drops what it holds, and what comes back to it goes to the
features that the same inputs had at the first step, the only one whose whole graph is kept. So the last layer's
iterates depend on the features and on each other, and the body's are constants that move with m_0.
"""

from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from l2l_niw.errors import LossError

SECOND_ORDER = ("none", "last_layer", "all")


def run(function: Callable) -> Any:
    """Calls the function, and returns its result."""
    return function()


class Cut:
    """
    **Description**

    The last layer's features in one forward, and what they were computed from, until a step is taken on them.

    **Arguments**

    * **features** (Tensor) - The features.
    * **inputs** (sequence) - The tensors that they were computed from.
    * **calls** (list) - One entry for each of the layer's calls in that forward. They may share what is behind them.
    * **again** (callable, *optional*, default=run) - Calls a function as the forward was called: with its weights in
        the model, from which a checkpointed body computes its activations anew.
    """

    def __init__(self, features: Tensor, inputs: Sequence[Tensor], calls: Sequence, again: Callable = run):
        self.features = features
        self.inputs, self.calls, self.again = inputs, calls, again
        self.stepping = False  # whether a step's gradients are being computed
        self.gradient: Optional[Tensor] = None  # the features', in that step

    def release(self) -> None:
        """Drops the features and their inputs; gradients then go to the first step's features."""
        self.features, self.inputs, self.again = None, (), None  # type: ignore[assignment]

    def nodes(self) -> Optional[Set[Any]]:
        """The graph of the features; None if it has leaves that are not among the inputs."""
        ends, leaves = {t.grad_fn for t in self.inputs}, {id(t) for t in self.inputs}
        if self.features.is_leaf:
            return set() if id(self.features) in leaves else None
        waiting: List[Any] = [self.features.grad_fn]
        seen: Set[Any] = set()
        while waiting:
            node = waiting.pop()
            if hasattr(node, "variable"):
                if id(node.variable) not in leaves:
                    return None
            elif node is not None and node not in ends and node not in seen:
                seen.add(node)
                waiting += [following for following, _ in node.next_functions]
        return seen

    def is_used_again(self) -> bool:
        """Whether the back-propagation under way, or one after it, may come to the features' graph by another way."""
        engine = torch._C._autograd
        if torch.is_grad_enabled() or len(self.calls) > 1 or not hasattr(engine, "_get_current_graph_task_keep_graph"):
            return True
        if engine._get_current_graph_task_keep_graph():
            return True
        return any(map(torch._C._will_engine_execute_node, self.nodes() or ()))


class Body(torch.autograd.Function):
    """
    **Description**

    The last layer's features as one function of what they were computed from. Its gradient goes there until a step is
    taken on them, and then to the first step's features, which as everywhere in this mode stand for later ones.
    """

    @staticmethod
    def forward(ctx: Any, cut: Cut, first: Optional[Tensor], *inputs: Tensor) -> Tensor:
        """The features' values, as one node behind which are the first step's features and the inputs."""
        ctx.cut = cut
        return cut.features.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Optional[Tensor], ...]:
        """
        While a step's gradients are computed, stores the gradient and passes none on. Otherwise returns it for the
        first step's features if the cut was released, and else the gradients of the inputs.
        """
        cut, nothing = ctx.cut, [None] * (len(ctx.needs_input_grad) - 2)
        if cut.stepping:
            cut.gradient = gradient.detach()
            return (None, None, *nothing)
        if cut.features is None:
            return (None, gradient if ctx.needs_input_grad[1] else None, *nothing)
        settings = {"retain_graph": cut.is_used_again(), "create_graph": torch.is_grad_enabled(), "allow_unused": True}
        settings.update(outputs=cut.features, inputs=cut.inputs, grad_outputs=gradient)
        return (None, None, *cut.again(partial(torch.autograd.grad, **settings)))


class Cuts:
    """
    **Description**

    Where the last layer begins in one forward.

    **Arguments**

    * **inputs** (sequence) - The tensors that its features are computed from.
    * **first** (sequence) - What it got at the first step on the same inputs; empty if there was none.
    * **again** (callable, *optional*, default=run) - As in `Cut`.
    """

    def __init__(self, inputs: Sequence[Tensor], first: Sequence[Optional[Tensor]], again: Callable = run):
        self.inputs, self.first, self.again = [t for t in inputs if t.requires_grad], first, again
        self.inside: List[Optional[Tensor]] = []  # what the layer got instead of its features, call by call
        self.calls: List[None] = []  # as many; their graph must not hold itself
        self.cuts: List[Cut] = []
        self.failed = False  # whether features depend on more than the inputs

    def cut(self, features: Tensor) -> Tensor:
        """The features of the layer's next call, cut off from what is behind them."""
        number = len(self.calls)
        self.calls.append(None)
        self.inside.append(None)
        if not features.requires_grad:
            return features
        cut = Cut(features, self.inputs, self.calls, self.again)
        if cut.nodes() is None:
            self.failed = True
            return features
        match = self.first[number] if number < len(self.first) else None
        match = match if match is not None and match.shape == features.shape else None
        self.cuts.append(cut)
        self.inside[number] = inside = Body.apply(cut, match, *cut.inputs)
        return inside

    def hook(self, module: nn.Module, args: tuple) -> Optional[tuple]:
        """A forward pre-hook of the layer."""
        return (self.cut(args[0]), *args[1:]) if args and isinstance(args[0], Tensor) else None


class Lift(torch.autograd.Function):
    """Under `vmap`, calls a function on the tensor of all episodes instead of on one's."""

    @staticmethod
    def forward(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Raises: without `vmap` there is no tensor of all episodes."""
        raise LossError("Lift is for vmap alone.")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        """Saves nothing: `vmap` calls a function that has a graph of its own."""
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tuple[Tensor, int]:
        """The function's value on the tensor of all episodes, and 0, the dimension of the episodes."""
        return function(x if in_dims[0] is None else x.movedim(in_dims[0], 0)), 0


def last_called(model: nn.Module, run: Callable) -> Optional[nn.Module]:
    """Which of the model's modules with parameters of its own is called last."""
    own, called = set(model.modules()), []

    def note(module: nn.Module, args: tuple) -> None:
        if module in own and module._parameters:
            called.append(module)

    handle = register_module_forward_pre_hook(note)
    try:
        run()
    finally:
        handle.remove()
    return called[-1] if called else None


def differentiate(
    loss: Tensor, weights: Sequence[Tensor], cuts: Sequence[Cuts], create_graph: bool, retain_graph: bool
) -> List[Optional[Tensor]]:
    """
    A step's gradients: None for weights that the loss does not depend on, and with a graph if one is created. What
    comes by the cuts to the body's weights has none.
    """
    every = [cut for own in cuts for cut in own.cuts]
    for cut in every:
        cut.stepping = True
    try:
        settings: Dict[str, Any] = {"retain_graph": retain_graph, "allow_unused": True}
        gradients: List[Optional[Tensor]]
        gradients = list(torch.autograd.grad(loss, weights, create_graph=create_graph, **settings))
        places = {id(w): i for i, w in enumerate(weights)}
        for cut in every:
            body = [t for t in cut.inputs if id(t) in places]
            if cut.gradient is None or not body:
                continue
            for t, found in zip(body, torch.autograd.grad(cut.features, body, cut.gradient, **settings)):
                i = places[id(t)]
                if found is not None:
                    gradients[i] = found if gradients[i] is None else gradients[i] + found  # type: ignore[operator]
        return gradients
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        raise LossError(
            "adapt: the loss's graph was freed by an earlier backward. Compute the loss anew, from the learner's "
            "present weights, before each adapt."
        ) from error
    finally:
        for cut in every:
            cut.stepping, cut.gradient = False, None


def reaches_past(
    tensors: Sequence[Tensor], cuts: Sequence[Cuts], body: Sequence[Tensor], iterates: Sequence[Tensor] = ()
) -> bool:
    """
    Whether these tensors depend on one of the body's weights by another way than through the cuts, or through earlier
    steps, which are behind the iterates.
    """
    goal, leaves = {(w.grad_fn, w.output_nr) for w in body if w.grad_fn}, {id(w) for w in body if w.is_leaf}
    seen = {t.grad_fn for own in cuts for t in own.inside if t is not None} | {w.grad_fn for w in (*body, *iterates)}
    waiting = [(t.grad_fn, 0) for t in tensors]
    while waiting:
        place = waiting.pop()
        if place in goal:
            return True
        node = place[0]
        if id(getattr(node, "variable", None)) in leaves:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += node.next_functions
    return False
