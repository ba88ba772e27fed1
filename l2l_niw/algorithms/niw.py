"""The wrapper: a model whose weights are random variables, with learn2learn's API."""

import sys
import warnings
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from learn2learn.algorithms.base_learner import BaseLearner
from torch import Tensor, nn

from l2l_niw.algorithms.hyper import chain_hyper, latent_hyper
from l2l_niw.algorithms.latent_learner import START, LatentLearner, latent_diagnostics
from l2l_niw.algorithms.learner import WHOLE, NIWLearner
from l2l_niw.algorithms.options import LARGEST, Options
from l2l_niw.algorithms.selection import Selection, select
from l2l_niw.errors import ArgumentError, ChainError, CheckpointError, ModelError
from l2l_niw.inference import chain as chains
from l2l_niw.inference import prior as priors
from l2l_niw.inference.chain import Chain
from l2l_niw.inference.closed_form import adapted_share
from l2l_niw.inference.gaussian import GaussianWeights
from l2l_niw.inference.last_layer import Cuts, last_called, reaches_past
from l2l_niw.inference.latent import Latent
from l2l_niw.inference.latent_posterior import LatentWeights
from l2l_niw.inference.objective import expected_kl
from l2l_niw.inference.posterior import chain_precision, samples_posterior
from l2l_niw.inference.prior import Prior
from l2l_niw.inference.wishart import initial_degrees, lower_bound, to_raw
from l2l_niw.utils._checks import check_number
from l2l_niw.utils._functional import Replica, batch_size, check_model, key_differences

SEVERAL = (list, tuple, nn.ModuleList)  # models of a mixture's components
Random = Tuple[List[str], List[Tensor], List[Tuple[Tensor, ...]], List[int]]


