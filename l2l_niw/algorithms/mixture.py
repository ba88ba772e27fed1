"""The wrapper of a mixture: several NIWs, and how many tasks are of each."""

import copy
import random
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from l2l_niw.algorithms.hyper import scale_of
from l2l_niw.algorithms.latent_learner import LatentLearner
from l2l_niw.algorithms.learner import NIWLearner
from l2l_niw.algorithms.niw import NIW, SEVERAL, average_over_ranks, has_ddp
from l2l_niw.errors import ArgumentError, CheckpointError, ModelError
from l2l_niw.inference.mixture import MixtureWeights, entropy, log_responsibilities
from l2l_niw.utils._checks import check_finite, check_number
from l2l_niw.utils._functional import check_model

SETTINGS = ("lr", "first_order", "allow_unused", "allow_nograd", "options")  # which all components have in common
UNUSED, LOOKED_AT = 0.02, 500  # a component with less of so many tasks, relative to an equal share, is reported


class NIWMixture(NIW):
    """
    **Description**

    What `NIW(model, lr, components=K)` and `NIW([model_1, ..., model_K], lr)` build: a mixture of K NIWs, each with its
    own m_0, V_0 and n_0, and mixing weights pi. A task is of component k with probability pi_k, and its weights are
    then drawn under that component.

    In an unmodified MAML loop clones take the components in turn, in rounds of shuffled order, so that an episode costs
    what it costs with one: each component is trained on its share of tasks. This makes an ensemble, for tasks that are
    all of one kind.
    `BatchedEpisodes` runs all components on every task, and trains those that explain it: for tasks of several kinds.

    At meta-test `niw.posterior(nll, steps)` infers all components' posteriors, and weighs them by the support's free
    energies F_k, in nats: r_k is proportional to pi_k exp(-F_k).

    **Arguments**

    * **model** (Module or list) - The model, or one for each component, of the same architecture.
    * **components** (int, *optional*, default=None) - How many; as many as there are models by default.
    * **perturbation** (float, *optional*, default=0.1) - What weights of further components differ by from the model's
        at the start, relative to a weight's root mean square. From so near, components of a network that is trained
        from scratch may stay alike: give a list of models with weights of their own.
    * **lr**, **options** - As in `NIW`.

    **Example**

    ~~~python
    niw = NIW([make_model() for _ in range(3)], lr=0.1)
    learner = niw.clone()                                 # of the next component, learner.component
    post = niw.posterior(lambda network: loss(network(x), y), steps=5)
    probabilities = post.predict(x_query, samples=12).softmax(-1).mean(0)
    ~~~
    """

    components: Any  # a ModuleList of `NIW`

    def __init__(
        self,
        model: Any,
        lr: float,
        *args: Any,
        components: Optional[int] = None,
        perturbation: float = 0.1,
        **options: Any,
    ):
        nn.Module.__init__(self)
        check_number("perturbation", perturbation, 0)
        if components is not None:
            check_number("components", components, 1, whole=True)
        models = list(model) if isinstance(model, SEVERAL) else perturbed(model, components or 1, perturbation)
        check_models(models, components)
        self.components = nn.ModuleList(NIW(own, lr, *args, **options) for own in models)
        for k, part in enumerate(self.components):
            part.__dict__.update(_component=k, _warned=self.components[0]._warned)  # each warning once for all
        self.log_weights = nn.Parameter(torch.zeros_like(self.components[0].hyper.raw_n0).expand(len(models)).clone())
        self.options = self.components[0].options  # one for all
        average_over_ranks(models[0], nn.ParameterList([self.log_weights]))
        self._turn, self._tasks = 0, 0
        self._usage = [0.0] * len(models)  # sums of responsibilities over tasks

    def __getattr__(self, name: str) -> Any:
        """What all components have in common."""
        if name in (*SETTINGS, "rank") and "components" in self.__dict__.get("_modules", {}):
            return getattr(self.components[0], name)
        return nn.Module.__getattr__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTINGS:
            for part in self.components:
                setattr(part, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def module(self) -> nn.ModuleList:
        """The components' models."""
        return nn.ModuleList(part.module for part in self.components)

    @property
    def weights(self) -> Tensor:
        """pi, (K,)."""
        return self.log_weights.softmax(0)

    def _run(self, method: str, query: bool, *args: Any, **kwargs: Any) -> Any:
        raise ArgumentError(
            "a mixture has several networks: run one, niw.clone(component=0)(x), or niw.posterior(nll).predict(x)."
        )

    def adapt(self, *args: Any, **kwargs: Any) -> None:
        """Raises: a mixture's clones are adapted."""
        raise ArgumentError("adapt: of a mixture adapt a clone, learner = niw.clone().")

    def clone(
        self,
        first_order: Optional[bool] = None,
        allow_unused: Optional[bool] = None,
        allow_nograd: Optional[bool] = None,
        component: Optional[int] = None,
    ) -> Union[NIWLearner, LatentLearner]:
        """
        **Description**

        A learner for one task, of one component: of the next in turn, unless it is chosen. Every K clones have all
        components, in an order that is shuffled, so that a loop which clones twice per task, to train and to validate,
        trains them all. Parameters of the others have a gradient of 0, if they have none, for loops that divide all of
        them.

        **Arguments**

        * **first_order**, **allow_unused**, **allow_nograd** - As in `NIW.clone`.
        * **component** (int, *optional*, default=None) - Which, from 0 to K - 1.

        **Returns** a learner with the attribute `component`.
        """
        if component is None:
            component = self._next()
        check_number("component", component, 0, whole=True, high=len(self.components) - 1)
        self._give_gradients()
        return self.components[component].clone(first_order, allow_unused, allow_nograd)

    def _next(self) -> int:
        """The next component in turn, by rounds of shuffled order."""
        if has_ddp(self.components[0].module):
            raise ArgumentError(
                "clone: with DistributedDataParallel inside, all ranks must take the same component. Say which, "
                "clone(component=k)."
            )
        number, place = divmod(self._turn, len(self.components))
        self._turn += 1
        return random.Random(number).sample(range(len(self.components)), len(self.components))[place]

    def _give_gradients(self) -> None:
        """A gradient of 0 for every parameter without one: an episode need not reach all components."""
        for p in self.parameters() if torch.is_grad_enabled() else ():
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)

    def posterior(self, nll: Optional[Callable] = None, *args: Any, **kwargs: Any) -> Any:
        """
        **Description**

        All components' posteriors of a new task, weighed by the support's free energies.

        **Arguments** - As those of `NIW.posterior`.

        **Returns** a `MixtureWeights`.
        """
        if nll is None:
            raise ArgumentError("posterior: give nll, the support's loss of a network; of one component, a learner's.")
        return self._weighed([part.posterior(nll, *args, **kwargs) for part in self.components])

    def _weighed(self, parts: Sequence[Any], shape: Tuple[int, ...] = ()) -> MixtureWeights:
        """Components' posteriors as one; those that have seen no data, after 0 steps, by pi."""
        energies = [torch.zeros(shape) if part.free_energy is None else part.free_energy for part in parts]
        for k, own in enumerate(energies):
            check_finite(own.detach(), f"posterior: the support's free energy under component {k}")
        weights = self.log_weights if energies[0].requires_grad else self.log_weights.detach()
        shares = log_responsibilities(weights, torch.stack(energies, -1).to(weights.device))
        self._note(shares)
        return MixtureWeights(parts, shares)

    def prior(self) -> Any:
        """All components' modes phi* (Eq. 17), weighed by pi, without a graph: a `MixtureWeights`."""
        return MixtureWeights([part.prior() for part in self.components], self.log_weights.detach().log_softmax(0))

    def scale_prior_std(self, factor: float) -> None:
        """As `NIW.scale_prior_std`, of every component."""
        for part in self.components:
            part.scale_prior_std(factor)

    @torch.no_grad()
    def _note(self, log_shares: Tensor, warn: bool = True) -> None:
        """Counts how much of tasks each component had, and reports one that has nothing to do."""
        shares = log_shares.exp().reshape(-1, len(self.components))
        keep = 1.0 - 1.0 / LOOKED_AT if self._tasks >= LOOKED_AT else 1.0
        self._usage = [keep ** len(shares) * used + own for used, own in zip(self._usage, shares.sum(0).tolist())]
        self._tasks = min(self._tasks + len(shares), LOOKED_AT)
        if warn and self._tasks >= LOOKED_AT and self._unused():
            self.components[0]._warn(
                "a component of the mixture has next to no task; diagnostics()['dead'] says which. Start components "
                "elsewhere, from models of their own, train with uniform responsibilities for a while, or take fewer."
            )

    def _unused(self) -> List[int]:
        equal = sum(self._usage) / len(self._usage)
        return [k for k, used in enumerate(self._usage) if used < UNUSED * equal]

    def diagnostics(self) -> Dict[str, Any]:
        """
        **Description**

        How tasks are shared out: pi, `responsibilities`, their mean over the last 500 tasks or so that all components
        were inferred for, in batches or by `posterior`, `entropy` of that mean, `dead`, the components that have next
        to no task, and by component what `NIW.diagnostics` says of its newest episode, if it had one.

        **Returns** a dict of `weights`, `responsibilities`, `entropy`, `dead` and `components`.
        """
        total = sum(self._usage)
        shares = [used / total for used in self._usage] if total else None
        return {
            "weights": self.weights.tolist(),
            "responsibilities": shares,
            "entropy": entropy(torch.tensor(shares).log()).item() if shares else None,
            "dead": self._unused() if total else [],
            "components": [part.diagnostics() if part._newest is not None else None for part in self.components],
        }

    def kl(self) -> Tensor:
        """Raises: a learner has a KL."""
        raise ArgumentError("kl: of a mixture ask a learner, niw.clone().")

    def objective(self, loss: Tensor, n: Optional[int] = None) -> Tensor:
        """Raises: a learner has an objective; a mixture's is that of `BatchedEpisodes`."""
        raise ArgumentError("objective: of a mixture ask a learner, niw.clone(), or use BatchedEpisodes.")

    def __getstate__(self) -> Dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: Dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)

    def __deepcopy__(self, memo: dict) -> "NIWMixture":
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As `NIW.load_state_dict`: what differs raises before anything is loaded."""
        own = self.state_dict()
        differences = [f"'{k}' is unknown" for k in state_dict if k not in own]
        if not torch.isfinite(state_dict.get("log_weights", torch.zeros(1))).all():
            differences.append("'log_weights' is not finite")
        for k, part in enumerate(self.components):
            lead = f"components.{k}."
            given = {n[len(lead) :]: v for n, v in state_dict.items() if n.startswith(lead)}
            differences += [f"component {k}: {text}" for text in part._differences(given, strict)]
        if differences:
            raise CheckpointError(
                f"load_state_dict: this is not a state dict of this mixture: {'; '.join(differences[:5])}. That of "
                "one component goes to niw.components[k].load_state_dict."
            )
        found = nn.Module.load_state_dict(self, state_dict, strict=strict, assign=assign)
        self._usage, self._tasks = [0.0] * len(self.components), 0
        for part in self.components:
            part._loaded()
        return found


def perturbed(model: nn.Module, count: int, perturbation: float) -> List[nn.Module]:
    """The model, and copies of it whose trained weights have noise of this relative size."""
    check_model(model)
    if count > 1 and has_ddp(model):
        raise ArgumentError("components: ranks would draw different copies. Give a list of DistributedDataParallels.")
    models = [model, *(copy.deepcopy(model) for _ in range(count - 1))]
    for own in models[1:]:
        named = [(name, p) for name, p in own.named_parameters() if p.requires_grad]
        noise = [perturbation * scale_of(name, p, named) * torch.randn_like(p) for name, p in named]
        with torch.no_grad():
            for (_, p), e in zip(named, noise):
                p.add_(e)
    return models


def check_models(models: List[nn.Module], components: Optional[int]) -> None:
    """Raises unless these can be the components of a mixture."""
    if not models:
        raise ModelError("model: a mixture needs a model at least, and the list is empty.")
    if components not in (None, len(models)):
        raise ArgumentError(f"components is {components}, but the list has {len(models)} models. Leave it out.")
    for own in models:
        check_model(own)
    shapes = [{name: (p.shape, p.dtype, p.requires_grad) for name, p in own.named_parameters()} for own in models]
    for k, shape in enumerate(shapes[1:], start=1):
        differs = [name for name in {**shapes[0], **shape} if shapes[0].get(name) != shape.get(name)]
        if differs:
            raise ModelError(
                f"model {k} is of another architecture than model 0: parameter '{differs[0]}' differs in shape, dtype "
                "or requires_grad."
            )
    if len({id(p) for own in models for p in own.parameters()}) < sum(map(len, shapes)):
        raise ModelError("model: components must have weights of their own, and two of these share some. Copy them.")
