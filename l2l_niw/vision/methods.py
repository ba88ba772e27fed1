"""The methods: what each makes of a task, with the same backbone."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Callable, Dict, List, Optional, Tuple

import learn2learn as l2l
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from l2l_niw.data import Tasks
from l2l_niw.episodic import EpisodicModel
from l2l_niw.errors import ArgumentError
from l2l_niw.heads import LeaveOneOut, MetaQDA, NearestCentroid, Ridge
from l2l_niw.niw import NIW
from l2l_niw.posterior import Posterior
from l2l_niw.special_cases import reptile, reptile_objective
from l2l_niw.vision.backbone import SHAPES, Backbone
from l2l_niw.vision.config import Config

OWN = ("lr", "inner_lr", "steps", "temperature", "prior_std", "samples")  # what methods may differ in


class Method(ABC):
    """
    **Description**

    What the loop asks of a method. `module` holds everything that is trained.

    * `loss(task)` - The query's loss of one task, to be back-propagated, and its logits or probabilities.
    * `log_probabilities(task)` - Of the query, (m, ways).
    """

    module: nn.Module

    @property
    def backbone(self) -> Backbone:
        return next(part for part in self.module.modules() if isinstance(part, Backbone))

    @abstractmethod
    def loss(self, task: Tasks) -> Tuple[Tensor, Tensor]: ...

    @abstractmethod
    def log_probabilities(self, task: Tasks) -> Tensor: ...


class Swap(Method):
    """
    **Description**

    learn2learn's MAML loop on a linear readout. Whether the algorithm is its `MAML` or `NIW` makes no difference to
    it, but for the prediction, which NIW averages over networks.

    **Arguments**

    * **algorithm** (MAML or NIW) - Around a classifier.
    * **steps** (int) - Inner steps.
    * **samples** (int) - Networks of a prediction.
    """

    def __init__(self, algorithm: nn.Module, steps: int, samples: int = 1):
        self.module, self.steps, self.samples = algorithm, steps, samples

    def adapted(self, x: Tensor, y: Tensor, test: bool = False) -> nn.Module:
        """A learner after its steps, which keep no more than they need for a test."""
        learner = self.module.clone(first_order=test or None)
        for _ in range(self.steps):
            learner.adapt(F.cross_entropy(learner(x), y))
        return learner

    def loss(self, task: Tasks) -> Tuple[Tensor, Tensor]:
        logits = self.adapted(task.x, task.y)(task.x_query)
        return F.cross_entropy(logits, task.y_query), logits

    def log_probabilities(self, task: Tasks) -> Tensor:
        learner = self.adapted(task.x, task.y, test=True)
        with torch.no_grad():
            if isinstance(self.module, NIW):
                logits = learner.posterior().predict(task.x_query, samples=self.samples)
                return logits.log_softmax(-1).logsumexp(0) - math.log(self.samples)
            return learner(task.x_query).log_softmax(-1)


class Reptile(Swap):
    """Reptile: the inner steps of training are on all of a task's images, and its start goes toward where they end."""

    def loss(self, task: Tasks) -> Tuple[Tensor, Tensor]:
        learner = self.adapted(torch.cat([task.x, task.x_query]), torch.cat([task.y, task.y_query]))
        with torch.no_grad():
            logits = learner(task.x_query)
        return reptile_objective(learner), logits

    def log_probabilities(self, task: Tasks) -> Tensor:
        learner = self.adapted(task.x, task.y, test=True)
        with torch.no_grad():
            return learner(task.x_query).log_softmax(-1)


class ANIL(Swap):
    """MAML on the readout alone; the body is shared by all tasks."""

    def __init__(self, body: nn.Module, algorithm: nn.Module, steps: int):
        super().__init__(nn.ModuleDict({"body": body, "readout": algorithm}), steps)

    def adapted(self, x: Tensor, y: Tensor, test: bool = False) -> Callable[[Tensor], Tensor]:
        body, learner = self.module["body"], self.module["readout"].clone(first_order=test or None)
        features = body(x)
        for _ in range(self.steps):
            learner.adapt(F.cross_entropy(learner(features), y))
        return lambda x_query: learner(body(x_query))


