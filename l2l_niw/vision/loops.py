"""Per-task loops of the methods: the loss in training, the predictions at meta-test."""

import copy
import math
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from l2l_niw.algorithms import NIW, NIWMixture
from l2l_niw.algorithms.special_cases import reptile_objective
from l2l_niw.data import Tasks
from l2l_niw.vision.backbone import Backbone


class Method(ABC):
    """
    **Description**

    The interface of a method. `module` holds everything that is trained, `samples` is the number of posterior samples
    per prediction.
    """

    module: Any  # a Module, which has `clone` if tasks adapt it
    samples: int = 1  # posterior samples, for NIW
    fixed_ways: bool = False  # whether it cannot tell more classes apart than it was built for

    @property
    def backbones(self) -> List[Backbone]:
        """The network that all methods share, of each component."""
        return [part for part in self.module.modules() if isinstance(part, Backbone)]

    @property
    def members(self) -> Sequence["Method"]:
        """What is trained, each on its own tasks: the method itself, or every component of a mixture."""
        if not isinstance(self.module, NIWMixture):
            return [self]
        members = [copy.copy(self) for _ in self.module.components]
        for member, part in zip(members, self.module.components):
            member.module = part
        return members

    @property
    def rates(self) -> Dict[int, float]:
        """Learning rates relative to the config's, by a parameter's id, of those that have others."""
        return {id(p): body.rate for body in self.backbones for p in body.parameters()}

    def groups(self, lr: float) -> List[Dict[str, Any]]:
        """Parameters with their learning rates, for an optimiser."""
        rates, found = self.rates, dict[float, list]()
        for p in self.module.parameters():
            found.setdefault(rates.get(id(p), 1.0), []).append(p)
        return [{"params": own, "lr": rate * lr} for rate, own in found.items()]

    @abstractmethod
    def loss(self, task: Tasks) -> Tuple[Tensor, Tensor]:
        """The query loss of one task, to be back-propagated, and the query's logits or probabilities."""

    @abstractmethod
    def log_probabilities(self, task: Tasks) -> Tensor:
        """Log-probabilities of the query, (m, ways)."""


class GradientBased(Method):
    """
    **Description**

    learn2learn's MAML loop on a classifier with a linear head. It is the same for `MAML` and `NIW`, but that NIW
    averages its predictions over posterior samples.

    **Arguments**

    * **algorithm** (MAML or NIW) - Around a classifier.
    * **steps** (int) - Inner steps.
    * **samples** (int, *optional*, default=1) - Posterior samples per prediction, for NIW.
    """

    fixed_ways = True

    def __init__(self, algorithm: nn.Module, steps: int, samples: int = 1):
        self.module, self.steps, self.samples = algorithm, steps, samples

    def adapted(self, x: Tensor, y: Tensor, test: bool = False) -> Any:
        """A learner after its inner steps, which keep no graph at meta-test."""
        learner = self.module.clone(first_order=test or None)
        for _ in range(self.steps):
            learner.adapt(F.cross_entropy(learner(x), y))
        return learner

    def loss(self, task: Tasks) -> Tuple[Tensor, Tensor]:
        """The adapted learner's cross-entropy on the query, and its logits, (m, ways)."""
        logits = self.adapted(task.x, task.y)(task.x_query)
        return F.cross_entropy(logits, task.y_query), logits

    def log_probabilities(self, task: Tasks) -> Tensor:
        """Log-probabilities of the query, (m, ways): NIW averages probabilities over posterior samples."""
        if isinstance(self.module, NIWMixture) or isinstance(self.module, NIW) and not self.module.options.latent:
            post = self.module.posterior(lambda net: F.cross_entropy(net(task.x), task.y), self.steps)
            with torch.no_grad():
                logits: Any = post.predict(task.x_query, samples=self.samples)
                return logits.log_softmax(-1).logsumexp(0) - math.log(self.samples)
        learner = self.adapted(task.x, task.y, test=True)
        with torch.no_grad():
            return learner(task.x_query).log_softmax(-1)


class Reptile(GradientBased):
    """Reptile: inner steps of training are on support and query, and the initial weights move toward their result."""

    def loss(self, task: Tasks) -> Tuple[Tensor, Tensor]:
        """Half the squared distance between the initial and the adapted weights, and the query's logits, (m, ways)."""
        learner = self.adapted(torch.cat([task.x, task.x_query]), torch.cat([task.y, task.y_query]))
        with torch.no_grad():
            logits = learner(task.x_query)
        return reptile_objective(learner), logits

    def log_probabilities(self, task: Tasks) -> Tensor:
        """Log-probabilities of the query at the weights after the last step, (m, ways)."""
        learner = self.adapted(task.x, task.y, test=True)
        with torch.no_grad():
            return learner(task.x_query).log_softmax(-1)


