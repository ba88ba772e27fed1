"""One task's network: a clone of the model, its Langevin chain, and the posterior that follows from it."""

from typing import TYPE_CHECKING, Callable, List, Optional, Tuple

import torch
from learn2learn.algorithms.base_learner import BaseLearner
from learn2learn.utils import clone_module
from torch import Tensor

from l2l_niw.chain import Chain, langevin_step, noise_variance
from l2l_niw.elbo import minimise_elbo
from l2l_niw.episode import Episode
from l2l_niw.errors import ArgumentError, ChainError, LossError
from l2l_niw.posterior import Posterior, batch_size
from l2l_niw.weights import find_slots, put

if TYPE_CHECKING:
    from l2l_niw.niw import NIW


class NIWLearner(BaseLearner):
    """
    **Description**

    What `NIW.clone()` returns. Before any `adapt` it computes what the model computes. After a step, a
    forward on inputs that it has adapted to runs at the chain's state, and a forward on any other
    inputs, the query's, runs a network drawn from the posterior q_i of the chain so far; a loss on the
    outputs sends its gradient, and the KL's, to L_0.
    """

    def __init__(self, niw: "NIW", allow_unused: bool, allow_nograd: bool):
        super().__init__(clone_module(niw.module))
        self.__dict__["niw"] = niw  # not a submodule: parameters() are this learner's own
        self.allow_unused, self.allow_nograd = allow_unused, allow_nograd
        self._prior = niw._prior()
        self._slots = find_slots(self.module, self._prior.layout)
        held = {i: owner._parameters[key] for owner, key, i in self._slots}
        self._at_chain: List[Tensor] = [held[i] for i in range(len(held))]
        self._drawn: Optional[List[Tensor]] = None  # made when a query comes
        self._chain: Optional[Chain] = None
        self._episode: Optional[Episode] = None
        self._observed: Optional[Tensor] = None
        self._used = [False] * len(held)
        self._support: List[tuple] = []  # inputs of the forwards that were adapted to
        self._recent: List[tuple] = []  # inputs of the forwards since the last step
        self._outputs: Optional[Tensor] = None
        self._n: Optional[int] = None

    def forward(self, *args, **kwargs):
        if self._episode is not None:
            self._hold(any(_same(args, inputs) for inputs in self._support))
        outputs = self.module(*args, **kwargs)
        self._n = batch_size(outputs, args)
        if self._episode is not None:
            self._episode.query_n = self._n or 1
        if torch.is_grad_enabled():
            self._recent.append(args)
            self._outputs = outputs if self.niw.curvature.needs_outputs else None
        return outputs

    def _hold(self, at_chain: bool) -> None:
        """Puts the chain's state, or the draw from q_i, into the module."""
        if not at_chain and self._drawn is None:
            self._drawn = self._prior.layout.split(self._episode.weights(at_chain=False))
        put(self._slots, self._at_chain if at_chain else self._drawn)

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
        * **first_order** (bool, *optional*, default=None) - MAML's; without effect, no graph is kept.
        * **allow_unused** (bool, *optional*, default=None) - Whether parameters that the loss does not
            depend on are left alone; their posterior is the prior. Defaults to the wrapper's.
        * **allow_nograd** (bool, *optional*, default=None) - Whether parameters with
            `requires_grad = False` are left alone. Defaults to the wrapper's.
        * **n** (int, *optional*, default=None) - The number of data behind the loss. Defaults to the
            batch size of the learner's last forward, or 1 if it was not called.
        """
        n = _checked_count(n) or self._n or 1
        self._check_nograd(self.allow_nograd if allow_nograd is None else allow_nograd)
        _check_loss(loss)
        observed = self.niw.curvature.observe(self._outputs, self._held())
        gradients = self._gradients(loss, self.allow_unused if allow_unused is None else allow_unused)
        if observed is not None:
            self._observed = observed if self._observed is None else self._observed + observed
        self._used = [used or g is not None for used, g in zip(self._used, gradients)]
        self._support += [args for args in self._recent if not any(_same(args, old) for old in self._support)]
        self._recent, self._outputs = [], None
        self._step(gradients, n)

    def _held(self) -> List[Tensor]:
        held = {i: owner._parameters[key] for owner, key, i in self._slots}
        return [held[i] for i in range(len(held))]

    def _check_nograd(self, allow_nograd: bool) -> None:
        if allow_nograd:
            return
        for name, p in self.niw.module.named_parameters():
            if not p.requires_grad:
                raise ArgumentError(
                    f"adapt: parameter '{name}' has requires_grad=False. Pass allow_nograd=True to NIW or to "
                    "adapt to keep frozen parameters as they are."
                )

    def _gradients(self, loss: Tensor, allow_unused: bool) -> List[Optional[Tensor]]:
        """The loss's gradient for each parameter, at the chain's state or at the draw, wherever it was computed."""
        sets = [self._at_chain] if self._drawn is None else [self._at_chain, self._drawn]
        try:
            flat = torch.autograd.grad(
                loss, [w for weights in sets for w in weights], allow_unused=True, create_graph=self.niw.trace == "full"
            )
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            raise LossError(
                "adapt: the loss's graph was freed by an earlier adapt or backward. Compute the loss anew, from "
                "the learner's present weights, before each adapt."
            ) from error
        k = len(self._at_chain)
        gradients = [_sum_of_present(flat[i::k]) for i in range(k)]
        _check_gradients(self._prior.layout.names, gradients, allow_unused)
        return gradients

    def _step(self, gradients: List[Optional[Tensor]], n: int) -> None:
        """The Langevin step, the moments, and the module's new weights."""
        niw, prior = self.niw, self._prior
        with torch.set_grad_enabled(niw.trace == "full"):
            if self._chain is None:
                self._chain = Chain(prior.flat().m0)
            gradient = prior.layout.flatten(
                [torch.zeros_like(w) if g is None else g for w, g in zip(self._at_chain, gradients)]
            )
            temperature = niw.temperature if niw.curvature.noisy else 0.0
            theta = langevin_step(self._chain.theta, gradient, niw.lr, temperature, n)
            self._chain = self._chain.append(theta, niw.burn_in)
        self._episode = Episode(
            prior, self._chain, niw.curvature, self._observed, self._used,
            pseudo=noise_variance(niw.lr, niw.temperature, n), temperature=niw.temperature,
            precision_range=niw.precision_range, trace=niw.trace, kl_weight=niw.kl_weight if niw.auto_kl else 0.0,
        )
        niw._remember(self._episode)
        self._at_chain, self._drawn = prior.layout.split(self._episode.weights(at_chain=True)), None
        self._hold(at_chain=True)

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
            return self._test_posterior(nll, steps, self.niw.lr if lr is None else lr, samples, _checked_count(n))
        mean, variance = self._require_episode("posterior").posterior(self._prior.flat())
        return Posterior(self.module, self._prior.layout, mean, variance)

    def _test_posterior(self, nll: Callable, steps: int, lr: float, samples: int, n: Optional[int]) -> Posterior:
        if steps < 0 or samples < 1 or not lr > 0:
            raise ArgumentError(f"posterior: steps={steps}, samples={samples}, lr={lr}; give steps >= 0, samples >= 1, "
                                "and a positive lr.")
        prior, layout = self._prior, self._prior.layout
        with torch.no_grad():
            mean, variance = prior.mode(prior.flat())
        seen: List[int] = []
        host = Posterior(self.module, layout, mean, variance)

        def loss(weights: Tensor) -> Tuple[Tensor, int]:
            network = host.network(layout.named(weights))

            def counting(*args, **kwargs):
                outputs = network(*args, **kwargs)
                seen[:] = [batch_size(outputs, args) or 1]
                return outputs

            value = nll(counting)
            _check_loss(value, "posterior: nll returned a loss that")
            return value, n or (seen[0] if seen else 1)

        with torch.no_grad():
            mean, variance = minimise_elbo(loss, mean, variance, lr, steps, samples, self.niw.kl_weight)
        return Posterior(self.module, layout, mean, variance)

    def kl(self) -> Tensor:
        """
        **Description**

        The expected KL of the episode's posterior, E_q(phi) KL(q_i || p(theta | phi)), in nats: a
        scalar with gradients to L_0. In an unmodified loop its gradient is added by itself; call this
        to look at it, or to add it in a loop with `auto_kl=False`.
        """
        return self._require_episode("kl").kl(self._prior.flat())

    def objective(self, loss: Tensor, n: Optional[int] = None) -> Tensor:
        """
        **Description**

        The episode's objective written out, for a wrapper with `auto_kl=False`: the mean query loss
        plus kl_weight * KL / n, with n the query's number of data (seen in the last forward, or given).
        """
        if self.niw.auto_kl:
            raise ArgumentError("objective: NIW was built with auto_kl=True, so the KL's gradient is added already; "
                                "build it with auto_kl=False to write the objective out.")
        return loss + self.niw.kl_weight * self.kl() / (_checked_count(n) or self._n or 1)

    def _require_episode(self, call: str) -> Episode:
        if self._episode is None:
            raise ChainError(
                f"{call}: this learner has taken no step, so there is no chain to infer from. Call adapt(loss) first"
                + (", or pass nll for inference from the mode." if call == "posterior" else ".")
            )
        return self._episode

    def clone(self) -> "NIWLearner":
        """A learner that goes on from this one's chain, on its own."""
        twin = NIWLearner(self.niw, self.allow_unused, self.allow_nograd)
        if self._episode is not None:
            for name in ("_chain", "_episode", "_observed", "_n", "_at_chain", "_drawn"):
                twin.__dict__[name] = self.__dict__[name]
            twin._used, twin._support = list(self._used), list(self._support)
            twin._hold(at_chain=True)
        return twin