class Episodic(Method):
    """
    **Description**

    A head that takes the support as it is: ProtoNet, ridge, MetaQDA. Under NIW the backbone's and the head's weights
    have a posterior for every task, from inner steps on what the support says of itself: of a chain in training, and
    of variational inference from the prior's mode at meta-test, as in the paper. One or a few images a class hardly
    narrow the prior, and a cold chain would not know.

    **Arguments**

    * **model** (EpisodicModel, or NIW of one) - The model.
    * **steps** (int, *optional*, default=0) - Inner steps, under NIW.
    * **samples** (int, *optional*, default=1) - Networks of a prediction, under NIW.
    """

    def __init__(self, model: nn.Module, steps: int = 0, samples: int = 1):
        self.module, self.steps, self.samples = model, steps, samples

    def loss(self, task: Tasks) -> Tuple[Tensor, Tensor]:
        learner = self.module
        if isinstance(learner, NIW):
            learner = learner.clone()
            for _ in range(self.steps):
                learner.adapt(learner(task.x, task.y).nll(task.y))
        prediction = learner(task.x, task.y, task.x_query, task.y_query)
        return prediction.loss(task.y_query), prediction.probs

    def posterior(self, task: Tasks) -> Posterior:
        """Of a task's weights, at meta-test."""
        return self.module.clone().posterior(lambda net: net(task.x, task.y).nll(task.y), steps=self.steps)

    def log_probabilities(self, task: Tasks) -> Tensor:
        predict = self.module
        if isinstance(predict, NIW):
            predict = partial(self.posterior(task).predict, samples=self.samples)
        with torch.no_grad():
            return predict(task.x, task.y, task.x_query).logits


def readout(make: Callable) -> Callable:
    """A method of a classifier with a linear readout."""

    def made(config: Config) -> Method:
        body = Backbone(config)
        return make(body, nn.Linear(body.features, config.ways), config)

    return made


def head(make: Callable, fixed: bool = False) -> Callable:
    """A head by itself, on a backbone that is trained with it or stays as it was pretrained."""

    def made(config: Config) -> Method:
        body = Backbone(config).requires_grad_(not fixed)
        return Episodic(EpisodicModel(body, make(body.features)))

    return made


def niw(model: nn.Module, config: Config) -> NIW:
    precision = None if config.prior_std is None else config.prior_std**-2
    return NIW(model, config.inner_lr, temperature=config.temperature, prior_precision=precision)


def niw_head(make: Callable) -> Callable:
    """A head under NIW. With two shots or more inner steps predict each support image from the others."""

    def made(config: Config) -> Method:
        body = Backbone(config)
        own = make(body.features)
        model = EpisodicModel(body, own if config.shots == 1 else LeaveOneOut(own))
        return Episodic(niw(model, config), config.steps, config.samples)

    return made


def protonet_head(features: int) -> NearestCentroid:
    return NearestCentroid("euclidean", scale=5.0 / features, learn_scale=True)


def ridge_head(features: int) -> Ridge:
    """The regulariser starts at the size of a feature's squared norm: a small one would fit the support's noise."""
    return Ridge(lam=float(features), learn_lam=True, scale=10.0)


def qda_head(features: int, inference: str = "bayesian") -> MetaQDA:
    """Classes start wide beside the backbone's features, so that logits start small."""
    spread = 10.0 * features if inference == "bayesian" else 30.0 * (2 * features + 4)
    return MetaQDA(features, inference, spread=spread)


qda_map_head = partial(qda_head, inference="map")


@dataclass(frozen=True)
class Spec:
    """
    **Arguments**

    * **title** (str) - As it stands in tables.
    * **build** (callable) - From a config to a method.
    * **lr, inner_lr, steps, temperature, prior_std, samples** - What a config without them gets; None for what the
        method does not have.
    * **twin** (str, *optional*, default=None) - The same network without NIW.
    * **fixed** (bool, *optional*, default=False) - Whether the backbone stays as it was pretrained.
    """

    title: str
    build: Callable[[Config], Method]
    lr: float = 0.003
    inner_lr: Optional[float] = None
    steps: Optional[int] = None
    temperature: Optional[float] = None
    prior_std: Optional[float] = None
    samples: Optional[int] = None
    twin: Optional[str] = None
    fixed: bool = False


