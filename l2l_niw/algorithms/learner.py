"""One task's network: a clone of the model, its Langevin chain, and the posterior that follows from it."""

import copy
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from learn2learn.algorithms.base_learner import BaseLearner
from torch import Tensor, nn

from l2l_niw.checks import check_count, check_loss, check_number, check_step, check_used
from l2l_niw.errors import ArgumentError, ChainError, LossError
from l2l_niw.inference import chain as chains
from l2l_niw.inference.chain import Chain
from l2l_niw.inference.elbo import minimise_elbo
from l2l_niw.inference.functional import Replica, batch_size, tensors_in
from l2l_niw.inference.gaussian import GaussianWeights
from l2l_niw.inference.inputs import Inputs
from l2l_niw.inference.last_layer import Cut, cut, cuts_behind, differentiate
from l2l_niw.inference.objective import Episode, Tag, Tagged, expected_kl, objective
from l2l_niw.inference.posterior import draw_network, posterior
from l2l_niw.inference.prior import Prior

if TYPE_CHECKING:
    from l2l_niw.algorithms.niw import NIW

HOOK = "l2l_niw"
WHOLE = (
    "the last layer cannot be told from the body, since the loss depends on the body's weights in other ways too (a "
    "penalty on all weights, a skip connection), or the features depend on tensors that the model was not called with. "
    "So each step keeps its whole graph, as with second_order='all'."
)


class Forward(NamedTuple):
    """
    What a forward leaves for `adapt`: its tag and tagged weights, the method that was called, its inputs, the first
    step's features on them, its cuts, whether it ran a network drawn in closed form, and its outputs.
    """

    tag: Tag
    weights: Sequence[Tensor]
    method: str
    inputs: Optional[Inputs]
    first: Optional[List[Tensor]]
    cuts: List[Cut]
    drawn: bool
    outputs: Any = None


class Plan(NamedTuple):
    """Which weights' steps keep their graph, which do not, and the last layer, if its features are cut off."""

    key: tuple
    kept: Sequence[int]
    constant: Sequence[int]
    layer: Optional[nn.Module]


class NIWLearner(BaseLearner):
    """
    **Description**

    What `NIW.clone()` returns: a network for one task. `learner.parameters()` are the chain's state, plain tensors with
    a graph to L_0 as MAML's have one to the model's parameters. Every forward runs at them, and a loss on its outputs
    sends its gradient, and the KL's, to L_0.

    With inference='closed_form' that is so of support forwards only: a query runs a network drawn from the posterior of
    the chain so far. Say which forward is one by `learner.query(x)`. `learner(x)` is one if its inputs are not those
    that the last step was taken on; where they cannot be compared it is one, and a warning says so once.
    """

    def __init__(self, niw: "NIW", prior: Prior, replica: Replica, **flags: bool):
        super().__init__(replica.module)
        self.__dict__["niw"] = niw  # not a submodule: parameters() are this learner's own
        self._begin(prior, replica, **flags)
        self._start(chains.init(prior.m0))

    def _begin(self, prior: Prior, replica: Replica, **flags: bool) -> None:
        """The state of an episode before its first step, as plain attributes: a module's own way of setting is slow."""
        self.__dict__.update(
            flags,
            lr=self.niw.lr,
            _prior=prior,
            _replica=replica,
            _weights=replica.get(),  # as they were put there
            _drawn=None,  # a query's network, in closed form
            _forwards=[],  # since the last step
            _found=[],  # the tags that a back-propagation came by
            _support=[],  # what the last step was taken on
            _first=[],  # the first step's inputs and features
            _episode=None,
            _whole=False,  # whether steps keep their whole graph
            _planned=None,
        )

    def _start(self, chain: Chain) -> None:
        """Puts a chain's iterates in place, with a graph for the weights whose steps keep one."""
        plan, moments, every = self._plan, chain.moments, range(len(chain.theta))
        kept = () if plan.key == ("last_layer", None) else plan.kept
        theta = [chain.center[i] if i in kept else chain.theta[i] for i in every]
        if moments is not None:
            moments = moments._replace(mean=[moments.center[i] if i in kept else moments.mean[i] for i in every])
        self._set_state(chain._replace(theta=theta, moments=moments), [i for i in every if i not in kept])

    def __getattr__(self, name: str) -> Any:
        """As learn2learn's learners: the model's attribute. Its methods run as `forward` does."""
        found = super().__getattr__(name)
        module = self.__dict__["_modules"].get("module")
        method = callable(found) and getattr(found, "__self__", None) is module is not None
        return partial(self._run, name, False) if method and not hasattr(nn.Module, name) else found

    def forward(self, *args, **kwargs):
        return self._run("__call__", False, *args, **kwargs)

    def query(self, *args, **kwargs):
        """A forward that is said to be the query's, whatever its inputs."""
        return self._run("__call__", True, *args, **kwargs)

    @property
    def _plan(self) -> Plan:
        """What becomes of each weight, as long as the options and the last layer are what they are."""
        niw, every = self.niw, range(len(self._weights))
        key = "none" if self.first_order else niw.options.second_order, niw._last_layer
        if self._planned is None or self._planned.key != key:
            kept, constant, layer = [], list(every), None
            if key[0] == "all" or key == ("last_layer", None):  # no forward has shown it yet
                kept, constant = list(every), []
            elif key[0] == "last_layer":
                kept = [i for i in every if self._prior.names[i] in niw._last_layer_parameters]
                constant = [i for i in every if i not in kept]
                if kept and constant and not niw._last_layer_tied:
                    layer = self._replica.module.get_submodule(niw._last_layer)
            self.__dict__["_planned"] = Plan(key, kept, constant, layer)
        return self._planned

    def _run(self, method: str, query: bool, *args, **kwargs):
        """One forward, by a method of the model: chooses its weights, tags them, and watches the last layer."""
        niw, own, weights = self.niw, self._replica.get(), None
        closed_form = niw.options.inference == "closed_form"
        if closed_form and self._chain.steps and (query or not self._is_support(args, kwargs)):
            weights = self._draw()
        call = partial(getattr(self._modules["module"], method), *args, **kwargs)
        plain = not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
        if plain or True not in [w.requires_grad for w in own]:
            return call() if weights is None else run_with(lambda: self._replica, weights, call)
        if self._plan.key[0] == "last_layer" and niw._shown_by not in (method, "__call__"):
            own = self._split_last_layer(method, args, kwargs, own)
        tag, cuts, plan = Tag(self._found), [], self._plan
        watch = weights is None and plan.layer is not None and not self._whole
        given = {id(t): t for t in tensors_in((args, kwargs)) if t.requires_grad} if watch else {}
        if len(given) > 1:  # they may depend on each other
            watch = niw._warn(WHOLE)
        parts = (plan.constant, plan.kept) if watch else (range(len(own)),)
        tagged = list(own if weights is None else weights)
        for number, part in enumerate(parts):
            for i, w in zip(part, Tagged.apply(tag, number, self._carrier, *[tagged[i] for i in part])):
                tagged[i] = w
        inputs = Inputs(args, kwargs) if closed_form or watch and not self._chain.steps else None
        first, calls = None, []
        if watch:
            first = self._features_of(method, args, kwargs)
            behind_it = [*[tagged[i] for i in plan.constant], *given.values()]
            again = partial(run_with, weakref.ref(self._replica), tagged)
            cut_off = partial(cut, inputs=behind_it, first=first or [], calls=calls, again=again)
            plan.layer._forward_pre_hooks[HOOK] = partial(watch_features, cuts, calls, cut_off)
        try:
            outputs = run_with(lambda: self._replica, tagged, call)
        finally:
            if watch:
                del plan.layer._forward_pre_hooks[HOOK]
        if None in cuts:
            self.__dict__["_whole"], cuts = True, []
            niw._warn(WHOLE)
        n = batch_size(outputs, (args, kwargs))
        if n is None:
            niw._warn("a forward has no batch dimension, so it counts as one example. If it is not, pass n to adapt.")
        if watch and not calls:
            niw._warn(
                f"a forward did not call '{niw._last_layer}', which was called last when it was looked for. "
                "Steps on it are of first order; second_order='all' has all second derivatives."
            )
        tag.n = 1 if n is None else n
        seen = outputs if niw.options.curvature.needs_outputs else None
        self._forwards.append(Forward(tag, tagged, method, inputs, first, cuts, weights is not None, seen))
        return outputs

    def _features_of(self, method: str, args: tuple, kwargs: dict) -> Optional[List[Tensor]]:
        """What the last layer got at the first step in the forward of the same method, inputs and turn."""
        found = [f for name, inputs, f in self._first if name == method and inputs.same_as(args, kwargs)]
        before = sum([f.first is not None and any(f.first is own for own in found) for f in self._forwards])
        return found[min(before, len(found) - 1)] if found else None

    def _split_last_layer(self, method: str, args: tuple, kwargs: dict, own: List[Tensor]) -> List[Tensor]:
        """Once per wrapper, a forward shows the last layer, whose weights then become tensors of their own."""
        self.niw._find_last_layer(self.module, method, lambda model: getattr(model, method)(*args, **kwargs))
        found = [w.clone() if i in self._plan.kept else w for i, w in enumerate(own)]
        self.__dict__["_weights"] = [new if w is old else w for w, old, new in zip(self._weights, own, found)]
        self._replica.put(found)
        return found

    def _is_support(self, args: tuple, kwargs: dict) -> bool:
        """Whether the last step was taken on these inputs."""
        found = [inputs.same_as(args, kwargs) for inputs in self._support]
        if True not in found and None in found:
            self.niw._warn(
                "a forward's inputs cannot be compared with those of the last step, so it counts as a query. Say it by "
                "learner.query(x), or choose inference='langevin', where both are the same."
            )
        return True in found

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
        niw, options, prior, plan = self.niw, self.niw.options, self._prior, self._plan
        check_count(n)
        niw._check_frozen(self.allow_nograd if allow_nograd is None else allow_nograd)
        check_loss(loss)
        weights = self._replica.get()
        chain, cuts = self._chain_at(weights), self._cuts(loss, weights, plan)
        looks = options.curvature.needs_outputs
        self._found.clear()
        try:
            gradients = differentiate(loss, weights, plan.kept, cuts, retain=looks or not chain.steps)
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            raise LossError(
                "adapt: the loss's graph was freed by an earlier backward. Compute the loss anew, from the learner's "
                "present weights, before each adapt."
            ) from error
        forwards = [forward for forward in self._forwards if forward.tag in self._found]
        if any([g is None for g in gradients]):
            niw._check_same(self.module)
            check_used(prior.names, gradients, self.allow_unused if allow_unused is None else allow_unused)
        if first_order:
            gradients = [g if g is None else g.detach() for g in gradients]
        if loss.device.type == "cpu":  # elsewhere a look would wait for the device
            check_step(prior.names, loss, gradients)
        if looks:
            chain = chain._replace(observed=self._observe(forwards, weights, plan.kept, cuts))
        if any([forward.drawn for forward in forwards]):
            niw._warn(
                "a step was taken on the loss of a query's network, as its inputs are not those of the step before. In "
                "closed form step on the same support each time, or choose inference='langevin'."
            )
        if n is None and not forwards:
            niw._warn(
                "the loss came by no forward of the learner, so it counts as one example. Call the learner itself, or "
                "pass n to adapt."
            )
        n = n or sum([forward.tag.n for forward in forwards]) or 1
        chain = chains.step(chain, gradients, prior, n, options.settings(self.lr), plan.kept)
        for forward in forwards:
            forward.tag.stepped_on = True
        for c in cuts if chain.steps > 1 else ():
            c.behind.release()
        if self._episode and (cuts or chain.steps == 1) and len(forwards) == len(self._forwards):
            self._episode.release()  # which what is kept of the step's graph would hold
        self._forwards.clear()
        if chain.steps == 1:
            self._first.extend((f.method, f.inputs, [c.inside for c in f.cuts]) for f in forwards if f.cuts)
        self.__dict__.update(_support=[f.inputs for f in forwards if f.inputs is not None], _drawn=None)
        self._set_state(chain, plan.constant)
        niw._remember(chain, prior, self.lr)

    def _chain_at(self, weights: List[Tensor]) -> Chain:
        """The chain at the learner's weights: what the user replaced or detached is what iterates move with."""
        center, slope = list(self._chain.center), list(self._chain.slope)
        for i, w in enumerate(weights):
            if w is not self._weights[i] or w.is_leaf:
                center[i], slope[i] = w, None
        return self._chain._replace(theta=weights, center=center, slope=slope)

    def _cuts(self, loss: Tensor, weights: List[Tensor], plan: Plan) -> List[Cut]:
        """Where the graph of a step's loss is cut off: nowhere if it would not be exact."""
        cuts = [c for f in self._forwards for c in f.cuts]
        if not cuts:
            return []
        every = [weights, *[f.weights for f in self._forwards]]
        found = cuts_behind(loss, cuts, every, plan.constant)
        if found is None:
            self.niw._warn(WHOLE)
        elif self._chain.steps and any([c.first is None for c in found]):
            self.niw._warn(
                "a step was taken on other inputs than the first one's. The last layer's second derivatives then stop "
                "at its features; second_order='all' has them all."
            )
        return found or []

    def _observe(
        self, forwards: List[Forward], weights: List[Tensor], kept: Sequence[int], cuts: List[Cut]
    ) -> List[Tensor]:
        """What the curvature strategy sees in the outputs behind a loss, added to what it saw before."""
        if not forwards:
            raise ChainError(
                "curvature='ggn' needs the outputs behind the loss: call the learner itself on the support, "
                "`learner(x)`, before adapt(loss), or choose curvature='sgld'."
            )
        observed = self._chain.observed or [torch.zeros_like(w) for w in weights]
        for forward in forwards:
            own = [c for c in cuts if any(c is other for other in forward.cuts)]
            scalars = list(self.niw.options.curvature.scalars(forward.outputs))
            for scalar in scalars:
                found = differentiate(scalar, weights, kept, own, create_graph=False, retain=True)
                observed = [o if g is None else o + g.detach().square() for o, g in zip(observed, found)]
        return observed

    def _set_state(self, chain: Chain, constant: Sequence[int]) -> None:
        """Makes a chain's last iterate the learner's weights: functions of L_0, by which a backward reaches the KL."""
        options, prior = self.niw.options, self._prior
        weight = options.kl_weight if options.add_kl_gradient and chain.steps else 0.0
        common = constant, chain, prior, options.curvature, options.settings(self.lr)
        moments = chain.moments
        episode = Episode(chain.theta, chain.center, chain.slope, *common, 0.0 if moments else weight)
        weights, carrier = episode.follow()
        if len(constant) < len(weights):  # tensors of their own: no step's gradient must come by the carrier
            weights = [w if i in constant else w.clone() for i, w in enumerate(weights)]
        mean = list(weights)
        if moments is not None:
            mean, carrier = Episode(moments.mean, moments.center, moments.slope, *common, weight).follow()
        self._replica.put(weights)
        self.__dict__.update(_chain=chain, _weights=weights, _mean=mean, _carrier=carrier, _episode=episode)

    def _q(self, constant: bool) -> Tuple[List[Tensor], List[Tensor]]:
        """q_i as a function of L_0. In closed form its chain's moments may be `constant`, as the paper has them."""
        options = self.niw.options
        mean = None if constant and options.inference == "closed_form" else self._mean
        return posterior(self._chain, self._prior, options.curvature, options.settings(self.lr), mean)

    def _draw(self) -> List[Tensor]:
        """This step's network from q_i in closed form: one for all queries, with a graph even if the first has none."""
        if self._drawn is None:
            curvature, settings = self.niw.options.curvature, self.niw.options.settings(self.lr)
            with torch.inference_mode(False), torch.enable_grad():
                drawn = draw_network(self._chain, self._mean, self._prior, curvature, settings)
            self.__dict__["_drawn"] = drawn
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

        The expected KL of the episode's posterior, E_q(phi) KL(q_i || p(theta | phi)), in nats: a
        scalar with gradients to L_0. In an unmodified loop its gradient is added by itself; call this to look at it, or
        to write the objective of networks drawn from `posterior()` out, in a loop with `add_kl_gradient=False`.
        """
        self._require_step("kl")
        if self.niw.options.temperature == 0:
            raise ChainError("kl: at temperature=0 the posterior is a spike, and its KL is infinite.")
        return expected_kl(self._q(constant=True), self._prior)

    def objective(self, loss: Tensor, n: Optional[int] = None) -> Tensor:
        """
        **Description**

        The episode's objective (Eq. 14) written out, for a wrapper with `add_kl_gradient=False`: the mean query loss
        plus kl_weight * KL / n, with n the query's number of examples. It may be left out after a single forward.
        The KL moves with the chain's mean, as the loss of a query does that was run by this learner.
        """
        options = self.niw.options
        if options.add_kl_gradient:
            raise ArgumentError(
                "objective: with add_kl_gradient=True the KL's gradient is added already; build NIW with "
                "add_kl_gradient=False."
            )
        if options.kl_weight == 0:
            return loss
        check_count(n)
        if n is None:
            if len(self._forwards) != 1:
                number = "several" if self._forwards else "no"
                raise ArgumentError(f"objective: this learner had {number} forwards since its last step. Pass n.")
            n = self._forwards[0].tag.n
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
        """A learner that goes on from this one's chain, on its own, with a graph to this one's weights."""
        weights = self._replica.get()
        twin = NIWLearner(
            self.niw,
            self._prior,
            Replica(self.module, weights),
            first_order=self.first_order if first_order is None else first_order,
            allow_unused=self.allow_unused if allow_unused is None else allow_unused,
            allow_nograd=self.allow_nograd if allow_nograd is None else allow_nograd,
        )
        twin._start(self._restarted(weights, self._mean))
        twin.__dict__.update(lr=self.lr, _whole=self._whole, _first=list(self._first), _support=list(self._support))
        return twin

    def _restarted(self, weights: List[Tensor], mean: List[Tensor]) -> Chain:
        """The chain at copies of these weights, which move with them from now on."""
        chain, none = self._chain, [None] * len(weights)
        moments = chain.moments
        if moments is not None:
            moments = moments._replace(mean=[m.detach().clone() for m in mean], center=mean, slope=none)
        theta = [w.detach().clone() for w in weights]
        return chain._replace(theta=theta, center=weights, slope=none, moments=moments)

    def __getstate__(self) -> Dict[str, Any]:
        """Without what has a graph, but for the weights."""
        state = self.__dict__.copy()
        if "_chain" in state:
            weights, prior = self._replica.get(), self._prior
            detached = {name: [t.detach() for t in getattr(prior, name)] for name in ("m0", "scale")}
            prior = prior._replace(raw_n0=prior.raw_n0.detach(), **detached)
            chain = self._restarted(weights, [m.detach() for m in self._mean])
            state.update(_prior=prior, _chain=chain, _weights=weights)
            for name in ("_mean", "_carrier", "_episode", "_drawn", "_planned"):
                state[name] = None
            state.update(_forwards=[], _found=[], _first=[])
        return state

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_chain" in state:
            self._start(self._chain)

    def __deepcopy__(self, memo: dict) -> "NIWLearner":
        """With weights that are leaves: a graph cannot be copied."""
        if "_replica" in self.__dict__:
            memo.update({id(w): w.detach().clone().requires_grad_(w.requires_grad) for w in self._replica.get()})
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin


def run_with(reference: Callable[[], Optional[Replica]], weights: Sequence[Tensor], call: Callable) -> Any:
    """Calls a function with these weights in the model, if it is still there, then puts back those that were."""
    replica = reference()
    if replica is None:
        return call()
    own = replica.get()
    replica.put(weights)
    try:
        return call()
    finally:
        replica.put(own)


def watch_features(
    cuts: List[Optional[Cut]],
    calls: List[int],
    cut_off: Callable[[Tensor], Optional[Cut]],
    module: nn.Module,
    args: tuple,
) -> Optional[tuple]:
    """A hook on the last layer, which cuts its features off."""
    if not args or not isinstance(args[0], Tensor) or not args[0].requires_grad:
        calls.append(len(calls))
        return None
    cuts.append(cut_off(args[0]))
    return None if cuts[-1] is None else (cuts[-1].inside, *args[1:])