def _same(args: tuple, others: tuple) -> bool:
    """Whether two calls got equal inputs; identity is looked at first, since it costs nothing."""
    return len(args) == len(others) and all(
        a is b or (isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b))
        for a, b in zip(args, others)
    )


def _sum_of_present(gradients: Tuple[Optional[Tensor], ...]) -> Optional[Tensor]:
    present = [g for g in gradients if g is not None]
    return sum(present[1:], present[0]) if present else None


def _check_gradients(names: List[str], gradients: List[Optional[Tensor]], allow_unused: bool) -> None:
    unused = [name for name, g in zip(names, gradients) if g is None]
    if len(unused) == len(names):
        raise LossError(
            "adapt: the loss does not depend on this learner's weights. Compute it from this learner's "
            "outputs, `learner(x)`, after its last adapt."
        )
    if unused and not allow_unused:
        raise LossError(
            f"adapt: the loss does not depend on parameter '{unused[0]}' ({len(unused)} in all). Pass "
            "allow_unused=True to NIW or to adapt to leave such parameters alone."
        )
    for name, g in zip(names, gradients):
        if g is not None and not torch.isfinite(g.sum()):
            raise LossError(
                f"adapt: the gradient of parameter '{name}' is not finite. Lower lr, or the temperature, or "
                "check the inputs."
            )


def _checked_count(n: Optional[int]) -> Optional[int]:
    if n is not None and n < 1:
        raise ArgumentError(f"n, the number of data behind the loss, must be at least 1, got {n}.")
    return n


def _check_loss(loss: Tensor, what: str = "adapt: the loss") -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise LossError(f"{what} must be a scalar tensor; average it over the support first.")
    if not loss.requires_grad:
        raise LossError(
            f"{what} has no graph. Compute it from this learner's outputs, outside of torch.no_grad()."
        )
    if not torch.isfinite(loss):
        raise LossError(
            f"{what} is {loss.item()}. An empty support set gives nan; else lower lr or the temperature."
        )