def learn2learn_maml(first_order: bool) -> Callable:
    return readout(
        lambda body, linear, config: Swap(
            l2l.algorithms.MAML(nn.Sequential(body, linear), lr=config.inner_lr, first_order=first_order), config.steps
        )
    )


HEAD = {"inner_lr": 0.01, "steps": 3, "temperature": 1e-4, "prior_std": 0.05, "samples": 10}  # under NIW
METHODS: Dict[str, Spec] = {
    "maml": Spec("MAML", learn2learn_maml(False), inner_lr=0.1, steps=5),
    "fomaml": Spec("first-order MAML", learn2learn_maml(True), inner_lr=0.1, steps=5),
    "anil": Spec(
        "ANIL",
        readout(lambda body, linear, c: ANIL(body, l2l.algorithms.MAML(linear, lr=c.inner_lr), c.steps)),
        inner_lr=0.1,
        steps=5,
    ),
    "reptile": Spec(
        "Reptile",
        readout(lambda body, linear, c: Reptile(reptile(nn.Sequential(body, linear), c.inner_lr), c.steps)),
        inner_lr=0.1,
        steps=5,
    ),
    "protonet": Spec("ProtoNet", head(protonet_head)),
    "ridge": Spec("ridge (R2D2)", head(ridge_head)),
    "metaqda-map-fixed": Spec("MetaQDA, MAP, fixed backbone", head(qda_map_head, fixed=True), fixed=True),
    "metaqda-fixed": Spec("MetaQDA, Bayesian, fixed backbone", head(qda_head, fixed=True), fixed=True),
    "metaqda-map": Spec("MetaQDA, MAP", head(qda_map_head)),
    "metaqda": Spec("MetaQDA, Bayesian", head(qda_head)),
    "niw": Spec(
        "NIW, linear",
        readout(lambda body, linear, c: Swap(niw(nn.Sequential(body, linear), c), c.steps, c.samples)),
        inner_lr=0.1,
        steps=5,
        temperature=1e-4,
        samples=5,
        twin="maml",
    ),
    "niw-ncc": Spec("NIW, nearest centroid", niw_head(protonet_head), **HEAD, twin="protonet"),
    "niw-ridge": Spec("NIW, ridge", niw_head(ridge_head), **HEAD, twin="ridge"),
    "niw-qda": Spec("NIW, MetaQDA", niw_head(qda_head), **HEAD, twin="metaqda"),
}


def trainable(config: Config) -> List[str]:
    """The methods that a config leaves something to train from: a fixed backbone has to be pretrained."""
    return [name for name, spec in METHODS.items() if config.pretraining or not spec.fixed]


def complete(config: Config) -> Config:
    """A config with the method's own values where it has none, checked."""
    if config.method not in METHODS:
        raise ArgumentError(f"method must be one of {', '.join(METHODS)}; got {config.method!r}.")
    if config.dataset not in SHAPES:
        raise ArgumentError(f"dataset must be one of {', '.join(SHAPES)}; got {config.dataset!r}.")
    spec = METHODS[config.method]
    if spec.fixed and not config.pretraining:
        raise ArgumentError(
            f"pretraining must be 1 or more for {config.method}, whose backbone stays as it was pretrained. 10 will do."
        )
    return config.filled(**{name: getattr(spec, name) for name in OWN})


def build(config: Config) -> Method:
    """
    **Description**

    A method at its start, as the config's seed has it.

    **Example**

    ~~~python
    method = build(Config(method='niw-ncc', dataset='omniglot', ways=20))
    ~~~
    """
    config = complete(config)
    torch.manual_seed(config.seed)
    return METHODS[config.method].build(config)
