"""For which weights inner steps keep their graph: none, the last layer's, or all.

The last layer's is small. All that is behind its features is one node, `Body`. From the second step on, once the step
is taken that node drops what it holds, and what comes back to it goes to the features that the same inputs had at the
first step, the only one whose whole graph is kept. So the last layer's iterates depend on the features and on each
other, and the body's are constants that move with m_0.
"""

from functools import partial
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from l2l_niw.errors import LossError

SECOND_ORDER = ("none", "last_layer", "all")
Gradients = List[Optional[Tensor]]


def run(function: Callable) -> Any:
    return function()


class Behind:
    """
    **Description**

    The last layer's features in one forward, and what they were computed from, until a step is taken on them.

    **Arguments**

    * **features** (Tensor) - The features.
    * **inputs** (sequence) - The tensors that they were computed from.
    * **calls** (list) - The numbers of the layer's calls in that forward. Several may share what is behind them.
    * **again** (callable) - Calls a function as the forward was called: with its weights in the model, from which a
        checkpointed body computes its activations anew.
    """

    def __init__(self, features: Tensor, inputs: Sequence[Tensor], calls: Sequence[int] = (), again: Callable = run):
        self.features: Optional[Tensor] = features
        self.inputs, self.calls, self.again = inputs, calls, again

    def release(self) -> None:
        self.features, self.inputs, self.again = None, (), None

    def nodes(self) -> Optional[Set[Any]]:
        """The graph of the features; None if it has leaves that are not among the inputs."""
        ends, leaves = {t.grad_fn for t in self.inputs}, {id(t) for t in self.inputs}
        if self.features.is_leaf:
            return set() if id(self.features) in leaves else None
        waiting, seen = [self.features.grad_fn], set()
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
        return engine._get_current_graph_task_keep_graph() or any(map(torch._C._will_engine_execute_node, self.nodes()))


class Body(torch.autograd.Function):
    """
    **Description**

    The last layer's features as one function of what they were computed from. Its gradient goes there until a step is
    taken on them, and then to the first step's features, which as everywhere in this mode stand for later ones.
    """

    @staticmethod
    def forward(ctx, behind: Behind, first: Optional[Tensor], *inputs: Tensor) -> Tensor:
        ctx.behind = behind
        return behind.features.detach()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        behind, others = ctx.behind, [None] * (len(ctx.needs_input_grad) - 2)
        if behind.features is None:
            return (None, gradient if ctx.needs_input_grad[1] else None, *others)
        settings = {"retain_graph": behind.is_used_again(), "create_graph": torch.is_grad_enabled()}
        settings.update(outputs=behind.features, inputs=behind.inputs, grad_outputs=gradient, allow_unused=True)
        return (None, None, *behind.again(partial(torch.autograd.grad, **settings)))


class Cut(NamedTuple):
    """Where the last layer begins in a forward: what is behind, its features as it got them, the first step's."""

    behind: Behind
    inside: Tensor
    first: Optional[Tensor]


def cut(
    features: Tensor, inputs: Sequence[Tensor], first: Sequence[Tensor], calls: List[int], again: Callable = run
) -> Optional[Cut]:
    """
    **Description**

    Cuts off what is behind the features of the last layer's next call; None if they depend on more than the inputs.

    **Arguments**

    * **inputs**, **calls**, **again** - As in `Behind`.
    * **first** (sequence) - What the layer got at the first step on the same inputs.
    """
    number = len(calls)
    calls.append(number)
    behind = Behind(features, [t for t in inputs if t.requires_grad], calls, again)
    if behind.nodes() is None:
        return None
    match = first[number] if number < len(first) and first[number].shape == features.shape else None
    return Cut(behind, Body.apply(behind, match, *behind.inputs), match)


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


def cuts_behind(
    loss: Tensor, cuts: Sequence[Cut], weights: Sequence[Sequence[Tensor]], body: Sequence[int]
) -> Optional[List[Cut]]:
    """
    The cuts that a loss's graph comes to, or None if it comes to one of the body's weights by another way too. Weights
    may be there several times, as they are and as forwards ran with them.
    """
    gates = {c.inside.grad_fn: c for c in cuts}
    goal = {(own[i].grad_fn, own[i].output_nr) for own in weights for i in body}
    seen = {w.grad_fn for own in weights for w in own}  # beyond are earlier steps
    waiting, found = [(loss.grad_fn, 0)], []
    while waiting:
        place = waiting.pop()
        if place in goal:
            return None
        node = place[0]
        if node is not None and node not in seen:
            seen.add(node)
            if node in gates:
                found.append(gates[node])
            else:
                waiting += node.next_functions
    return found


def differentiate(
    loss: Tensor,
    weights: Sequence[Tensor],
    kept: Sequence[int] = (),
    cuts: Sequence[Cut] = (),
    create_graph: bool = True,
    retain: bool = False,
) -> Gradients:
    """
    **Description**

    The loss's gradient for each weight, with a graph for those that are `kept`; None where it does not depend.

    **Arguments**

    * **cuts** (sequence, *optional*, default=()) - Where the loss's graph can be cut: behind them it has all of the
        body's weights.
    * **create_graph** (bool, *optional*, default=True) - False for a gradient without a graph.
    * **retain** (bool, *optional*, default=False) - Whether the graph behind the cuts is used once more.
    """
    found: Gradients = [None] * len(weights)
    body = [i for i in range(len(weights)) if i not in kept]

    def fill(part: Sequence[int], gradients: Sequence[Optional[Tensor]]) -> None:
        for i, gradient in zip(part, gradients):
            found[i] = gradient

    if cuts:
        inputs = [*(c.inside for c in cuts), *(weights[i] for i in kept)]
        gradients = torch.autograd.grad(loss, inputs, retain_graph=True, create_graph=create_graph, allow_unused=True)
        fill(kept, gradients[len(cuts) :])
        pairs = [(c.behind.features, g.detach()) for c, g in zip(cuts, gradients) if g is not None]
        if pairs:
            features, upstream = zip(*pairs)
            own = [weights[i] for i in body]
            fill(body, torch.autograd.grad(features, own, upstream, retain_graph=retain, allow_unused=True))
        return found
    for part, graph in ((kept, create_graph), (body, False)):
        if part:
            own = [weights[i] for i in part]
            fill(part, torch.autograd.grad(loss, own, retain_graph=True, create_graph=graph, allow_unused=True))
    return found
