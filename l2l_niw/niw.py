"""The wrapper: a model whose weights are random variables, with learn2learn's API."""

import copy
import math
import sys
from typing import Any, Dict, Mapping, Optional, Tuple, Union

import torch
from learn2learn.algorithms.base_learner import BaseLearner
from torch import Tensor, nn

from l2l_niw import readout, vectors
from l2l_niw.chain import noise_variance
from l2l_niw.checks import at_hand, check_degrees, check_number
from l2l_niw.closed_form import adapted_share
from l2l_niw.curvature import Curvature, make_curvature
from l2l_niw.episode import Episode
from l2l_niw.errors import ChainError, CheckpointError, ModelError
from l2l_niw.learner import NIWLearner
from l2l_niw.options import Options
from l2l_niw.posterior import Posterior
from l2l_niw.prior import Prior
from l2l_niw.weights import Layout, check_parameters, key_differences
from l2l_niw.wishart import initial_degrees, lower_bound, to_raw


class NIW(BaseLearner):
    """
    **Description**

    NIW-Meta with the API of `learn2learn.algorithms.MAML`: every task's weights are drawn from a
    learned Normal-Inverse-Wishart posterior, and each episode is solved in closed form from a short
    Langevin chain, so that no graph of inner steps is kept.

    `niw.module` is the model itself, and its parameters are m_0. Beside them stand `log_variance`,
    log(V_0 / n_0), one tensor a parameter, and `raw_n0`, behind n_0. In an unmodified MAML loop
    (`clone`, `adapt`, query loss, `backward`) every parameter of `niw.parameters()` receives its
    gradient of mean query loss + kl_weight * KL / n.

    **Arguments**

    * **model** (Module) - Module to be wrapped.
    * **lr** (float) - Step size of the chain: MAML's fast adaptation learning rate.
    * **first_order** (bool, *optional*, default=False) - Whether to leave the second derivatives of
        trace='readout' out. Without effect on the other traces.
    * **allow_unused** (bool, *optional*, default=None) - Whether to allow parameters that the loss does
        not depend on. Defaults to `allow_nograd`.
    * **allow_nograd** (bool, *optional*, default=False) - Whether to allow adaptation with parameters
        that have `requires_grad = False`; they stay as they are.
    * **burn_in** (int, *optional*, default=None) - Steps that are left out of the chain's moments. Until it
        is over the last iterate alone stands for the chain, and by default always: a few cold steps
        are still on their way, and the mean of several lags behind. The paper has 2, of 5 steps.
    * **temperature** (float, *optional*, default=1e-4) - The chain samples exp(-l_i / T), and the episode
        minimises E[l_i] + T KL. A wide posterior costs accuracy while a network is being learned:
        on Omniglot T = 1e-3 cost a point, 1e-5 none. Raise it for wide predictive bands; 0 makes
        NIW a point estimate, first-order MAML if not preconditioned.
    * **prior_precision** (float, *optional*, default=None) - P_0 = n_0 / V_0 at the start. Defaults to
        0.01 / (2 lr T), a hundredth of what the chain's own noise would have with one datum: tasks
        start free to adapt, whatever lr and T, and P_0 learns where they need not.
    * **n0** (float, *optional*, default=None) - n_0 at the start: above 0 for 'factorised' (default 1,
        the authors' value), above d - 1 for 'full' (default d + 1).
    * **precision_range** (tuple, *optional*, default=(1e-4, inf)) - Floor and ceiling of A. The floor is
        the authors'; the chain's own noise bounds A from above, so no ceiling is needed.
        `diagnostics()` reports how much of A is clamped.
    * **curvature** (str or strategy, *optional*, default='sgld') - Where A comes from: 'sgld', the spread
        of the chain, as in the paper and at no cost; 'ggn', a Gauss-Newton estimate from one sampled
        label a step, one more backward, for logits (`curvature.GGN` takes other likelihoods).
    * **wishart** (str, *optional*, default='factorised') - 'factorised', d one-dimensional
        Inverse-Wisharts, as the authors' code has it and as a diagonal V_0 suggests, or 'full', one
        over all d weights, as printed.
    * **kl_weight** (float, *optional*, default=None) - Weight of the KL in the episode's objective.
        Defaults to the temperature, for which the closed form is the objective's own minimiser.
    * **auto_kl** (bool, *optional*, default=True) - Whether the KL's gradient is added when a query loss
        is back-propagated, so that a loop need not know of it. If False, write
        `learner.objective(loss).backward()`.
    * **trace** (str, *optional*, default='readout') - What the chain's mean owes to L_0, on the way back
        from a query loss: 'none', nothing, as in the paper; 'first', the place where it began and the
        size of its steps; 'readout', also how the steps of the readout depend on the support's features
        and on each other, as in ANIL, for one more backward of the support; 'full', the graph of all
        steps, as in MAML, at MAML's cost. A readout is a last `nn.Linear` without hooks whose outputs,
        128 at most, are the model's; with other models, losses that are no sums over data or depend on
        weights by another way, and steps on ever new inputs, 'readout' is 'first'. Posterior and KL
        always take the moments as constants.
    * **precondition** (bool, *optional*, default=True) - Whether a weight's steps grow and shrink with
        its V_0 / n_0, relative to the start, so that weights which differ more between tasks move
        further. The chain's law is the same; the steps' sizes are learned, as in Meta-SGD.

    **References**

    1. Kim and Hospedales. 2023. "A Hierarchical Bayesian Model for Deep Few-Shot Meta Learning."

    **Example**

    ~~~python
    niw = NIW(nn.Linear(20, 10), lr=0.01)
    learner = niw.clone()
    error = loss(learner(X), y)
    learner.adapt(error)
    error = loss(learner(X), y)
    error.backward()
    probabilities = learner.posterior().predict(X, samples=10).softmax(-1).mean(0)
    ~~~
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        first_order: bool = False,
        allow_unused: Optional[bool] = None,
        allow_nograd: bool = False,
        *,
        burn_in: Optional[int] = None,
        temperature: float = 1e-4,
        prior_precision: Optional[float] = None,
        n0: Optional[float] = None,
        precision_range: Tuple[float, float] = (1e-4, math.inf),
        curvature: Union[str, Curvature] = "sgld",
        wishart: str = "factorised",
        kl_weight: Optional[float] = None,
        auto_kl: bool = True,
        trace: str = "readout",
        precondition: bool = True,
    ):
        super().__init__()
        check_parameters(model)
        check_number("lr", lr, 0, strict=True)
        self.module = model
        self.lr = lr
        self.first_order = first_order
        self.allow_nograd = allow_nograd
        self.allow_unused = allow_nograd if allow_unused is None else allow_unused
        self.options = Options(
            burn_in=sys.maxsize if burn_in is None else burn_in,
            temperature=temperature,
            precision_range=precision_range,
            curvature=make_curvature(curvature),
            wishart=wishart,
            kl_weight=temperature if kl_weight is None else kl_weight,
            auto_kl=auto_kl,
            trace=trace,
            precondition=precondition,
        )
        self._names = [name for name, _ in model.named_parameters()]
        self._signature: Optional[list] = None  # of the parameters that the layout was made for
        self._newest: Optional[Episode] = None
        if prior_precision is None:
            prior_precision = 0.01 / noise_variance(lr, temperature, n=1) if temperature else 1.0
        self._initialise(prior_precision, n0)
        vectors.release()  # what earlier wrappers have left

    def _initialise(self, prior_precision: float, n0: Optional[float]) -> None:
        parameters = list(self.module.parameters())
        d = sum(p.numel() for p in parameters if p.requires_grad)
        wishart = self.options.wishart
        n0 = initial_degrees(wishart, d) if n0 is None else n0
        check_number(f"n0, for wishart='{wishart}' and d = {d},", n0, lower_bound(wishart, d), strict=True)
        check_number("prior_precision", prior_precision, 0, strict=True)
        log_variance = -math.log(prior_precision)
        self.log_variance = nn.ParameterList(
            nn.Parameter(
                torch.full_like(p, log_variance, dtype=torch.promote_types(p.dtype, torch.float32)),
                requires_grad=p.requires_grad,
            )
            for p in parameters
        )
        raw = torch.tensor(to_raw(n0, wishart, d), dtype=self.log_variance[0].dtype, device=parameters[0].device)
        self.raw_n0 = nn.Parameter(raw)
        self.register_buffer("log_start", torch.tensor(log_variance, dtype=raw.dtype, device=raw.device))
        self.register_buffer("full_wishart", torch.tensor(wishart == "full", device=parameters[0].device))

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def clone(
        self,
        first_order: Optional[bool] = None,
        allow_unused: Optional[bool] = None,
        allow_nograd: Optional[bool] = None,
    ) -> NIWLearner:
        """
        **Description**

        Returns a learner for one task, whose weights are `torch.clone`d from the model's: before any
        `adapt` it computes what the model computes, and passes gradients to it. As with MAML, buffers
        such as BatchNorm's running statistics are shared with the model.

        **Arguments**

        * **first_order** (bool, *optional*, default=None) - Defaults to self.first_order.
        * **allow_unused** (bool, *optional*, default=None) - Defaults to self.allow_unused.
        * **allow_nograd** (bool, *optional*, default=None) - Defaults to self.allow_nograd.
        """
        self._remember(None)  # its vectors are the new one's
        return NIWLearner(
            self,
            first_order=self.first_order if first_order is None else first_order,
            allow_unused=self.allow_unused if allow_unused is None else allow_unused,
            allow_nograd=self.allow_nograd if allow_nograd is None else allow_nograd,
        )

    def adapt(self, *args, **kwargs) -> None:
        """Raises: the wrapper holds what all tasks share, and only a clone adapts."""
        raise ChainError("adapt was called on the NIW wrapper itself. Call it on a clone: learner = niw.clone().")

    def _remember(self, episode: Optional[Episode]) -> None:
        """Keeps the newest episode for `diagnostics` until the next begins, unless that would keep a graph alive."""
        if episode is not None and episode.readout is not None:
            episode = copy.copy(episode)
            episode.readout = None
        self.__dict__["_newest"] = None if self.options.trace == "full" else episode  # a module's own way is slow

    def prior(self) -> Posterior:
        """
        **Description**

        The mode phi* of q(phi) (Eq. 17), N(m_0, V_0 / (n_0 + d + 2)), from which meta-test inference
        starts: `prior().mean` and `prior().variance` are dicts by parameter name.
        """
        prior = self._prior()
        return Posterior(self.module, prior.layout, *prior.mode())

    @torch.no_grad()
    def widen(self, factor: float) -> None:
        """
        **Description**

        Multiplies the standard deviation by which weights differ between tasks, and with it the spread of the
        networks that meta-test inference draws; inner steps keep their sizes. A width can be fitted to
        validation tasks as a temperature can, where predictions are too sure of themselves or too timid.

        **Arguments**

        * **factor** (float) - Above 0.

        **Example**

        ~~~python
        niw.widen(0.5)
        post = niw.clone().posterior(lambda network: loss(network(x), y), steps=3)
        ~~~
        """
        check_number("factor", factor, 0, strict=True)
        for log_variance in (*self.log_variance, self.log_start):
            log_variance.add_(2.0 * math.log(factor))

    def _prior(self) -> Prior:
        """L_0 as leaves, for the parameters that are trainable now."""
        named = list(self.module.named_parameters())
        signature = [(name, id(p), p.dtype, p.requires_grad) for name, p in named]
        log_variance = list(self.log_variance._parameters.values())
        if signature != self._signature:
            if [name for name, _ in named] != self._names:
                raise ModelError(
                    "the model's parameters are not those that NIW was built with. Change the model first, "
                    "then wrap it, so that V_0 covers every parameter."
                )
            self._layout, self._signature = Layout(dict(named)), signature
            self._layout.readout = readout.find(self.module, self._layout)
        for (_, p), v in zip(named, log_variance):
            if v.requires_grad != p.requires_grad:
                v.requires_grad_(p.requires_grad)  # V_0 of a frozen parameter is frozen with it
        m0 = [p for _, p in named if p.requires_grad]
        log_variance = [v for v in log_variance if v.requires_grad]
        if at_hand(self.raw_n0):
            check_degrees(self.raw_n0, self.options.wishart, self._layout.d)
        return Prior(self._layout, self.options.wishart, m0, log_variance, self.raw_n0, self.log_start)

    def _traced_readout(self, layout: Layout, first_order: bool) -> Optional[readout.Place]:
        """Where the readout stands, if its steps are to be traced."""
        place = layout.readout
        if place is None or first_order or self.options.trace != "readout":
            return None
        module = self.module.get_submodule(place.name)
        return None if module._forward_hooks or module._forward_pre_hooks else place

    @torch.no_grad()
    def diagnostics(self) -> Dict[str, Any]:
        """
        **Description**

        How far the newest episode adapted each layer, until the next is cloned: the clamped fraction of A,
        n_0, and by parameter the medians of P_0 and A and the mean share A / (A + P_0), which is 0 where
        the posterior stays at m_0 and 1 where it follows the chain. A chain whose A is mostly clamped says nothing.
        """
        if self._newest is None:
            raise ChainError(
                "diagnostics: no learner has adapted since the last clone(), or trace='full', which keeps no episode. "
                "Clone, adapt, then ask."
            )
        prior, a = self._newest.prior, self._newest.a
        layout, p0 = prior.layout, prior.flat.p0
        clamped = (self._newest.raw_a() != a).to(a.dtype)
        columns = zip(layout.names, *(layout.split(t, cast=False) for t in (p0, a, adapted_share(a, p0), clamped)))
        return {
            "clamped": clamped.mean().item(),
            "n0": prior.degrees(prior.flat.raw_n0).item(),
            "layers": {
                name: {
                    "prior_precision": p.median().item(),
                    "chain_precision": c.median().item(),
                    "share": s.mean().item(),
                    "clamped": k.mean().item(),
                }
                for name, p, c, s, k in columns
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False):
        """
        **Description**

        As `torch.nn.Module.load_state_dict`, but a state dict of another model, or of the other reading
        of the Wishart, raises before anything is loaded and says what differs.
        """
        own = {k: v for k, v in self.state_dict().items() if isinstance(v, Tensor)}
        given = {k: v for k, v in state_dict.items() if isinstance(v, Tensor)}
        differences = key_differences(own, given, strict)
        if "full_wishart" in given and bool(given["full_wishart"]) != (self.options.wishart == "full"):
            differences.append(f"it was saved with another wishart than '{self.options.wishart}'")
        differences += [
            f"'{k}' is not finite"
            for k in given
            if k.startswith(("log_variance", "raw_n0")) and not torch.isfinite(given[k]).all()
        ]
        if differences:
            more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
            raise CheckpointError(
                f"load_state_dict: this is not a state dict of this NIW: {'; '.join(differences[:5])}{more}. "
                "A plain model's weights go to niw.module.load_state_dict, a MAML's in with strict=False."
            )
        self._newest = None
        return super().load_state_dict(state_dict, strict=strict, assign=assign)