class NIW(NIWLearner):
    """
    **Description**

    NIW-Meta with the API of `learn2learn.algorithms.MAML`: every task's weights are drawn from a
    learned Normal-Inverse-Wishart posterior, and each episode is solved from a short Langevin chain.

    `niw.module` is the model itself, and its parameters are m_0. Beside them `niw.hyper` holds `log_variance`,
    log(V_0 / n_0), one tensor per random parameter, and `raw_n0`, behind n_0. In an unmodified MAML loop
    (`clone`, `adapt`, query loss, `backward`) every parameter of `niw.parameters()` receives its
    gradient of mean query loss + kl_weight * KL / n.

    With `rank` or curvature='full' the posterior has its full covariance, and steps are Gauss-Newton's: theta =
    m_0 + U z, z ~ N(0, I), five examples say much about a z of few coordinates, and T is 1. `adapt` then needs a loss
    that is a negative log-likelihood: a squared error, whose noise is learned, a cross-entropy, or that of a
    distribution which the model returns. A Gaussian query has the posterior's variance in its own, and its
    back-propagation adds the gradient of kl_weight * F / n, F the support's free energy, -log p(S): together the
    marginal likelihood of all data of the task.

    **Arguments**

    * **model** (Module) - Module to be wrapped.
    * **lr** (float) - Step size of the chain: MAML's fast adaptation learning rate. Gauss-Newton steps have none.
    * **first_order** (bool, *optional*, default=False) - Whether to use the first-order approximation:
        second_order='none'.
    * **allow_unused** (bool, *optional*, default=None) - Whether to allow parameters that the loss does
        not depend on. Defaults to `allow_nograd`.
    * **allow_nograd** (bool, *optional*, default=False) - Whether to allow adaptation with parameters
        that have `requires_grad = False`; they stay as they are.
    * **random** (str, sequence or callable, *optional*, default='all') - Which weights are random, and adapted: 'all';
        'last_layer', as ANIL adapts; 'norm', those of normalisation layers; a name or a pattern such as 'layer4.*';
        several of these; or a function of name and parameter. The others are shared by all tasks: they are trained with
        the query's gradient, or frozen if they are, and cost no V_0.
    * **rank** (int, *optional*, default=0) - Directions that tasks differ along: V_0 / n_0 = U U^T, U learned, of as
        many vectors of the random weights. 0 is the paper's diagonal V_0.
    * **directions** (str, *optional*, default='joint') - 'joint': a task has `rank` coordinates, for all layers.
        'by_layer': as many for each layer, so that U is block-diagonal. 'adapters': the same, with directions of a
        matrix that are outer products, as in LoRA: of r (rows + columns) numbers instead of r rows columns.
    * **components** (int, *optional*, default=None) - Of a mixture of NIWs, `NIWMixture`, each with a model of its own;
        1 by default, or as many as there are models. The first is the model, the others are copies of it with perturbed
        weights. Give a list of models instead, of the same architecture, for components that start elsewhere.
    * **perturbation** (float, *optional*, default=0.1) - Standard deviation by which weights of further components
        differ from the model's at the start, relative to the weight's root mean square.
    * **prior_std** (float, *optional*, default=None) - With rank, the standard deviation of each direction's entries at
        the start, relative to the weight's root mean square: by default 0.1. With curvature='full' the weights' own,
        0.3.
    * **noise** (float, *optional*, default=1.0) - With rank or curvature='full' and a squared error: the standard
        deviation of targets around outputs at the start. It is learned.
    * **likelihood** (str, *optional*, default='auto') - With rank or curvature='full': what outputs that are a tensor
        parametrise, 'gaussian', 'categorical' or 'bernoulli'. By default the loss shows it, by its curvature.
    * **linearise** (str, *optional*, default='variances') - With rank or curvature='full', what of a query has
        the posterior's spread in it: 'variances', a distribution's variance; 'all', logits too, which are shrunk, at
        some cost in accuracy; 'none'. `posterior().linearised(x)` has it whatever this is.
    * **radius** (float, *optional*, default=2.0) - With rank or curvature='full': the longest step, in standard
        deviations of the prior.
    * **inference** (str, *optional*, default='langevin') - 'langevin': the prior is in the chain, which then samples
        the posterior q_i itself, and every forward runs at the chain's state. 'closed_form', the paper's: the chain
        samples the likelihood, Eq. 13 adds the prior, and a query runs a network drawn from q_i.
    * **second_order** (str, *optional*, default='last_layer') - For which weights inner steps keep their graph:
        'none', first-order MAML's meta-gradient; 'last_layer', how the last linear layer's steps depend on the
        support's features and on each other, as in ANIL; 'all', as in MAML, at MAML's cost. The first forward is run
        once more, without gradients, to see which layer is called last. A model that does not end in a linear layer
        has 'none' instead; one whose last layer cannot be told from its body keeps whole graphs. A warning says so, and
        `diagnostics()`. The paper takes the chain's moments as constants: so do `learner.posterior()` and
        `learner.kl()` in closed form. Of Gauss-Newton steps: 'all', the default; 'last_step', the last one alone, whose
        memory does not grow with the steps; 'none'.
    * **average_iterates** (bool, *optional*, default=False) - Whether the chain's moments are those of all iterates
        after the burn-in, as in the paper, or of the last one alone: a few cold steps are still on their way, and
        the mean of several lags behind.
    * **burn_in** (int, *optional*, default=0) - Iterates left out of the moments. The paper has 2, of 5 steps.
    * **temperature** (float, *optional*, default=1e-4) - The chain samples exp(-l_i / T), and the episode
        minimises E[l_i] + T KL. A wide posterior costs accuracy while a network is being learned:
        on Omniglot T = 1e-3 cost a point, 1e-5 none. Raise it for wide predictive bands; 0 makes
        NIW a point estimate, MAML if step sizes are not learned and second_order='all'.
    * **prior_precision** (float, *optional*, default=None) - P_0 = n_0 / V_0 at the start. Defaults to
        0.01 / (2 lr T), a hundredth of what the chain's own noise would have with one example: tasks
        start free to adapt, whatever lr and T, and P_0 learns where they need not.
    * **n0** (float, *optional*, default=None) - n_0 at the start: above 0 for 'factorised' (default 1,
        the authors' value), above d - 1 for 'full' (default d + 1).
    * **precision_bounds** (tuple, *optional*, default=(1e-4, inf)) - Floor and ceiling of the chain's precision. The
        floor is the authors'; the chain's own noise bounds it from above, so no ceiling is needed.
        `diagnostics()` reports how much of it is clamped.
    * **curvature** (str or strategy, *optional*, default='sgld') - Where A comes from: 'full', the Gauss-Newton matrix
        as it is, without the diagonal approximation, with the paper's diagonal V_0, for supports of some hundred
        outputs and networks whose Jacobian fits; 'sgld', the variance
        of the chain's iterates, as in the paper and at no cost; 'ggn', a Gauss-Newton estimate from one sampled
        label per step, one more backward, for logits (`curvature.GGN` takes other likelihoods).
    * **wishart** (str, *optional*, default='factorised') - 'factorised', d one-dimensional
        Inverse-Wisharts, as the authors' code has it and as a diagonal V_0 suggests, or 'full', one
        over all d weights, as printed.
    * **kl_weight** (float, *optional*, default=None) - Weight of the KL in the episode's objective.
        Defaults to the temperature, for which q_i is the objective's own minimiser.
    * **add_kl_gradient** (bool, *optional*, default=True) - Whether the KL's gradient is added when a query loss
        is back-propagated, over the examples of the forwards behind it. If False, write
        `learner.objective(loss).backward()`, for instance where a query is back-propagated in parts.
    * **learn_step_sizes** (bool, *optional*, default=True) - Whether a weight's steps are scaled by
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
    error = loss(learner.query(X), y)
    error.backward()
    probabilities = learner.posterior().predict(X, samples=10).softmax(-1).mean(0)
    ~~~
    """

    def __new__(cls, model: Any = None, *args: Any, components: Optional[int] = None, **options: Any) -> "NIW":
        """A `NIWMixture`, where there are several components."""
        if cls is NIW and is_several(model, components):
            from l2l_niw.algorithms.mixture import NIWMixture

            return super().__new__(NIWMixture)
        return super().__new__(cls)

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        first_order: bool = False,
        allow_unused: Optional[bool] = None,
        allow_nograd: bool = False,
        *,
        components: Optional[int] = None,
        perturbation: float = 0.1,
        prior_precision: Optional[float] = None,
        n0: Optional[float] = None,
        random: Selection = "all",
        rank: int = 0,
        directions: str = "joint",
        prior_std: Optional[float] = None,
        noise: float = 1.0,
        **options: Any,
    ):
        if is_several(model, components):
            raise ArgumentError(f"components: {type(self).__name__} has one. Build NIW itself, or subclass NIWMixture.")
        model = model[0] if isinstance(model, SEVERAL) else model
        check_model(model)
        check_number("lr", lr, 0, strict=True)
        check_number("rank", rank, 0, whole=True)
        BaseLearner.__init__(self, model)
        self.lr = lr
        self.first_order = first_order
        self.allow_nograd = allow_nograd
        self.allow_unused = allow_nograd if allow_unused is None else allow_unused
        full = options.get("curvature") == "full"
        self.rank, latent = rank, full or rank > 0
        if full and rank:
            raise ArgumentError("rank and curvature='full' are two priors: give one of them.")
        if directions != "joint" and not rank:
            raise ArgumentError(f"directions={directions!r} needs a rank: give rank=8, or leave it out.")
        if noise != 1.0 and not latent:
            raise ArgumentError("noise goes with rank or curvature='full'. Give curvature=GGN('gaussian', noise=...).")
        options = {k: v for k, v in options.items() if k != "curvature" or not full}
        self.options = Options(latent, **options)
        parameters = dict(model.named_parameters())
        self._is_random = select(model, random)
        chosen = [pair for pair, own in zip(parameters.items(), self._is_random) if own]
        if latent:
            given = rank, directions, prior_std, prior_precision, noise
            self.hyper: Any = latent_hyper(chosen, *given, self.options.wishart)
        else:
            self.hyper = chain_hyper(chosen, prior_precision, prior_std, lr, self.options)
        wishart, d = self.options.wishart, self.hyper.size
        n0 = initial_degrees(wishart, d) if n0 is None else n0
        low = lower_bound(wishart, d)
        check_number(f"n0, for wishart='{wishart}' and d = {d},", n0, low, strict=True, high=LARGEST)
        check_number("n0", n0 - low, 1e-6, high=LARGEST)
        self.hyper.raw_n0.data.fill_(to_raw(n0, wishart, d))
        self._names = list(parameters)
        self._shapes = [p.shape for p in parameters.values()]
        self._last_layer: Optional[str] = None  # its name, once a forward has shown it; "" if there is none
        self._shown_by: Optional[str] = None  # the model's method whose call has shown it
        self._last_layer_parameters: List[str] = []
        self._can_cut = True  # whether its features can be cut off from what is behind them
        self._looked_past = False  # whether it was looked at what else losses depend on
        self._frozen: Optional[str] = None
        self._warned: List[str] = []
        self._newest: Optional[tuple] = None
        self._component = 0  # of a mixture, which this is
        self._likelihood: Optional[str] = None  # of tensors that the model returns, once a loss has shown it
        self._saw_used = False  # whether it was looked at which weights a loss depends on
        self._n: Optional[int] = None  # of the last forward of the wrapper itself
        self._trained = self._written()  # how often m_0 and V_0 had been written to
        average_over_ranks(model, self.hyper)

    @property
    def niw(self) -> "NIW":
        """The wrapper itself; a learner's `niw` is the wrapper that it was cloned from."""
        return self

    def _run(self, method: str, query: bool, *args: Any, **kwargs: Any) -> Any:
        """The wrapper runs the model itself, until it is adapted."""
        if "_chain" in self.__dict__:
            return super()._run(method, query, *args, **kwargs)
        outputs = getattr(self.module, method)(*args, **kwargs)
        self.__dict__["_n"] = batch_size(outputs, (args, kwargs))
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

        As a learner's `adapt`. As with MAML, the wrapper's own weights are replaced: for loops that adapt a deep copy
        of it. A clone leaves it as it is. The forward of the first step ran the model itself, so that with
        second_order='last_layer' each step keeps its whole graph; adapt a clone where memory counts.
        """
        if self.options.latent:
            raise ArgumentError("adapt: with rank or curvature='full' adapt a clone: learner = niw.clone().")
        if "_chain" not in self.__dict__:
            prior, weights = self._prior(), self._random()[1]
            self._begin(prior, Replica(self.module, weights, copy=False))
            chain = chains.init(prior.m0)
            state = self._state_of(chain, chain[:3])
            flags = {"_state_is_used": False, "_sensitivity_is_used": False, "_cuts": False}  # the forward had none
            self.__dict__.update(flags, _chain=chain, _weights=weights, _state=state)
            n = n or self._n
        super().adapt(loss, first_order, allow_unused, allow_nograd, n)

    def clone(
        self,
        first_order: Optional[bool] = None,
        allow_unused: Optional[bool] = None,
        allow_nograd: Optional[bool] = None,
    ) -> Union[NIWLearner, LatentLearner]:
        """
        **Description**

        A learner for one task, whose weights are `torch.clone`d from the model's: before any
        `adapt` it computes what the model computes, and passes gradients to it. As with MAML, buffers
        such as BatchNorm's running statistics are shared with the model. Of a network with more than a million random
        weights the prior is not copied: what is written to it while a learner lives is what the learner's further
        steps, and the KL, see.

        **Arguments**

        * **first_order** (bool, *optional*, default=None) - Defaults to self.first_order.
        * **allow_unused** (bool, *optional*, default=None) - Defaults to self.allow_unused.
        * **allow_nograd** (bool, *optional*, default=None) - Defaults to self.allow_nograd.

        **Returns** an `NIWLearner` or, with `rank` or curvature='full', a `LatentLearner`.
        """
        self.__dict__["_newest"] = None
        random, flags = self._random(), self._flags(first_order, allow_unused, allow_nograd)
        self._check_trained((random[1][0]._version, random[2][0][0]._version), random[2][0][0].grad)
        replica = Replica(self.module, random[1])
        if self.options.latent:
            return LatentLearner(self, self._latent(random), replica, START, **flags)
        prior = self._prior(random)
        chain = chains.init(prior.m0)._replace(theta=[m.detach().clone() for m in prior.m0])
        return NIWLearner(self, chain, prior, replica, **flags)

    def prior(self) -> GaussianWeights:
        """
        **Description**

        The mode phi* of q(phi) (Eq. 17), N(m_0, V_0 / (n_0 + d + 2)), from which meta-test inference
        starts.

        **Returns** a `GaussianWeights` without a graph: its `mean` and `variance` are dicts by parameter name.
        """
        if self.options.latent:
            latent = self._latent().at_mode().detached()
            return LatentWeights(self.module, latent, latent.zeros(), None, self._likelihood)
        prior = self._prior()
        return GaussianWeights(self.module, prior.names, *prior.mode())

    def posterior(
        self,
        nll: Optional[Callable] = None,
        steps: int = 5,
        lr: Optional[float] = None,
        samples: int = 1,
        n: Optional[int] = None,
        from_mode: bool = False,
    ) -> GaussianWeights:
        """
        **Description**

        The posterior of a new task: a clone's, after as many steps of `adapt` as training takes, or by the paper's
        meta-test inference from the mode (`learner.posterior(nll)`). Without a graph. Of a mixture, all components' in
        one `MixtureWeights`, weighed by the support's free energy. A wrapper that was adapted itself, without `nll`,
        has a learner's.

        **Arguments**

        * **nll** (callable) - Takes a network, `network(x)`, and returns the support's mean loss.
        * **steps** (int, *optional*, default=5) - Of `adapt`, or on the ELBO.
        * **lr**, **samples** - Of steps on the ELBO, as in a learner's `posterior`.
        * **n** (int, *optional*, default=None) - The number of support examples. Defaults to the batch size that the
            network was called with.
        * **from_mode** (bool, *optional*, default=False) - Whether inference starts from the mode phi*, by steps on the
            ELBO. A last layer that is learned by the steps of training needs them at meta-test too.

        **Returns** a `GaussianWeights` with its `free_energy`, in nats.

        **Example**

        ~~~python
        post = niw.posterior(lambda network: loss(network(x), y), steps=5)
        probabilities = post.predict(x_query, samples=10).softmax(-1).mean(0)
        ~~~
        """
        if nll is None or "_chain" in self.__dict__:
            return super().posterior(nll, steps, lr, samples, n)
        check_number("steps", steps, 0 if from_mode else 1, whole=True)
        if not from_mode and (lr is not None or samples != 1):
            raise ArgumentError("posterior: lr and samples are those of steps from the mode. Give from_mode=True.")
        with torch.inference_mode(False), torch.enable_grad():
            learner = self.clone(first_order=True)
            for _ in range(0 if from_mode else steps):
                learner.adapt(nll(learner), n=n)
            post = learner.posterior(nll, steps, lr, samples, n) if from_mode else learner.posterior().detached()
        post._module = self.module  # instead of the learner's, which has a graph
        if post.free_energy is None and not self.options.latent:
            post.free_energy = self._free_energy(post, nll, n)
        return post

    @torch.no_grad()
    def _free_energy(self, post: GaussianWeights, nll: Callable, n: Optional[int]) -> Tensor:
        """A support's, in nats: its summed loss at the posterior's mean, plus kl_weight * KL."""
        loss, seen = post.loss(nll, list(post.mean.values()))
        return (n or seen) * loss + self._weighted_kl(post, self._prior())

    def _weighted_kl(self, post: GaussianWeights, prior: Prior) -> Union[float, Tensor]:
        """kl_weight * KL of a posterior, or of each of several."""
        weight, q = self.options.kl_weight, (list(post.mean.values()), list(post.variance.values()))
        return weight * expected_kl(q, prior) if weight else 0.0

    @torch.no_grad()
    def scale_prior_std(self, factor: float) -> None:
        """
        **Description**

        Multiplies the standard deviation by which weights differ between tasks, and with it the spread of the
        networks that meta-test inference draws; inner steps keep their sizes. It can be fitted to
        validation tasks as a temperature can, where predictions are over- or underconfident.

        **Arguments**

        * **factor** (float) - Above 0.

        **Example**

        ~~~python
        niw.scale_prior_std(0.5)
        post = niw.clone().posterior(lambda network: loss(network(x), y), steps=3)
        ~~~
        """
        check_number("factor", factor, 0, strict=True)
        self.hyper.scale_std(factor)

    def _random(self) -> Random:
        """Names and means of the random parameters that are trainable now, what their variances are made of, which."""
        named = list(self.module.named_parameters())
        self._check_same(self.module, named)
        named = [pair for pair, own in zip(named, self._is_random) if own]
        spreads = self.hyper.spreads()
        for (_, p), own in zip(named, spreads):
            for tensor in own:
                if tensor.requires_grad != p.requires_grad:
                    tensor.requires_grad_(p.requires_grad)  # V_0 of a frozen parameter is frozen with it
        which = [i for i, (_, p) in enumerate(named) if p.requires_grad]
        if not which:
            raise ModelError("model: all random parameters are frozen by now. Call requires_grad_(True) on some.")
        self.__dict__["_frozen"] = next((name for name, p in named if not p.requires_grad), None)
        return [named[i][0] for i in which], [named[i][1] for i in which], [spreads[i] for i in which], which

    def _check_n0(self) -> Tensor:
        raw = self.hyper.raw_n0
        if raw.device.type == "cpu" and not -14.0 < raw.item() < 42.0:
            raise ArgumentError(
                f"raw_n0 has come to {raw.item()}, where n_0 leaves its domain. Lower its learning rate, or load an "
                "earlier state dict."
            )
        return raw

    def _prior(self, random: Optional[Random] = None) -> Prior:
        """L_0 as it is now, for the parameters that are trainable."""
        names, m0, spreads, _ = random or self._random()
        initial = self.hyper.initial_log_variance.item()
        return priors.init(names, m0, [own[0] for own in spreads], self._check_n0(), initial, self.options.wishart)

    def _latent(self, random: Optional[Random] = None) -> Latent:
        """L_0 as it is now in the coordinates of Gauss-Newton steps."""
        names, m0, _, which = random or self._random()
        self._check_n0()
        return self.hyper.latent(names, m0, which, self.options.wishart).copied()

    def _check_same(self, module: nn.Module, named: Optional[list] = None) -> None:
        """Whether a module's parameters are those that V_0 was made for."""
        named = list(module.named_parameters()) if named is None else named
        if [name for name, _ in named] == self._names and [p.shape for _, p in named] == self._shapes:
            return
        own, given = dict(zip(self._names, self._shapes)), dict(named)
        differs = [name for name, p in named if own.get(name) != p.shape] + [name for name in own if name not in given]
        raise ModelError(
            f"parameter '{differs[0] if differs else named[0][0]}' is not as it was when NIW was built, so V_0 does "
            "not cover it. Change the model first, then wrap it."
        )

    def _check_frozen(self, allow_nograd: bool) -> None:
        if self._frozen and not allow_nograd:
            raise ArgumentError(
                f"adapt: parameter '{self._frozen}' has requires_grad=False. Pass allow_nograd=True to NIW or to adapt "
                "to keep frozen parameters as they are."
            )

    def _find_last_layer(self, model: nn.Module, method: str, call: Callable[[nn.Module], Any]) -> None:
        """Notes which module a forward calls last, in a copy that is thrown away, if its steps can keep their graph."""
        buffers = dict(model.named_buffers())
        replica = Replica(model, list(buffers.values()))
        replica.put([b.clone() for b in buffers.values()])
        devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
        with torch.random.fork_rng(devices):
            last = last_called(replica.module, partial(call, replica.module))
        name = next((name for name, module in replica.module.named_modules() if module is last), "")
        self.__dict__["_shown_by"] = method
        layer = None if last is None else self.module.get_submodule(name)
        adapted = {id(p) for p, own in zip(self.module.parameters(), self._is_random) if own and p.requires_grad}
        own = {id(p) for p in layer.parameters()} & adapted if isinstance(layer, nn.Linear) else set()
        names = [key for key, p in self.module.named_parameters() if id(p) in own]
        places = [id(p) for module in self.module.modules() for p in module._parameters.values()]
        self.__dict__.update(_last_layer=name, _last_layer_parameters=names)
        if any(places.count(p) > 1 for p in own):  # what stands behind the features too cannot be cut off there
            self._keep_whole_graphs()
        if not names:
            kind = "nothing" if last is None else f"{type(last).__name__} '{name}'"
            self._warn(
                "second_order='last_layer' needs a model that ends in a linear layer that is adapted, and what has "
                f"parameters and is called last here is {kind}. Steps keep no graph, as with first_order=True; "
                "second_order='all' keeps that of all weights."
            )

    def _shared_weights(self, module: nn.Module) -> List[Tensor]:
        """The trained weights of the model, or of a learner's, that all tasks share."""
        if all(self._is_random):
            return []
        return [p for p, own in zip(module.parameters(), self._is_random) if not own and p.requires_grad]

    def _look_past(
        self, gradients: list, cuts: Sequence[Cuts], weights: List[Tensor], with_graph: Sequence[int]
    ) -> None:
        """Once per wrapper: whether the last layer's gradients depend on the body by another way than its features."""
        if not self._looked_past:
            self.__dict__["_looked_past"] = True
            own = [gradients[i] for i in with_graph if gradients[i] is not None]
            body = [w for i, w in enumerate(weights) if i not in with_graph]
            if reaches_past(own, cuts, [*body, *self._shared_weights(self.module)], weights):
                self._keep_whole_graphs()

    def _keep_whole_graphs(self) -> None:
        self._warn(WHOLE)
        self.__dict__["_can_cut"] = False

    def _in_last_layer(self, names: Sequence[str]) -> List[int]:
        """The last layer's weights among these."""
        return [i for i, name in enumerate(names) if name in self._last_layer_parameters]

    def _warn(self, text: str) -> None:
        """Each warning once per wrapper, at the line of the user's that it is about."""
        if text not in self._warned:
            self._warned.append(text)
            frame, level = sys._getframe(1), 2
            while frame.f_back and frame.f_globals.get("__name__", "").startswith(("l2l_niw.", "torch.")):
                frame, level = frame.f_back, level + 1
            warnings.warn(f"NIW: {text}", stacklevel=level)

    def _written(self) -> Tuple[int, int]:
        """How often m_0 and V_0 have been written to."""
        parameters = [p for p, own in zip(self.module.parameters(), self._is_random) if own]
        i = next(i for i, p in enumerate(parameters) if p.requires_grad)
        return parameters[i]._version, self.hyper.spreads()[i][0]._version

    def _check_trained(self, written: Tuple[int, int], gradient: Optional[Tensor]) -> None:
        """Warns where an optimiser trains the model's parameters, and leaves V_0 out."""
        if gradient is not None and written[1] == self._trained[1] and written[0] >= self._trained[0] + 3:
            self._warn(
                "the model's parameters are trained, but V_0 (niw.hyper) and n_0 are not. Give the optimiser "
                "niw.parameters() instead of the model's."
            )

    def _remember(self, chain: Chain, prior: Prior, lr: float) -> None:
        """Keeps the newest chain, without its graph, for `diagnostics` until the next learner is cloned."""
        log_variance = [v.detach() for v in prior.log_variance]
        prior = prior._replace(m0=[], log_variance=log_variance, raw_n0=prior.raw_n0.detach())
        moments = chain.moments and chain.moments._replace(mean=[], origin=[], sensitivity=[])
        self.__dict__["_newest"] = chain._replace(origin=[], sensitivity=[], moments=moments), prior, lr

    @torch.no_grad()
    def diagnostics(self) -> Dict[str, Any]:
        """
        **Description**

        How far the newest episode adapted each layer, until the next is cloned: the clamped fraction of the chain's
        precision, n_0, the last layer if its steps keep their graph, and by parameter the medians of P_0 and of the
        chain's precision A and the mean share A / (A + P_0) that the chain has in the posterior's precision: 0 where it
        is the prior. With 'sgld' and learned step sizes the share is a constant of lr, T and n, and says nothing of the
        data. A chain whose precision is mostly clamped says nothing.

        With rank or curvature='full', means over the newest episodes: `share`, what their supports have pinned down of
        the prior's spread, from 0 to 1; `length`, |z|, about the root of its dimension where the prior fits;
        the supports' log `evidence`; and by parameter what tasks differ by and how far these went.

        **Returns** a dict of `clamped`, `n0`, `second_order` and `layers`: for each parameter name a dict of
        `prior_precision`, `chain_precision`, `share` and `clamped`. With the others, of `share`, `length`,
        `evidence`, `likelihood`, `noise`, `n0`, `second_order` and `layers`: `prior_std` and `moved`.
        """
        if self._newest is None:
            raise ChainError("diagnostics: no learner has adapted since the last clone(). Clone, adapt, then ask.")
        if self.options.latent:
            solution, latent = self._newest
            return latent_diagnostics(solution, latent, self.options.second_order)
        chain, prior, lr = self._newest
        settings, curvature, layers, clamped = self.options.settings(lr), self.options.curvature, {}, []
        for i, name in enumerate(prior.names):
            a, raw = (chain_precision(chain, i, prior, curvature, settings, bounded) for bounded in (True, False))
            p0 = prior.precision(i)
            if samples_posterior(chain, i, curvature, settings):
                share = (1.0 - p0 / a).clamp(min=0.0)
            else:
                share = adapted_share(a, p0)
            clamped.append((raw != a).flatten().to(a.dtype))
            layers[name] = {
                "prior_precision": p0.median().item(),
                "chain_precision": a.median().item(),
                "share": share.mean().item(),
                "clamped": clamped[-1].mean().item(),
            }
        second_order = "none" if self.first_order else self.options.second_order
        if second_order == "last_layer":
            second_order = f"last_layer: {self._last_layer}" if self._last_layer_parameters else "none"
            second_order += ", with whole graphs" if WHOLE in self._warned else ""
        return {
            "clamped": torch.cat(clamped).mean().item(),
            "n0": prior.n0.item(),
            "second_order": second_order,
            "layers": layers,
        }

    def __getstate__(self) -> Dict[str, Any]:
        return {**super().__getstate__(), "_newest": None}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """
        **Description**

        As `torch.nn.Module.load_state_dict`, but a state dict of another model, or of the other reading
        of the Wishart, raises before anything is loaded and says what differs.

        **Returns** the missing and the unexpected keys, as `torch.nn.Module.load_state_dict`.
        """
        differences = self._differences(state_dict, strict)
        if differences:
            more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
            raise CheckpointError(
                f"load_state_dict: this is not a state dict of this NIW: {'; '.join(differences[:5])}{more}. "
                "A plain model's weights go to niw.module.load_state_dict, a MAML's in with strict=False."
            )
        found = super().load_state_dict(state_dict, strict=strict, assign=assign)
        self._loaded()
        return found

    def _differences(self, state_dict: Mapping[str, Any], strict: bool) -> List[str]:
        """What keeps a state dict from being loaded."""
        own = {k: v for k, v in self.state_dict().items() if isinstance(v, Tensor)}
        given = {k: v for k, v in state_dict.items() if isinstance(v, Tensor)}
        differences = key_differences(own, given, strict)
        if bool(given.get("hyper.full_wishart", own["hyper.full_wishart"])) != (self.options.wishart == "full"):
            differences.append(f"the state dict is of another wishart than '{self.options.wishart}'")
        return differences + [
            f"'{k}' is not finite" for k in given if k.startswith("hyper.") and not torch.isfinite(given[k]).all()
        ]

    def _loaded(self) -> None:
        """Forgets what was of the weights before."""
        self._newest = None
        self._trained = self._written()


def is_several(model: Any, components: Optional[int]) -> bool:
    """Whether these are the arguments of a mixture."""
    return components not in (None, 1) or isinstance(model, SEVERAL) and len(model) != 1


def has_ddp(model: nn.Module) -> bool:
    """Whether a DistributedDataParallel is inside."""
    return any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules())


def average_over_ranks(model: nn.Module, hyper: nn.Module) -> None:
    """With a DistributedDataParallel inside, V_0's and n_0's gradients are averaged as the model's are."""
    if not has_ddp(model):
        return

    def average(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        torch.distributed.all_reduce(gradient)
        return gradient / torch.distributed.get_world_size()

    for p in hyper.parameters():
        if p.requires_grad:
            p.register_hook(average)