class ANIL(GradientBased):
    """ANIL: MAML on the linear head alone; the body is shared by all tasks."""

    def __init__(self, body: nn.Module, algorithm: nn.Module, steps: int):
        super().__init__(nn.ModuleDict({"body": body, "readout": algorithm}), steps)

    def adapted(self, x: Tensor, y: Tensor, test: bool = False) -> Callable[[Tensor], Tensor]:
        """The body and a linear head after its inner steps, as a function from query images to logits."""
        body, learner = self.module["body"], self.module["readout"].clone(first_order=test or None)
        features = body(x)
        for _ in range(self.steps):
            learner.adapt(F.cross_entropy(learner(features), y))
        return lambda x_query: learner(body(x_query))


class Episodic(Method):
    """
    **Description**

    A head that conditions on the support: ProtoNet, ridge, MetaQDA. Under NIW the weights of backbone and head have a
    posterior per task, inferred from the support's own loss: by SGLD in training, and by variational inference from the
    prior's mode at meta-test, as in the paper. One or a few images per class hardly narrow the prior, which SGLD at a
    low temperature would not reflect.

    **Arguments**

    * **model** (EpisodicModel, or NIW of one) - The model.
    * **steps** (int, *optional*, default=0) - Inner steps, under NIW.
    * **samples** (int, *optional*, default=1) - Posterior samples per prediction, under NIW.
    * **sharpen** (float, *optional*, default=None) - Power that averaged probabilities are raised to: an average of
        networks that differ is less sure than each of them.
    """

    def __init__(self, model: nn.Module, steps: int = 0, samples: int = 1, sharpen: Optional[float] = None):
        self.module, self.steps, self.samples, self.sharpen = model, steps, samples, sharpen

    def loss(self, task: Tasks) -> Tuple[Tensor, Tensor]:
        """The head's loss on the query, with its penalty, and the class probabilities, (m, ways)."""
        learner = self.module
        if isinstance(learner, NIW):
            learner = learner.clone()
            for _ in range(self.steps):
                learner.adapt(learner(task.x, task.y).nll(task.y))
        prediction = learner(task.x, task.y, task.x_query, task.y_query)
        return prediction.loss(task.y_query), prediction.probs

    def posterior(self, task: Tasks) -> Any:
        """The posterior of a task's weights, at meta-test."""
        return self.module.posterior(lambda net: net(task.x, task.y).nll(task.y), self.steps, from_mode=True)

    def log_probabilities(self, task: Tasks) -> Tensor:
        """Log-probabilities of the query, (m, ways): NIW averages probabilities over posterior samples."""
        predict = self.module
        if isinstance(predict, NIW):
            predict = partial(self.posterior(task).predict, samples=self.samples)
        with torch.no_grad():
            logits = predict(task.x, task.y, task.x_query).logits
            return logits if self.sharpen is None else (self.sharpen * logits).log_softmax(-1)


class LatentEpisodic(Episodic):
    """
    **Description**

    As `Episodic`, for an NIW whose posterior has its full covariance: at meta-test it takes the steps of training.
    Their mean and covariance have the support's curvature in them. U has a learning rate of its own: a step of Adam
    moves every weight by as much, and with the network's rate one would make U longer than it is.
    """

    RATE = 0.01  # U's learning rate over that of the network

    @property
    def rates(self) -> Dict[int, float]:
        """U has a smaller one than all else."""
        return {**super().rates, **{id(p): self.RATE for p in self.module.hyper.directions}}

    def posterior(self, task: Tasks) -> Any:
        """The posterior of a task's weights, at meta-test."""
        return self.module.posterior(lambda net: net(task.x, task.y).nll(task.y), self.steps)


class Ensemble(Method):
    """
    **Description**

    Several trainings of a method, whose probabilities are averaged.

    **Arguments**

    * **members** (sequence) - Methods.
    """

    members: Sequence[Method] = ()

    def __init__(self, members: Sequence[Method]):
        self.members, self.fixed_ways = members, members[0].fixed_ways
        self.module = nn.ModuleList([member.module for member in members])

    def loss(self, task: Tasks) -> Tuple[Tensor, Tensor]:
        """Members are trained one by one."""
        raise NotImplementedError

    def log_probabilities(self, task: Tasks) -> Tensor:
        """Log-probabilities of the query, (m, ways)."""
        logs = torch.stack([member.log_probabilities(task) for member in self.members])
        return logs.logsumexp(0) - math.log(len(logs))
