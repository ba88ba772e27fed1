"""One episode: a clone of the model, its Langevin chain, and the posterior that follows from it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, List, Optional, Tuple

import torch
from learn2learn.algorithms.base_learner import BaseLearner
from learn2learn.utils import clone_module
from torch import Tensor

from l2l_niw.chain import Chain, langevin_step, noise_variance
from l2l_niw.closed_form import draw, episode_posterior, expected_kl
from l2l_niw.elbo import minimise_elbo
from l2l_niw.errors import ArgumentError, ChainError, LossError
from l2l_niw.posterior import Posterior, batch_size
from l2l_niw.prior import FlatPrior, Prior
from l2l_niw.weights import Layout, find_slots, put
from l2l_niw.wishart import mode

if TYPE_CHECKING:
    from l2l_niw.niw import NIW


@dataclass
class Episode:
    """What q_i and a draw from it need besides L_0: the chain's mean, its A, and a deviation."""

    m_bar: Tensor
    a: Tensor
    offset: Tensor
    clamped: Tensor
    n: int

    def mean_given(self, m0: Tensor, trace: str) -> Tensor:
        """The chain's mean: a constant, or for trace='first' a constant distance from m_0."""
        return self.m_bar + (m0 - m0.detach()) if trace == "first" else self.m_bar


class DrawWeights(torch.autograd.Function):
    """
    **Description**

    The weights that a learner's module holds after a step, as a function of L_0. Nothing but their
    values is computed until a query loss is back-propagated; then one pass gives L_0 the gradient of
    that loss and, the first time, that of kl_weight * KL / n.
    """

    @staticmethod
    def forward(ctx, prior: Prior, episode: Episode, niw: "NIW", m0: Tensor, p0: Tensor, *leaves: Tensor) -> Tensor:
        ctx.prior, ctx.episode, ctx.trace = prior, episode, niw.trace
        ctx.kl_weight = niw.kl_weight if niw.auto_kl else 0.0
        return draw(m0, p0, episode.m_bar, episode.a, episode.offset)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        prior, e = ctx.prior, ctx.episode
        with torch.enable_grad():
            flat = FlatPrior(*(t.detach().requires_grad_() for t in prior.flat()))
            m_bar = e.mean_given(flat.m0, ctx.trace)
            p0 = prior.precision(flat)
            values, gradients = [draw(flat.m0, p0, m_bar, e.a, e.offset)], [gradient]
            if ctx.kl_weight:
                values.append(episode_kl(prior, flat, m_bar, e.a))
                gradients.append(torch.full_like(values[1], ctx.kl_weight / e.n))
                ctx.kl_weight = 0.0
            g_m0, g_log_v0, g_raw = torch.autograd.grad(values, flat, gradients)
        split = prior.layout.split
        return (None, None, None, None, None, *split(g_m0), *split(g_log_v0), g_raw)


def episode_kl(prior: Prior, flat: FlatPrior, m_bar: Tensor, a: Tensor) -> Tensor:
    """The expected KL of the episode's posterior, as a function of L_0."""
    mean, variance = episode_posterior(flat.m0, prior.precision(flat), m_bar, a)
    return expected_kl(mean, variance, flat.m0, flat.log_v0, prior.degrees(flat.raw_n0), prior.wishart)


