"""One task's network: a clone of the model, its Langevin chain, and the posterior that follows from it."""

import copy
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from l2l_niw.algorithms.base import Learner
from l2l_niw.errors import ArgumentError, ChainError
from l2l_niw.inference import chain as chains
from l2l_niw.inference.chain import Chain, as_functions_of_prior, mean_of
from l2l_niw.inference.elbo import minimise_elbo
from l2l_niw.inference.gaussian import GaussianWeights
from l2l_niw.inference.last_layer import Cuts, differentiate
from l2l_niw.inference.meta_gradient import State, Tag
from l2l_niw.inference.objective import expected_kl, objective
from l2l_niw.inference.posterior import draw_network, posterior
from l2l_niw.inference.prior import Prior
from l2l_niw.utils._checks import check_count, check_loss, check_number, check_step, check_used
from l2l_niw.utils._functional import Replica, arrays_in, batch_size, run_with
from l2l_niw.utils._inputs import Inputs

if TYPE_CHECKING:
    from l2l_niw.algorithms.niw import NIW

HOOK, LANGEVIN = "l2l_niw", "inference='langevin'"
NOTHING = Replica(nn.Module(), [], copy=False)  # of weights that tasks share
WHOLE = (
    "the last layer cannot be told from the body, since its gradient depends on the body's weights in other ways than "
    "by its features (a skip connection, a tied weight), or they depend on tensors that the model was not called with. "
    "So each step keeps its whole graph, as with second_order='all'."
)


class Forward(NamedTuple):
    """
    What a forward leaves for `adapt`: its tag, the method that was called, its inputs, where the last layer begins,
    whether it ran a network drawn in closed form, and its outputs.
    """

    tag: Tag
    method: str
    inputs: Optional[Inputs]
    cuts: Optional[Cuts]
    drawn: bool
    outputs: Any = None


