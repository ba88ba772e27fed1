"""One task's network: a clone of the model, its Langevin chain, and the posterior that follows from it."""

import copy
import weakref
from typing import TYPE_CHECKING, Callable, List, Optional, Sequence, Tuple

import torch
from learn2learn.algorithms.base_learner import BaseLearner
from torch import Tensor

from l2l_niw.chain import Chain, langevin_step, noise_variance
from l2l_niw.checks import at_hand, check_count, check_frozen, check_loss, check_number, check_step, check_used
from l2l_niw.elbo import minimise_elbo
from l2l_niw.episode import Episode, ModelWeights
from l2l_niw.errors import ArgumentError, ChainError, LossError
from l2l_niw.forwards import REMEMBERED, Forward, Inputs, batch_size, count_data, sum_of_present
from l2l_niw.posterior import Posterior
from l2l_niw.prior import Prior
from l2l_niw.readout import Call, Step, Trace, by_datum, depends_only_on, differentiate, with_ones
from l2l_niw.weights import Replica

if TYPE_CHECKING:
    from l2l_niw.niw import NIW


class NIWLearner(BaseLearner):
    """
    **Description**

    What `NIW.clone()` returns. Before any `adapt` it computes what the model computes. After a step, a
    forward on the inputs that the step was taken on runs at the chain's state, and a forward on any
    other inputs, the query's, runs a network drawn from the posterior q_i of the chain so far; a loss
    on the outputs sends its gradient, and the KL's, to L_0.

    `learner.module` and `learner.parameters()` hold the chain's state.
    """

    def __init__(
        self, niw: "NIW", first_order: bool, allow_unused: bool, allow_nograd: bool, prior: Optional[Prior] = None
    ):
        prior = prior or niw._prior()
        replica = Replica(niw.module, prior.layout)
        super().__init__(replica.module)
        with torch.inference_mode(False), torch.enable_grad():
            weights = list(ModelWeights.apply(prior, *prior.flat))
        replica.put(weights)
        place = niw._traced_readout(prior.layout, first_order)
        self._set(
            niw=niw,  # not a submodule: parameters() are this learner's own
            first_order=first_order,
            allow_unused=allow_unused,
            allow_nograd=allow_nograd,
            _prior=prior,
            _scale=prior.growth() if niw.options.precondition else None,
            _replica=replica,
            _watched=None if place is None else place.name,
            _readout=None if place is None else Trace(place),
            _at_chain=weights,
            _drawn=None,
            _chain=Chain(prior.flat.m0 if niw.options.trace == "full" else prior.flat.m0.detach()),
            _episode=None,
            _observed=None,
            _used=[False] * len(weights),
            _support=[],  # what the last step was taken on
            _recent=[],  # forwards since the last step
        )

    def _set(self, **attributes) -> None:
        """Plain attributes: a module's own way of setting them would be a good part of a small step."""
        self.__dict__.update(attributes)

    def forward(self, *args, **kwargs):
        inputs = Inputs(args, kwargs)
        query = self._episode is not None and not any(inputs.same_as(support) for support in self._support)
        weights = self._draw() if query else self._at_chain
        remember = torch.is_grad_enabled()
        if remember:
            weights = [w.view_as(w) for w in weights]
        self._replica.put(weights)
        try:
            with self._replica.watching(None if query or not remember else self._watched, Call) as calls:
                outputs = self.module(*args, **kwargs)
        finally:
            self._replica.put(self._at_chain)
        if remember:
            n = batch_size(outputs, (args, kwargs))
            kept = outputs if self.niw.options.curvature.needs_outputs else None
            known = len(calls) == 1 and calls[0].gave(outputs)
            forward = Forward(inputs, weights, n, kept, calls[0] if known else None)
            self._set(_recent=[*self._recent[1 - REMEMBERED :], forward])
            if self._episode is not None and n:
                self._episode.query_n = n
        return outputs

    def as_query(self) -> "NIWLearner":
        """This learner, whose forwards until its next step are queries, whatever their inputs: the support's too."""
        self._set(_support=[])
        return self

    def _draw(self) -> List[Tensor]:
        """This step's network from q_i: one for all queries, with its graph even if the first runs without."""
        if self._drawn is None:
            with torch.inference_mode(False), torch.enable_grad():
                self._set(_drawn=self._episode.weights(at_chain=False))
        return self._drawn

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

        Takes one Langevin step on the loss and replaces the learner's weights. The graph behind the
        loss is freed; on an error the learner is left as it was.

        **Arguments**

        * **loss** (Tensor) - Mean loss over the support.
        * **first_order** (bool, *optional*, default=None) - Whether this step has no second derivatives;
            those of a first-order clone have none anyway.
        * **allow_unused** (bool, *optional*, default=None) - Whether parameters that the loss does not
            depend on are left alone; their posterior is the prior. Defaults to the wrapper's.
        * **allow_nograd** (bool, *optional*, default=None) - Whether parameters with
            `requires_grad = False` are left alone. Defaults to the wrapper's.
        * **n** (int, *optional*, default=None) - The number of data behind the loss. Defaults to the
            batch size of the forwards that it was computed from, or 1 if there was none.
        """
        options = self.niw.options
        check_count(n)
        check_frozen(self._prior.layout, self.allow_nograd if allow_nograd is None else allow_nograd)
        check_loss(loss, look=options.curvature.needs_outputs)
        recent = self._recent
        self._set(_recent=[])  # whatever becomes of this loss, its forwards are done with
        gradients, forwards, readout = self._gradients(loss, recent, bool(first_order))
        present = [g is not None for g in gradients]
        check_used(self._prior.layout.names, present, self.allow_unused if allow_unused is None else allow_unused)
        n = count_data(forwards) if n is None else n
        observed = self._observed
        if options.curvature.needs_outputs:
            observed = options.curvature.observe(forwards) + (0.0 if observed is None else observed)
        used = [before or now for before, now in zip(self._used, present)]
        chain, sound = self._step(gradients, n, loss)
        variance = noise_variance(self.niw.lr, options.temperature, n)
        episode = Episode(self._prior, chain, options, observed, used, n, variance, self._scale, sound, readout)
        weights = episode.weights(at_chain=True)
        self._replica.put(weights)
        self._set(_at_chain=weights, _drawn=None, _chain=chain, _episode=episode, _observed=observed, _used=used)
        self._set(_support=[forward.inputs for forward in forwards], _readout=readout)
        self.niw._remember(episode)

    def _gradients(
        self, loss: Tensor, recent: List[Forward], first_order: bool
    ) -> Tuple[List[Optional[Tensor]], List[Forward], Optional[Trace]]:
        """The loss's gradient for each parameter, the forwards that it depends on, and the readout's steps with it."""
        weights, readout = self._at_chain + (self._drawn or []), self._readout
        try:
            if readout is not None and not first_order:
                for forward in recent:
                    call = forward.readout
                    if call and call.gave(call.outputs) and depends_only_on(loss, call.outputs, weights):
                        return self._traced_gradients(loss, forward)
            gradients, forwards = self._plain_gradients(loss, recent, weights)
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            raise LossError(
                "adapt: the loss's graph was freed by an earlier adapt or backward. Compute the loss anew, from "
                "the learner's present weights, before each adapt."
            ) from error
        return gradients, forwards, readout and readout.append(Step(self._matrix(), self.niw.lr))

    def _plain_gradients(
        self, loss: Tensor, recent: List[Forward], weights: List[Tensor]
    ) -> Tuple[List[Optional[Tensor]], List[Forward]]:
        options, count = self.niw.options, len(self._at_chain)
        views = [w for forward in recent for w in forward.weights]
        found = torch.autograd.grad(
            loss,
            weights + views,
            allow_unused=True,
            retain_graph=options.curvature.needs_outputs or None,
            create_graph=options.trace == "full",
        )
        gradients = [sum_of_present(found[i : len(weights) : count]) for i in range(count)]
        starts = range(len(weights), len(found), count)
        behind = [f for f, i in zip(recent, starts) if any(g is not None for g in found[i : i + count])]
        return gradients, behind

    def _traced_gradients(self, loss: Tensor, forward: Forward) -> Tuple[List[Optional[Tensor]], List[Forward], Trace]:
        """The same of a loss that is a function of the readout's outputs; the graph of the first one's is kept."""
        trace, holder = self._readout, weakref.ref(self._replica)  # which, held, would hold itself by its weights
        features, outputs = forward.readout.features, forward.readout.outputs
        keep = trace.pull is None and features.requires_grad
        gradient, hessian, separable = differentiate(loss, outputs)
        found = torch.autograd.grad(
            outputs,
            forward.weights,
            gradient.view_as(outputs),
            allow_unused=True,
            retain_graph=keep or self.niw.options.curvature.needs_outputs or None,
        )

        def pull(slope: Tensor) -> Sequence[Optional[Tensor]]:
            replica, slope = holder(), slope.reshape(features.shape).to(features.dtype)
            before = replica and replica.put(forward.weights)  # for what computes its forward anew, as checkpoints do
            try:
                return torch.autograd.grad(features, forward.weights, slope, allow_unused=True, retain_graph=True)
            finally:
                if replica:
                    replica.put(before)

        inputs = with_ones(by_datum(features.detach()), trace.place.bias is not None)
        zero = torch.zeros_like(gradient[..., :1])  # for a step of first order, and no device has to wait for that
        known = torch.where(separable, gradient, zero), torch.where(separable, hessian, zero.unsqueeze(-1))
        parts = (t.to(self._prior.layout.dtype) for t in (inputs, *known))
        first = trace.data is None or forward.inputs.same_as(trace.data)
        step = Step(self._matrix(), self.niw.lr, *parts, first)
        return list(found), [forward], trace.append(step, forward.inputs, pull if keep else None)

    @torch.no_grad()
    def _matrix(self) -> Tensor:
        """The readout's present weights, in memory of their own."""
        parts = self._prior.layout.split(self._chain.theta, cast=False)
        return torch.clone(self._readout.place.join(parts))

    def _step(self, gradients: List[Optional[Tensor]], n: int, loss: Tensor) -> Tuple[Chain, Optional[Tensor]]:
        """
        The chain after a Langevin step, and whether it is sound, if that is not looked at now. A parameter that the
        loss does not depend on stays where it is.
        """
        options, layout, before = self.niw.options, self._prior.layout, self._chain.theta
        with torch.set_grad_enabled(options.trace == "full"):
            pairs = zip(self._at_chain, gradients)
            gradient = layout.flatten([torch.zeros_like(w) if g is None else g for w, g in pairs])
            temperature = options.temperature if options.curvature.noisy else 0.0
            theta = langevin_step(before, gradient, self.niw.lr, temperature, n, self._scale)
            theta = layout.keep(theta, before, [g is not None for g in gradients])
            chain = self._chain.append(theta, options.burn_in)
        if at_hand(theta):
            check_step(layout, loss, gradient, theta)
            return chain, None
        sound = torch.isfinite(loss.detach() + theta.detach().sum())
        earlier = None if self._episode is None else self._episode.sound
        return chain, sound if earlier is None else sound & earlier

    def posterior(
        self,
        nll: Optional[Callable] = None,
        steps: int = 20,
        lr: Optional[float] = None,
        samples: int = 1,
        n: Optional[int] = None,
    ) -> Posterior:
        """
        **Description**

        Without arguments, q_i of Eq. 13 from the chain so far: a differentiable function of L_0, in
        which the chain's moments are constants. With `nll`, meta-test inference: v(theta) from the
        mode phi*, after `steps` proximal steps on the support's ELBO (Eq. 18), without a graph.

        **Arguments**

        * **nll** (callable, *optional*, default=None) - Takes a network, `network(x)`, and returns the
            support's mean loss.
        * **steps** (int, *optional*, default=20) - The paper's M_V.
        * **lr** (float, *optional*, default=None) - Step size on the mean loss. Defaults to the wrapper's.
        * **samples** (int, *optional*, default=1) - Networks drawn a step.
        * **n** (int, *optional*, default=None) - The number of support data. Defaults to the batch size
            that the network was called with.

        **Example**

        ~~~python
        post = learner.posterior(lambda network: loss(network(x), y), steps=20)
        ~~~
        """
        if nll is not None:
            return self._test_posterior(nll, steps, self.niw.lr if lr is None else lr, samples, n)
        return Posterior(self.module, self._prior.layout, *self._require_episode("posterior").posterior())

    def _test_posterior(self, nll: Callable, steps: int, lr: float, samples: int, n: Optional[int]) -> Posterior:
        for name, value, least in (("steps", steps, 0), ("samples", samples, 1)):
            check_number(name, value, least, whole=True)
        check_number("lr", lr, 0, strict=True)
        check_count(n)
        mean, variance = self._prior.mode()
        host = Posterior(self.module, self._prior.layout, mean, variance)

        def gradient_at(weights: Tensor) -> Tuple[Tensor, int]:
            gradient, seen = host.gradient(nll, weights)
            return gradient, seen if n is None else n

        with torch.no_grad():
            moments = minimise_elbo(gradient_at, mean, variance, lr, steps, samples, self.niw.options.kl_weight)
        return Posterior(self.module, self._prior.layout, *moments)

    def kl(self) -> Tensor:
        """
        **Description**

        The expected KL of the episode's posterior, E_q(phi) KL(q_i || p(theta | phi)), in nats: a
        scalar with gradients to L_0. In an unmodified loop its gradient is added by itself; call this
        to look at it, or to add it in a loop with `auto_kl=False`.
        """
        episode = self._require_episode("kl")
        if self.niw.options.temperature == 0:
            raise ChainError("kl: at temperature=0 the posterior is a spike, and its KL is infinite.")
        return episode.kl()

    def objective(self, loss: Tensor, n: Optional[int] = None) -> Tensor:
        """
        **Description**

        The episode's objective written out, for a wrapper with `auto_kl=False`: the mean query loss
        plus kl_weight * KL / n, with n the query's number of data, given or seen in the last forward.
        """
        options = self.niw.options
        if options.auto_kl:
            raise ArgumentError(
                "objective: with auto_kl=True the KL's gradient is added already; build NIW with auto_kl=False."
            )
        if options.kl_weight == 0:
            return loss
        check_count(n)
        return loss + options.kl_weight * self.kl() / (n or self._episode.query_n)

    def _require_episode(self, call: str) -> Episode:
        if self._episode is None:
            raise ChainError(
                f"{call}: this learner has taken no step, so there is no chain to infer from. Call adapt(loss) first"
                + (", or pass nll for inference from the mode." if call == "posterior" else ".")
            )
        return self._episode

    def clone(
        self,
        first_order: Optional[bool] = None,
        allow_unused: Optional[bool] = None,
        allow_nograd: Optional[bool] = None,
    ) -> "NIWLearner":
        """A learner that goes on from this one's chain, on its own."""
        twin = NIWLearner(
            self.niw,
            self.first_order if first_order is None else first_order,
            self.allow_unused if allow_unused is None else allow_unused,
            self.allow_nograd if allow_nograd is None else allow_nograd,
            self._prior,
        )
        for own, others in zip(twin.modules(), self.modules()):
            own.training = others.training
        if self._episode is not None:
            episode = copy.copy(self._episode)
            weights = episode.weights(at_chain=True)
            twin._replica.put(weights)
            carried = ("_chain", "_observed", "_used", "_support", "_readout")
            twin._set(_episode=episode, _at_chain=weights, **{name: self.__dict__[name] for name in carried})
        return twin