class NIWLearner(BaseLearner):
    """
    **Description**

    What `NIW.clone()` returns: one task's network. Before any `adapt` it computes what the model
    computes. After a step every forward runs a network drawn from the posterior q_i of the chain so
    far, and a loss on its outputs sends its gradient, and the KL's, to L_0.
    """

    def __init__(self, niw: "NIW"):
        super().__init__(clone_module(niw.module))
        self.__dict__["niw"] = niw  # not a submodule: parameters() are this learner's own
        self._prior = niw._prior()
        self._slots = find_slots(self.module, self._prior.layout)
        held = {i: owner._parameters[key] for owner, key, i in self._slots}
        self._weights: List[Tensor] = [held[i] for i in range(len(held))]
        self._start: Optional[Tuple[Tensor, Tensor]] = None  # m_0 and P_0 when the chain began
        self._chain: Optional[Chain] = None
        self._episode: Optional[Episode] = None
        self._observed: Optional[Tensor] = None
        self._used = [False] * len(held)
        self._n: Optional[int] = None
        self._outputs: Optional[Tensor] = None

    def forward(self, *args, **kwargs):
        outputs = self.module(*args, **kwargs)
        self._n = batch_size(outputs, args)
        if self._episode is not None and self._n:
            self._episode.n = self._n
        if self.niw.curvature.needs_outputs:
            self._outputs = outputs
        return outputs

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
        niw = self.niw
        n = _checked_count(n) or self._n or 1
        self._check_nograd(niw.allow_nograd if allow_nograd is None else allow_nograd)
        _check_loss(loss)
        observed = niw.curvature.observe(self._outputs, self._weights)
        gradients = self._gradients(loss, niw.allow_unused if allow_unused is None else allow_unused)
        self._used = [used or g is not None for used, g in zip(self._used, gradients)]
        self._outputs = None
        if observed is not None:
            self._observed = observed if self._observed is None else self._observed + observed
        self._step(gradients, n)

    def _check_nograd(self, allow_nograd: bool) -> None:
        if allow_nograd:
            return
        for name, p in self.niw.module.named_parameters():
            if not p.requires_grad:
                raise ArgumentError(
                    f"adapt: parameter '{name}' has requires_grad=False. Pass allow_nograd=True to NIW or to "
                    "adapt to keep frozen parameters as they are."
                )

    def _gradients(self, loss: Tensor, allow_unused: bool) -> Tuple[Optional[Tensor], ...]:
        try:
            gradients = torch.autograd.grad(
                loss, self._weights, allow_unused=True, create_graph=self.niw.trace == "full"
            )
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            raise LossError(
                "adapt: the loss's graph was freed by an earlier adapt or backward. Compute the loss anew, from "
                "the learner's present weights, before each adapt."
            ) from error
        names = self._prior.layout.names
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
        return gradients

    def _step(self, gradients: Tuple[Optional[Tensor], ...], n: int) -> None:
        """The Langevin step, the moments, A, and the module's new weights."""
        niw, layout = self.niw, self._prior.layout
        traced = niw.trace == "full"
        with torch.set_grad_enabled(traced):
            if self._start is None:
                flat = self._prior.flat()
                self._start = flat.m0, self._prior.precision(flat)
                self._chain = Chain(flat.m0)
            gradient = layout.flatten([torch.zeros_like(w) if g is None else g
                                       for w, g in zip(self._weights, gradients)])
            temperature = niw.temperature if niw.curvature.noisy else 0.0
            theta = langevin_step(self._chain.theta, gradient, niw.lr, temperature, n)
            self._chain = self._chain.append(theta, niw.burn_in)
            self._episode = self._summarise(n)
            if traced:
                e = self._episode
                weights = draw(*self._start, e.m_bar, e.a, e.offset)
        if not traced:
            weights = DrawWeights.apply(self._prior, self._episode, niw, *self._start, *self._prior.leaves)
        self._weights = layout.split(weights)
        put(self._slots, self._weights)
        niw._last_episode = self._episode, layout

    def _summarise(self, n: int) -> Episode:
        niw, chain = self.niw, self._chain
        floor, ceiling = niw.precision_range
        pseudo = noise_variance(niw.lr, niw.temperature, n)
        raw = niw.curvature.precision(chain, self._observed, pseudo, niw.temperature).detach()
        if not all(self._used):
            for part, used in zip(raw.split(self._prior.layout.sizes), self._used):
                part.mul_(float(used))
        a = raw.clamp(floor, ceiling)
        return Episode(chain.mean, a, niw.curvature.offset(chain, a), raw != a, n)

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
        e = self._require_episode("posterior")
        flat = self._prior.flat()
        m_bar = e.mean_given(flat.m0, self.niw.trace)
        mean, variance = episode_posterior(flat.m0, self._prior.precision(flat), m_bar, e.a)
        return Posterior(self.module, self._prior.layout, mean, variance)

    def _test_posterior(self, nll: Callable, steps: int, lr: float, samples: int, n: Optional[int]) -> Posterior:
        if steps < 0 or samples < 1 or not lr > 0:
            raise ArgumentError(f"posterior: steps={steps}, samples={samples}, lr={lr}; give steps >= 0, samples >= 1, "
                                "and a positive lr.")
        prior, layout = self._prior, self._prior.layout
        with torch.no_grad():
            flat = prior.flat()
            mean, variance = mode(flat.m0, flat.log_v0, prior.degrees(flat.raw_n0), prior.wishart)
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
        e = self._require_episode("kl")
        flat = self._prior.flat()
        return episode_kl(self._prior, flat, e.mean_given(flat.m0, self.niw.trace), e.a)

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
        twin = NIWLearner(self.niw)
        if self._episode is not None:
            for name in ("_start", "_chain", "_episode", "_observed", "_n"):
                twin.__dict__[name] = self.__dict__[name]
            twin._used = list(self._used)
            twin._weights = list(self._weights)
            put(twin._slots, twin._weights)
        return twin


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
