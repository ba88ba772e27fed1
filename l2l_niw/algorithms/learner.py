"""One task's network: a clone of the model, its Langevin chain, and the posterior that follows from it."""

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from learn2learn.algorithms.base_learner import BaseLearner
from torch import Tensor, nn

from l2l_niw.checks import check_count, check_finite, check_loss, check_number, check_step, check_used
from l2l_niw.errors import ArgumentError, ChainError, LossError
from l2l_niw.inference import chain as chains
from l2l_niw.inference.chain import Chain
from l2l_niw.inference.elbo import minimise_elbo
from l2l_niw.inference.functional import Replica, batch_size, picker
from l2l_niw.inference.gaussian import GaussianWeights
from l2l_niw.inference.inputs import Inputs
from l2l_niw.inference.last_layer import Cut, differentiate, last_called, reaches
from l2l_niw.inference.objective import Follow, ForwardTag, KLGradient, Released, Tag, expected_kl, objective
from l2l_niw.inference.posterior import draw_network, posterior
from l2l_niw.inference.prior import Prior

if TYPE_CHECKING:
    from l2l_niw.algorithms.niw import NIW

HOOK = "l2l_niw"


class Forward(NamedTuple):
    """What a forward leaves for `adapt`: its tag's node, its inputs, where its graph can be cut, and its outputs."""

    node: Any
    inputs: Optional[Inputs]
    cuts: List[Cut]
    outputs: Any = None


class Plan(NamedTuple):
    """Which weights' steps keep their graph, which do not, which are tagged, and the last layer, if it is watched."""

    key: tuple
    kept: Sequence[int]
    constant: List[int]
    tagged: List[int]
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
        self._begin(prior, replica, [w.clone() for w in replica.get()], **flags)
        replica.put(self._start)

    def _begin(self, prior: Prior, replica: Replica, start: List[Tensor], **flags: bool) -> None:
        """The state of an episode before its first step, as plain attributes: a module's own way of setting is slow."""
        scale = None
        if self.niw.options.learn_step_sizes:
            with torch.no_grad():
                scale = [prior.step_scale(i) for i in range(len(start))]
        self.__dict__.update(
            flags,
            lr=self.niw.lr,
            _prior=prior,
            _replica=replica,
            _start=start,  # what iterates move with
            _scale=scale,
            _chain=chains.init(start),
            _drawn=None,  # a query's network, in closed form
            _forwards={},  # since the last step, by tag
            _found=[],  # the tags that a back-propagation came by
            _support=[],  # what the last step was taken on
            _first=[],  # the first step's inputs and features
            _planned=None,
        )
        self._set_state(self._chain, [])

    def __getattr__(self, name: str) -> Any:
        """As learn2learn's learners: the model's attribute. Its methods run as `forward` does."""
        found = super().__getattr__(name)
        module = self.__dict__["_modules"].get("module")
        method = callable(found) and getattr(found, "__self__", None) is module is not None
        return partial(self._run, found, False) if method and not hasattr(nn.Module, name) else found

    def forward(self, *args, **kwargs):
        return self._run(self._modules["module"], False, *args, **kwargs)

    def query(self, *args, **kwargs):
        """A forward that is said to be the query's, whatever its inputs."""
        return self._run(self._modules["module"], True, *args, **kwargs)

    @property
    def _plan(self) -> "Plan":
        """What becomes of each weight, as long as the options and the last layer are what they are."""
        niw = self.niw
        key = niw.options.second_order, niw._last_layer, self.first_order
        if self._planned is None or self._planned.key != key:
            count = range(len(self._start))
            kept: Sequence[int] = ()
            if not self.first_order and key[0] != "none":
                kept = count
                if key[0] == "last_layer" and niw._last_layer is not None:  # else no forward has shown it yet
                    kept = [i for i in count if self._prior.names[i] in niw._last_layer_parameters]
            constant = [i for i in count if i not in kept]
            watched = kept and constant and not niw._last_layer_tied
            layer = self._replica.module.get_submodule(niw._last_layer) if watched else None
            self.__dict__["_planned"] = Plan(key, kept, constant, constant or list(kept), layer)
        return self._planned

    def _run(self, call: Callable, query: bool, *args, **kwargs):
        """One forward: chooses its weights, tags them, and watches the last layer."""
        options, own, drawn = self.niw.options, self._replica.get(), None
        if options.inference == "closed_form" and self._chain.steps:
            drawn = self._draw() if query or not self._is_support(args, kwargs) else None
        if not torch.is_grad_enabled() or True not in [w.requires_grad for w in own]:
            return call(*args, **kwargs) if drawn is None else self._run_with(drawn, own, call, args, kwargs)
        plan, tag = self._plan, ForwardTag(self._found)
        tagged = plan.tagged if drawn is None else range(len(own))
        weights = list(own if drawn is None else drawn)
        views = Tag.apply(tag, self._carrier, *[weights[i] for i in tagged])
        for i, view in zip(tagged, views):
            weights[i] = view
        first = plan.kept and plan.constant or self.niw._last_layer is None
        watched = options.second_order == "last_layer" and not self.first_order and drawn is None
        inputs = first and not self._chain.steps or options.inference == "closed_form"
        forward = Forward(views[0].grad_fn, Inputs(args, kwargs) if inputs else None, [])
        outputs = self._run_with(weights, own, call, args, kwargs, forward if watched else None)
        n = batch_size(outputs, (args, kwargs))
        if n is None:
            self.niw._warn(
                "a forward has no batch dimension, so it counts as one example. If it is not, pass n to adapt."
            )
        tag.n = n or 1
        self._forwards[tag] = forward._replace(outputs=outputs) if options.curvature.needs_outputs else forward
        return outputs

    def _run_with(
        self,
        weights: List[Tensor],
        own: List[Tensor],
        call: Callable,
        args: tuple,
        kwargs: dict,
        forward: Optional[Forward] = None,
    ) -> Any:
        """Runs at these weights, then puts the learner's own back. A `forward` takes note of the last layer's."""
        niw, replica, layer = self.niw, self._replica, None
        replica.put(weights)
        try:
            if forward is not None and niw._last_layer is None:
                outputs, module, features = last_called(replica.module, partial(call, *args, **kwargs))
                niw._set_last_layer(replica.module, module)
                forward.cuts.extend(Cut(x, None) for x in features)
                return outputs
            layer = None if forward is None else self._plan.layer
            if layer is not None:
                layer._forward_pre_hooks[HOOK] = partial(self._watch, forward, self._features_of(args, kwargs))
            return call(*args, **kwargs)
        finally:
            if layer is not None:
                del layer._forward_pre_hooks[HOOK]
            replica.put(own)

    def _features_of(self, args: tuple, kwargs: dict) -> List[Tensor]:
        """What the last layer got on the same inputs before the first step."""
        same = (features for inputs, features in self._first if inputs.same_as(args, kwargs))
        return next(same, [])

    def _watch(self, forward: Forward, first: List[Tensor], module: nn.Module, args: tuple) -> None:
        """A hook on the last layer: notes its features, and the first step's on the same inputs."""
        if args and isinstance(args[0], Tensor) and args[0].requires_grad:
            number = len(forward.cuts)
            match = first[number] if number < len(first) and first[number].shape == args[0].shape else None
            forward.cuts.append(Cut(args[0], match))

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
        was.

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
        niw, prior = self.niw, self._prior
        check_count(n)
        niw._check_frozen(self.allow_nograd if allow_nograd is None else allow_nograd)
        check_loss(loss)
        plan, chain = self._plan, self._chain
        gradients, tags = self._gradients(loss, plan)
        if any([g is None for g in gradients]):
            niw._check_same(self.module)
            check_used(prior.names, gradients, self.allow_unused if allow_unused is None else allow_unused)
        if first_order:
            gradients = [g if g is None else g.detach() for g in gradients]
        settings, forwards = niw.options.settings(self.lr), [self._forwards[tag] for tag in tags]
        if niw.options.curvature.needs_outputs:
            if loss.device.type == "cpu":
                check_finite(loss.detach(), "adapt: the loss")
            chain = chain._replace(observed=self._observe(forwards))
        if n is None and not tags:
            niw._warn(
                "the loss came by no forward of the learner, or by none that its body has a part in, so it counts as "
                "one example. Call the learner itself, or pass n to adapt."
            )
        n = n or sum(tag.n for tag in tags) or 1
        chain = chain._replace(theta=self._replica.get())
        chain = chains.step(chain, gradients, prior, n, settings, plan.kept, self._scale)
        if loss.device.type == "cpu":  # elsewhere a look would wait for the device
            check_step(prior.names, loss, gradients, chain.theta)
        for tag in tags:
            tag.stepped_on = True
        if plan.kept and len(tags) == len(self._forwards):
            for state in self._states:  # which what is kept of the steps' graphs would hold
                state.release()
        self._take(chain, plan.constant)
        self._forwards.clear()
        if forwards and chain.steps == 1:
            self._first.extend((f.inputs, [c.features for c in f.cuts]) for f in forwards if f.inputs is not None)
        self.__dict__["_support"] = [f.inputs for f in forwards if f.inputs is not None]

    def _gradients(self, loss: Tensor, plan: Plan) -> Tuple[List[Optional[Tensor]], List[ForwardTag]]:
        """The loss's gradient for each weight, and the forwards that it was computed from."""
        self._found.clear()
        weights = self._replica.get()
        for i, w in enumerate(weights):
            if w is not self._chain.theta[i] or w.is_leaf:  # replaced or detached by the user: iterates move with it
                self._start[i], self._chain.lag[i] = w, None
        try:
            gradients = differentiate(loss, weights, plan.kept, self._cuts(loss, weights, plan))
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            raise LossError(
                "adapt: the loss's graph was freed by an earlier backward. Compute the loss anew, from the learner's "
                "present weights, before each adapt."
            ) from error
        return gradients, [tag for tag in self._found if tag in self._forwards]

    def _cuts(self, loss: Tensor, weights: List[Tensor], plan: Plan) -> List[Cut]:
        """Where the graph of a step's loss is cut off: nowhere at the first step, and where it would not be exact."""
        if self._chain.steps == 0 or plan.layer is None or self.niw.options.curvature.needs_outputs:
            return []  # a curvature strategy looks at the graph once more
        cuts = [c for forward in self._forwards.values() for c in forward.cuts]
        goal = {weights[i].grad_fn for i in plan.constant}
        goal.update([forward.node for forward in self._forwards.values()])
        stop = {weights[i].grad_fn for i in plan.kept}
        stop.update([c.features.grad_fn for c in cuts])
        if not cuts or reaches(loss, goal, stop):
            return []
        if any([c.first is None for c in cuts]):
            self.niw._warn(
                "a step was taken on other inputs than the first one's. The last layer's second derivatives then stop "
                "at its features; second_order='all' has them all."
            )
        return cuts

    def _observe(self, forwards: List[Forward]) -> List[Tensor]:
        """What the curvature strategy sees in the outputs behind a loss, added to what it saw before."""
        weights, curvature = self._replica.get(), self.niw.options.curvature
        if not forwards:
            raise ChainError(
                "curvature='ggn' needs the outputs behind the loss: call the learner itself on the support, "
                "`learner(x)`, before adapt(loss), or choose curvature='sgld'."
            )
        observed = self._chain.observed or [torch.zeros_like(w) for w in weights]
        for forward in forwards:
            for scalar in curvature.scalars(forward.outputs):
                found = differentiate(scalar, weights)
                observed = [o if g is None else o + g.detach().square() for o, g in zip(observed, found)]
        return observed

    def _take(self, chain: Chain, constant: List[int]) -> None:
        """Makes a chain's last iterate the learner's weights, which move with where they began and with V_0."""
        self._set_state(chain, constant)
        self.__dict__["_drawn"] = None
        self.niw._remember(self._chain, self._prior, self._scale, self.lr)

    def _set_state(self, chain: Chain, constant: List[int]) -> None:
        """What the next forwards' graphs need of a chain, and the tensor by which their backward reaches the KL."""
        options, prior = self.niw.options, self._prior
        weight = options.kl_weight if options.add_kl_gradient and chain.steps else 0.0
        values = chains.constant(chain)
        state = Released(*self._iterates(values.theta, chain.lag, constant))
        kl_state = Released(*([self._posterior_of(values)] if weight else []))
        theta, mean = self._follow(chain.theta, state, constant), []
        if weight:  # the KL's own tensors: a step's gradient in the weights must not come by it
            mean = theta if chain.moments is None else self._mean(chain, constant)
            kept = [i for i in range(len(theta)) if i not in constant]
            theta = list(self._follow(chain.theta, state, constant))
            for i in kept:
                theta[i] = theta[i].clone()
        self._replica.put(theta)
        carrier = KLGradient.apply(kl_state, prior, weight, *prior.m0, *prior.log_variance, prior.raw_n0, *mean)
        self.__dict__.update(_states=(state, kl_state), _carrier=carrier, _chain=chain._replace(theta=theta))

    def _iterates(self, theta: Sequence[Tensor], lag: Sequence[Any], constant: Sequence[int]) -> tuple:
        """What the slopes of iterates without a graph are computed from; nothing where V_0 has no part in them."""
        options, pick = self.niw.options, picker(tuple(constant))
        if options.learn_step_sizes or options.inference == "langevin" and options.temperature > 0:
            return pick(theta), list(map(Tensor.detach, pick(self._start))), pick(lag)
        return ()

    def _follow(self, theta: List[Tensor], state: Released, constant: List[int]) -> List[Tensor]:
        """Iterates as functions of L_0, where they have no graph of their own."""
        if not constant:
            return theta
        pick, theta = picker(tuple(constant)), list(theta)
        values = list(map(Tensor.detach, pick(theta)))
        found = Follow.apply(values, state, *pick(self._start), *pick(self._prior.log_variance))
        for i, own in zip(constant, found):
            theta[i] = own
        return theta

    def _posterior_of(self, chain: Chain) -> Callable[..., Tuple[List[Tensor], List[Tensor]]]:
        """q_i as a function of L_0, to which the chain's moments are constants."""
        settings, curvature = self.niw.options.settings(self.lr), self.niw.options.curvature
        return partial(posterior, chain, scale=self._scale, curvature=curvature, settings=settings)

    def _mean(self, chain: Chain, constant: List[int]) -> List[Tensor]:
        """The chain's mean, as a function of L_0."""
        moments = chain.moments
        if moments is None:
            return chain.theta
        values = [t.detach() for t in moments.mean]
        return self._follow(moments.mean, Released(*self._iterates(values, moments.lag, constant)), constant)

    def _q(self) -> Tuple[List[Tensor], List[Tensor]]:
        """q_i as a function of L_0; in closed form, as printed, the chain's moments are constants to it."""
        mean = None
        if self.niw.options.inference == "langevin":
            mean = self._mean(self._chain, self._plan.constant)
        return self._posterior_of(chains.constant(self._chain))(self._prior, mean=mean)

    def _kl_of_query(self) -> Tensor:
        """The KL as a query's backward adds it: through the chain's mean too, as the query's loss goes."""
        mean = self._mean(self._chain, self._plan.constant)
        return expected_kl(self._posterior_of(chains.constant(self._chain))(self._prior, mean=mean), self._prior)

    def _draw(self) -> List[Tensor]:
        """This step's network from q_i in closed form: one for all queries, with a graph even if the first has none."""
        if self._drawn is None:
            options = self.niw.options
            with torch.inference_mode(False), torch.enable_grad():
                mean, settings = self._mean(self._chain, self._plan.constant), options.settings(self.lr)
                drawn = draw_network(self._chain, mean, self._prior, self._scale, options.curvature, settings)
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
        return GaussianWeights(
            self.module,
            self._prior.names,
            *self._q(),
        )

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
        scalar with gradients to L_0. In an unmodified loop its gradient is added by itself; call this
        to look at it, or to add it in a loop with `add_kl_gradient=False`.
        """
        self._require_step("kl")
        if self.niw.options.temperature == 0:
            raise ChainError("kl: at temperature=0 the posterior is a spike, and its KL is infinite.")
        return expected_kl(self._q(), self._prior)

    def objective(self, loss: Tensor, n: Optional[int] = None) -> Tensor:
        """
        **Description**

        The episode's objective (Eq. 14) written out, for a wrapper with `add_kl_gradient=False`: the mean query loss
        plus kl_weight * KL / n, with n the query's number of examples. It may be left out after a single forward.
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
            n = next(iter(self._forwards)).n
        return objective(loss, self.kl(), options.kl_weight, n)

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
        twin = NIWLearner(
            self.niw,
            self._prior,
            Replica(self.module, self._prior.names),
            first_order=self.first_order if first_order is None else first_order,
            allow_unused=self.allow_unused if allow_unused is None else allow_unused,
            allow_nograd=self.allow_nograd if allow_nograd is None else allow_nograd,
        )
        chain = chains.restarted(self._chain, twin._start)
        twin.__dict__.update(lr=self.lr, _chain=chain, _first=list(self._first), _support=list(self._support))
        twin._set_state(chain, [])
        return twin

    def __getstate__(self) -> Dict[str, Any]:
        """Without what has a graph, but for the weights."""
        state = self.__dict__.copy()
        if "_chain" in state:
            chain = chains.restarted(self._chain, self._replica.get())
            state.update(_chain=chain, _start=list(chain.theta), _carrier=None, _states=(), _drawn=None)
            state.update(_forwards={}, _found=[], _support=[], _first=[], _planned=None)
        return state

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_chain" in state:
            self._set_state(self._chain, [])

    def __deepcopy__(self, memo: dict) -> "NIWLearner":
        """With weights that are leaves: a graph cannot be copied."""
        if "_replica" in self.__dict__:
            memo.update({id(w): w.detach().clone().requires_grad_(w.requires_grad) for w in self._replica.get()})
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin
