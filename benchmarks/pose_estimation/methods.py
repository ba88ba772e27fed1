"""Methods: a loss of a batch of tasks, and predictions of its queries."""

import torch
from torch import nn

from l2l_niw import NIW, BatchedEpisodes
from l2l_niw.heads import FunctionalContrast
from pose_estimation.networks import networks, whole_network
from pose_estimation.spaces import Components, components_of

HYPER = 5  # times the weights' learning rate is that of variances: in log, they have further to go


def support_loss(network, x, y):
    """What inner steps minimise: the support's own negative log-likelihood."""
    return network(x, y).nll(y)


def squared_loss(network, x, y):
    """The same of a linear layer, whose noise is no matter of a task."""
    return (network(x, y).mean - y).square().mean()


def query_loss(network, x, y, x_query, y_query):
    return network(x, y, x_query).nll(y_query)


def is_weight(name, parameter):
    """Whether it is no noise and no scale of a prior, which all tasks share."""
    return not name.endswith((".noise.log", ".prior_scale.log"))


class Plain:
    """
    **Description**

    A row of the table: a head that is trained as it stands, on the queries' loss.

    * `module` - Everything that is trained.
    * `backward(tasks)` - Gives the parameters the gradients of a batch, and returns its mean query loss.
    * `predict(tasks)` - `Components` of the queries' targets, (tasks, m, components, targets).
    * `groups(lr)` - Parameter groups for an optimiser.

    **Arguments**

    * **column** (Column) - Of the tasks.
    * **head** (str) - In `HEADS`.
    """

    def __init__(self, column, head):
        self.trunk, (self.model,) = networks(column, head)
        self.module = nn.ModuleList([self.trunk, self.model])

    def groups(self, lr):
        return [{"params": list(self.module.parameters()), "lr": lr}]

    def backward(self, tasks):
        support, query = self.trunk.pair(tasks.x, tasks.x_query)
        prediction = self.model(support, tasks.y, query, tasks.y_query)
        prediction.loss(tasks.y_query).backward()
        return prediction.nll(tasks.y_query).item()

    @torch.no_grad()
    def predict(self, tasks):
        support, query = self.trunk.pair(tasks.x, tasks.x_query)
        return components_of(self.model(support, tasks.y, query))


class Inferred(Plain):
    """
    **Description**

    A head under NIW. The encoder's last layer and the head are random, or with random='all' the convolutions too;
    the other weights are shared by all tasks. Inner steps are on the support's own likelihood, and predictions are
    averaged over posterior samples, from the prior's mode as in the paper.

    **Arguments**

    * **column, head** - As of `Plain`.
    * **inner_lr** (float) - Of inner steps.
    * **components** (int, *optional*, default=1) - Of a mixture of NIWs, each with an encoder of its own.
    * **responsibilities** (str, *optional*, default='evidence') - As of `BatchedEpisodes`.
    * **random** (str, *optional*, default='last') - Or 'all', of one component.
    """

    STEPS, SAMPLES = 3, 10  # inner steps, and posterior samples of a prediction
    OPTIONS = {"second_order": "none", "temperature": 1e-4, "prior_precision": 0.05**-2}  # those of heads on images

    def __init__(self, column, head, inner_lr, components=1, responsibilities="evidence", random="last"):
        if random == "last":
            self.trunk, models = networks(column, head, components, inner=True)
        else:
            self.trunk, models = None, [whole_network(column, head)]
        self.niw = NIW(models if components > 1 else models[0], inner_lr, random=is_weight, **self.OPTIONS)
        self._finish(responsibilities)

    def _finish(self, responsibilities="evidence"):
        self.module = nn.ModuleList([self.niw] if self.trunk is None else [self.trunk, self.niw])
        self.episodes = BatchedEpisodes(self.niw, support_loss, query_loss, self.STEPS, responsibilities)

    def groups(self, lr):
        parts = self.niw.components if hasattr(self.niw, "components") else [self.niw]
        hyper = [p for part in parts for p in part.hyper.parameters()]
        own = {id(p) for p in hyper}
        others = [p for p in self.module.parameters() if id(p) not in own]
        return [{"params": others, "lr": lr}, {"params": hyper, "lr": HYPER * lr}]

    def features(self, tasks):
        return (tasks.x, tasks.x_query) if self.trunk is None else self.trunk.pair(tasks.x, tasks.x_query)

    def backward(self, tasks):
        support, query = self.features(tasks)
        loss = self.episodes((support.detach(), tasks.y), (support, tasks.y, query, tasks.y_query))
        (loss + self.penalty(support, query, tasks)).backward()
        return loss.item()

    def penalty(self, support, query, tasks):
        """Functional contrastive learning tells the tasks of a batch apart, so it is the common network's."""
        model = self.niw.module
        head = getattr(model.head, "head", None) if hasattr(model, "head") else None
        if not isinstance(head, FunctionalContrast):
            return 0.0
        features = model.features(support, 1), model.features(query, 1)
        return head.weight * head.contrast(features[0], tasks.y, features[1], tasks.y_query)

    @torch.no_grad()
    def predict(self, tasks):
        support, query = self.features(tasks)
        post = self.episodes.posterior((support, tasks.y), elbo_steps=self.STEPS)
        vectorize = self.trunk is not None or None  # convolutions are faster one by one
        return components_of(post.predict(support, tasks.y, query, samples=self.SAMPLES, vectorize=vectorize))


class Ranked(Inferred):
    """
    **Description**

    A head whose last layers differ between tasks along a few learned directions, with the full covariance of their
    posterior: Gauss-Newton steps, and the linearised predictive. The convolutions are shared: their Jacobian would take
    thirty times as long.

    **Arguments**

    * **column, head** - As of `Plain`.
    * **kl_weight** (float) - Of the support's evidence.
    """

    STEPS, RANK = 2, 8  # Gauss-Newton steps, and directions

    def __init__(self, column, head, kl_weight):
        self.trunk, (model,) = networks(column, head, inner=True)
        self.niw = NIW(model, lr=1.0, rank=self.RANK, random=is_weight, kl_weight=kl_weight)
        self._finish()

    def groups(self, lr):
        return [{"params": list(self.module.parameters()), "lr": lr}]

    def predict(self, tasks):
        with torch.no_grad():
            support, query = self.features(tasks)
            found = self.episodes.posterior((support, tasks.y)).linearised(support, tasks.y, query)
        return Components(*(part.detach() for part in components_of(found)))


class Adapted(Plain):
    """
    **Description**

    learn2learn's loop on the whole network with a linear layer, the same for MAML and for NIW in its place.

    **Arguments**

    * **column** (Column) - Of the tasks.
    * **wrap** (callable) - From a model to MAML or NIW.
    """

    STEPS, SAMPLES = 5, 10  # inner steps, and posterior samples of NIW's predictions

    def __init__(self, column, wrap):
        self.module = wrap(whole_network(column, "linear"))

    def adapted(self, x, y, test=False):
        learner = self.module.clone(first_order=test or None)
        for _ in range(self.STEPS):
            learner.adapt(squared_loss(learner, x, y))
        return learner

    def backward(self, tasks):
        total = 0.0
        for x, y, x_query, y_query in zip(*tasks):
            loss = self.adapted(x, y)(x, y, x_query).nll(y_query) / len(tasks.x)
            loss.backward()
            total += loss.item()
        return total

    def predict(self, tasks):
        found = [self.predict_one(*task[:3]) for task in zip(*tasks)]
        return Components(*map(torch.stack, zip(*found)))

    def predict_one(self, x, y, x_query):
        if isinstance(self.module, NIW):
            post = self.module.posterior(lambda network: squared_loss(network, x, y), self.STEPS)
            with torch.no_grad():
                return components_of(post.predict(x, y, x_query, samples=self.SAMPLES))
        with torch.enable_grad():
            learner = self.adapted(x, y, test=True)
        with torch.no_grad():
            return components_of(learner(x, y, x_query))