class NIWLearner(Learner):
    """
    **Description**

    What `NIW.clone()` returns: a network for one task. `learner.parameters()` are the chain's state, plain tensors with
    a graph to L_0 as MAML's have one to the model's parameters. Every forward runs at them, and a loss on its outputs
    sends its gradient, and the KL's, to L_0.

    With inference='closed_form' that is so of support forwards only: a query runs a network drawn from the posterior of
    the chain so far. Say which forward is one by `learner.query(x)`. `learner(x)` is one if its inputs are not those
    that the last step was taken on; where they cannot be compared it is one, and a warning says so once.
    """

    def __init__(self, niw: "NIW", chain: Chain, prior: Prior, replica: Replica, **flags: bool):
        super().__init__(replica.module)
        self.__dict__["niw"] = niw  # not a submodule: parameters() are this learner's own
        self._begin(prior, replica, **flags)
        self._set_state(chain)

    def _begin(self, prior: Prior, replica: Replica, **flags: bool) -> None:
        """The state of an episode before its first step, as plain attributes: a module's own way of setting is slow."""
        shared = self.niw._shared_weights(replica.module)
        self.__dict__.update(
            flags,
            lr=self.niw.lr,
            _prior=prior,
            _replica=replica,
            _shared_replica=Replica(replica.module, shared, copy=False) if shared else NOTHING,
            _cuts=True,  # whether features may be cut off: those of the first step must have been
            _drawn=None,  # a query's network, in closed form
            _forwards=[],  # since the last step
            _support=[],  # what the last step was taken on
            _first=[],  # the first step's methods, inputs and features
            _share=1.0,  # of the KL: less if the loss is divided by a number of episodes
        )

    def _with_graph(self) -> Sequence[int]:
        """The weights whose steps keep their graph."""
        if self.first_order or self.niw.options.second_order == "none":
            return ()
        if self.niw.options.second_order == "all" or self.niw._last_layer is None:  # no forward has shown it yet
            return range(len(self._weights))
        return self.niw._in_last_layer(self._prior.names)

    def _run(self, method: str, query: bool, *args: Any, **kwargs: Any) -> Any:
        """One forward, by a method of the model: chooses its weights, counts its examples, watches the last layer."""
        niw, replica, weights = self.niw, self._replica, None
        call = partial(getattr(self._modules["module"], method), *args, **kwargs)
        closed_form, state = niw.options.inference == "closed_form", self._state
        if closed_form and self._chain.steps and (query or not self._are_among(self._support, args, kwargs, LANGEVIN)):
            state, weights = self._draw()
        own = replica.get()
        plain = not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
        if plain or True not in [w.requires_grad for w in own]:
            return call() if weights is None else run_with(lambda: replica, weights, call)
        last_layer = niw.options.second_order == "last_layer" and not self.first_order
        if last_layer and niw._shown_by not in (method, "__call__"):
            niw._find_last_layer(replica.module, method, lambda model: getattr(model, method)(*args, **kwargs))
        with_graph = self._with_graph() if last_layer and weights is None and niw._can_cut else ()
        given = [a for a in arrays_in((args, kwargs)) if isinstance(a, Tensor) and a.requires_grad]
        shared = self._shared_replica.get() if with_graph else []
        watch, cuts, inputs = self._cuts and 0 < len(with_graph) < len(own) + len(shared), None, None
        if watch and len({id(t) for t in given}) > 1:  # they may depend on each other
            niw._warn(WHOLE)
            watch = False
        if closed_form or watch and not self._chain.steps:
            inputs = Inputs(args, kwargs)
        if watch:
            aliases = [p.view_as(p) for p in shared]  # of this forward alone: earlier steps depend on the weights too
            self._shared_replica.put(aliases)
            behind = [*[w for i, w in enumerate(own) if i not in with_graph], *aliases, *given[:1]]
            cuts = Cuts(behind, self._features_of(method, args, kwargs), partial(run_with, weakref.ref(replica), own))
            layer = replica.module.get_submodule(niw._last_layer)
            layer._forward_pre_hooks[HOOK] = cuts.hook
        try:
            outputs = call() if weights is None else run_with(lambda: replica, weights, call)
        finally:
            if watch:
                del layer._forward_pre_hooks[HOOK]
                self._shared_replica.put(shared)
        if cuts is not None:
            cuts = self._checked(cuts)
        n = batch_size(outputs, (args, kwargs))
        if n is None:
            niw._warn("a forward has no batch dimension, so it counts as one example. If it is not, pass n to adapt.")
        tag = Tag(1 if n is None else n, outputs, [id(t) for t in (*own, *given)])
        state.tags.append(tag)
        seen = outputs if niw.options.curvature.needs_outputs else None
        self._forwards.append(Forward(tag, method, inputs, cuts, weights is not None, seen))
        return outputs

    def _checked(self, cuts: Cuts) -> Optional[Cuts]:
        """The cuts of a forward, if they can be used."""
        if not cuts.calls:
            self.niw._warn(
                f"a forward did not call '{self.niw._last_layer}', which was called last when it was looked for. "
                "Steps on it are of first order; second_order='all' has all second derivatives."
            )
        if cuts.failed:
            self.niw._keep_whole_graphs()
        return cuts if cuts.cuts and not cuts.failed else None

    def _features_of(self, method: str, args: tuple, kwargs: dict) -> List[Optional[Tensor]]:
        """What the last layer got at the first step in the forward of the same method, inputs and turn."""
        found = [first for name, inputs, first in self._first if name == method and inputs.same_as(args, kwargs)]
        before = sum([f.cuts is not None and any(f.cuts.first is own for own in found) for f in self._forwards])
        return found[min(before, len(found) - 1)] if found else []

    def adapt(
        self,
        loss: Tensor,
        first_order: Optional[bool] = None,
        allow_unused: Optional[bool] = None,
        allow_nograd: Optional[bool] = None,
        n: Optional[int] = None,
    ) -> None:
        """
        **Description**

        Takes one Langevin step on the loss and replaces the learner's weights. On an error the learner is left as it
        was, but the loss is spent: compute it anew.

        **Arguments**

        * **loss** (Tensor) - Mean loss over the support.
        * **first_order** (bool, *optional*, default=None) - Whether this step's gradient is a constant to L_0.
            Defaults to the learner's.
        * **allow_unused** (bool, *optional*, default=None) - Whether parameters that the loss does not
            depend on are left alone; their posterior is the prior. Defaults to the learner's.
        * **allow_nograd** (bool, *optional*, default=None) - Whether parameters with
            `requires_grad = False` are left alone. Defaults to the learner's.
        * **n** (int, *optional*, default=None) - The number of examples behind the loss. Defaults to the
            batch sizes of the forwards that it was computed from, or 1 if there was none.
        """
        niw, options, prior, state = self.niw, self.niw.options, self._prior, self._state
        check_count(n)
        niw._check_frozen(self.allow_nograd if allow_nograd is None else allow_nograd)
        check_loss(loss)
        weights = self._replica.get()
        with_graph = () if first_order else self._with_graph()
        chain = self._chain_at(weights, with_graph)
        cuts = [forward.cuts for forward in self._forwards if forward.cuts]
        for forward in self._forwards:
            forward.tag.task = None
        looks = options.curvature.needs_outputs
        first_order = first_order or self.first_order
        gradients = differentiate(loss, weights, cuts, bool(with_graph), looks or not first_order)
        if cuts:
            niw._look_past(gradients, cuts, weights, with_graph)
        forwards = [forward for forward in self._forwards if forward.tag.is_behind()]
        if None in [g if g is None else True for g in gradients]:
            niw._check_same(self._replica.module)
            check_used(prior.names, gradients, self.allow_unused if allow_unused is None else allow_unused)
        if loss.device.type == "cpu":  # elsewhere a look would wait for the device
            check_step(prior.names, loss, gradients)
        if looks:
            chain = chain._replace(observed=self._observe(forwards, weights))
        self._warn_of(forwards, n)
        n = n or sum([forward.tag.n for forward in forwards]) or 1
        spent = len(forwards) == len(self._forwards)  # no other loss will come back to this state
        spent = spent and not self._state_is_used
        release = spent and True in [f.cuts is not None for f in forwards]
        in_place = (release or spent and first_order and not looks) and not self._sensitivity_is_used
        chain = chains.step(chain, gradients, prior, n, options.settings(self.lr), with_graph, in_place)
        for forward in forwards:
            forward.tag.stepped_on = True
            if forward.cuts and chain.steps == 1:
                self._first.append((forward.method, forward.inputs, forward.cuts.inside))
            for cut in forward.cuts.cuts if forward.cuts and chain.steps > 1 else ():
                cut.release()
        if release:
            state.release(with_graph)  # which what is kept of the step's graph would hold
        self._forwards.clear()
        self.__dict__.update(_support=[f.inputs for f in forwards if f.inputs is not None], _drawn=None)
        self._set_state(chain)
        niw._remember(chain, prior, self.lr)

    def _warn_of(self, forwards: List[Forward], n: Optional[int]) -> None:
        """Says once what a step was taken on that it had better not been."""
        if True in [forward.drawn for forward in forwards]:
            self.niw._warn(
                "a step was taken on the loss of a query's network, as its inputs are not those of the step before. In "
                "closed form step on the same support each time, or choose inference='langevin'."
            )
        if self._chain.steps and True in [f.cuts is not None and not f.cuts.first for f in forwards]:
            self.niw._warn(
                "a step was taken on other inputs than the first one's. The last layer's second derivatives then stop "
                "at its features; second_order='all' has them all."
            )
        if n is None and not forwards:
            self.niw._warn(
                "the loss came by no forward of the learner, so it counts as one example. Call the learner itself, or "
                "pass n to adapt."
            )

    def _chain_at(self, weights: List[Tensor], with_graph: Sequence[int]) -> Chain:
        """The chain at the learner's weights: what the user replaced or detached is what iterates move with."""
        theta, origin, sensitivity = (
            [w.detach() for w in weights],
            list(self._chain.origin),
            list(self._chain.sensitivity),
        )
        for i, w in enumerate(weights):
            if len(with_graph) == len(weights) or w is not self._weights[i] or w.is_leaf:
                origin[i], sensitivity[i] = w, None
        return self._chain._replace(theta=theta, origin=origin, sensitivity=sensitivity)

    def _observe(self, forwards: List[Forward], weights: List[Tensor]) -> List[Tensor]:
        """What the curvature strategy sees in the outputs behind a loss, added to what it saw before."""
        if not forwards:
            raise ChainError(
                "curvature='ggn' needs the outputs behind the loss: call the learner itself on the support, "
                "`learner(x)`, before adapt(loss), or choose curvature='sgld'."
            )
        observed = self._chain.observed or [torch.zeros_like(w) for w in weights]
        for forward in forwards:
            for scalar in self.niw.options.curvature.scalars(forward.outputs):
                found = torch.autograd.grad(scalar, weights, retain_graph=True, allow_unused=True)
                observed = [o if g is None else o + g.square() for o, g in zip(observed, found)]
        return observed

    def _set_state(self, chain: Chain) -> None:
        """Makes a chain's last iterate the learner's weights: functions of L_0, by which a backward reaches the KL."""
        state = self._state_of(chain, chain[:3])
        weights = state.weights()
        self._replica.put(weights)
        self.__dict__.update(
            _chain=chain,
            _weights=weights,
            _state=state,
            _state_is_used=False,
            _sensitivity_is_used=chain.moments is not None,
        )

    def _state_of(self, chain: Chain, iterates: tuple) -> State:
        options = self.niw.options
        weight = options.kl_weight * self._share if options.add_kl_gradient and chain.steps else 0.0
        return State(iterates, chain, self._prior, options.curvature, options.settings(self.lr), weight)

    def _mean(self) -> List[Tensor]:
        """The chain's mean as a function of L_0."""
        self.__dict__["_sensitivity_is_used"] = True
        return as_functions_of_prior(*mean_of(self._chain), self._prior.log_variance)

    def _q(self, constant: bool) -> Tuple[List[Tensor], List[Tensor]]:
        """q_i as a function of L_0. In closed form its chain's moments may be `constant`, as the paper has them."""
        options = self.niw.options
        mean = None if constant and options.inference == "closed_form" else self._mean()
        return posterior(self._chain, self._prior, options.curvature, options.settings(self.lr), mean)

    def _draw(self) -> Tuple[State, List[Tensor]]:
        """This step's network from q_i in closed form: one for all queries, with a graph even if the first has none."""
        if self._drawn is None:
            curvature, settings, chain = self.niw.options.curvature, self.niw.options.settings(self.lr), self._chain
            state, mean = self._state, self._weights
            with torch.inference_mode(False), torch.enable_grad():
                if chain.moments is not None:
                    state = self._state_of(chain, chain.moments[:3])
                    mean = state.weights()
                drawn = draw_network(chain, mean, self._prior, curvature, settings)
            self.__dict__["_drawn"] = state, drawn
        return self._drawn

    def posterior(
        self,
        nll: Optional[Callable] = None,
        steps: int = 20,
        lr: Optional[float] = None,
        samples: int = 1,
        n: Optional[int] = None,
    ) -> GaussianWeights:
        """
        **Description**

        Without arguments, q_i from the chain so far, a differentiable function of L_0: its mean is where the chain is,
        or the mean of its iterates; in closed form that of Eq. 13, to which the chain's moments are constants. With
        `nll`, meta-test inference: v(theta) from the mode phi*, after `steps` proximal steps on the support's ELBO
        (Eq. 18), without a graph; at temperature 0, gradient descent on the mean alone.

        **Arguments**

        * **nll** (callable, *optional*, default=None) - Takes a network, `network(x)`, and returns the
            support's mean loss.
        * **steps** (int, *optional*, default=20) - The paper's M_V.
        * **lr** (float, *optional*, default=None) - Step size on the mean loss. Defaults to the wrapper's.
        * **samples** (int, *optional*, default=1) - Networks drawn per step.
        * **n** (int, *optional*, default=None) - The number of support examples. Defaults to the batch size
            that the network was called with.

        **Returns** a `GaussianWeights`.

        **Example**

        ~~~python
        post = learner.posterior(lambda network: loss(network(x), y), steps=20)
        ~~~
        """
        if nll is not None:
            return self._test_posterior(nll, steps, self.lr if lr is None else lr, samples, n)
        self._require_step("posterior")
        return GaussianWeights(self.module, self._prior.names, *self._q(constant=True))

    def _test_posterior(self, nll: Callable, steps: int, lr: float, samples: int, n: Optional[int]) -> GaussianWeights:
        for name, value, least in (("steps", steps, 0), ("samples", samples, 1)):
            check_number(name, value, least, whole=True)
        check_number("lr", lr, 0, strict=True)
        check_count(n)
        mean, variance = self._prior.mode()
        if self.niw.options.temperature == 0:
            variance = [torch.zeros_like(v) for v in variance]
        host = GaussianWeights(self.module, self._prior.names, mean, variance)

        def gradient_at(weights: List[Tensor]) -> Tuple[List[Tensor], int]:
            gradients, seen = host.gradient(nll, weights)
            return gradients, seen if n is None else n

        with torch.no_grad():
            moments = minimise_elbo(gradient_at, mean, variance, lr, steps, samples, self.niw.options.kl_weight)
        return GaussianWeights(self.module, self._prior.names, *moments)

    def kl(self) -> Tensor:
        """
        **Description**

        The expected KL of the episode's posterior, E_q(phi) KL(q_i || p(theta | phi)), in nats, with gradients to L_0.
        In an unmodified loop its gradient is added by itself; call this to look at it, or to write out the
        objective of networks drawn from `posterior()`, in a loop with `add_kl_gradient=False`.

        **Returns** a scalar.
        """
        self._require_step("kl")
        if self.niw.options.temperature == 0:
            raise ChainError("kl: at temperature=0 the posterior is a spike, and its KL is infinite.")
        return expected_kl(self._q(constant=True), self._prior)

    def objective(self, loss: Tensor, n: Optional[int] = None) -> Tensor:
        """
        **Description**

        The episode's objective (Eq. 14) written out, for a wrapper with `add_kl_gradient=False`: the mean query loss
        plus kl_weight * KL / n. The KL moves with the chain's mean, as the loss of a query does that was run by this
        learner.

        **Arguments**

        * **loss** (Tensor) - Mean loss over the query.
        * **n** (int, *optional*, default=None) - The query's number of examples. Defaults to the batch size of the only
            forward since the last step.

        **Returns** a scalar to be back-propagated; with kl_weight=0, the loss itself.
        """
        options = self.niw.options
        if options.add_kl_gradient:
            raise ArgumentError(
                "objective: with add_kl_gradient=True the KL's gradient is added already; build NIW with "
                "add_kl_gradient=False."
            )
        if options.kl_weight == 0:
            return loss
        n = self._query_examples(n)
        self._require_step("objective")
        return objective(loss, expected_kl(self._q(constant=False), self._prior), options.kl_weight, n)

    def _require_step(self, call: str) -> None:
        if self._chain.steps == 0:
            raise ChainError(
                f"{call}: this learner has taken no step, so there is no chain to infer from. Call adapt(loss) first"
                + (", or pass nll for inference from the mode." if call == "posterior" else ".")
            )

    def clone(
        self,
        first_order: Optional[bool] = None,
        allow_unused: Optional[bool] = None,
        allow_nograd: Optional[bool] = None,
    ) -> "NIWLearner":
        """A learner that continues this one's chain, on its own, with a graph to this one's weights."""
        weights = self._replica.get()
        self.__dict__["_state_is_used"] = True  # by the clone's weights
        twin = NIWLearner(
            self.niw,
            self._restarted(weights, self._mean() if self._chain.moments else weights),
            self._prior,
            Replica(self.module, weights),
            **self._flags(first_order, allow_unused, allow_nograd),
        )
        twin.__dict__.update(lr=self.lr, _first=list(self._first), _support=list(self._support))
        return twin

    def _restarted(self, weights: List[Tensor], mean: List[Tensor]) -> Chain:
        """The chain at copies of these weights, which move with them from now on."""
        chain, none = self._chain, [None] * len(weights)
        moments = chain.moments
        if moments is not None:
            moments = moments._replace(mean=[m.detach().clone() for m in mean], origin=mean, sensitivity=none)
        theta = [w.detach().clone() for w in weights]
        return chain._replace(theta=theta, origin=weights, sensitivity=none, moments=moments)

    def __getstate__(self) -> Dict[str, Any]:
        """Without what has a graph, but for the weights."""
        state = self.__dict__.copy()
        if "_chain" in state:
            weights, prior = self._replica.get(), self._prior
            constants = {name: [t.detach() for t in getattr(prior, name)] for name in ("m0", "log_variance")}
            prior = prior._replace(raw_n0=prior.raw_n0.detach(), **constants)
            chain = self._restarted(weights, [m.detach() for m in mean_of(self._chain)[0]])
            state.update(_prior=prior, _chain=chain, _state=None, _weights=None, _drawn=None, _forwards=[], _first=[])
        return state

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_chain" in state:
            self._set_state(self._chain)

    def __deepcopy__(self, memo: dict) -> "NIWLearner":
        """With weights that are leaves: a graph cannot be copied."""
        if "_replica" in self.__dict__:
            memo.update({id(w): w.detach().clone().requires_grad_(w.requires_grad) for w in self._replica.get()})
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin
