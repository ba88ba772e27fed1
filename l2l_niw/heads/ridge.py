"""Ridge regression on the support in closed form, and its Bayesian reading."""

from typing import Optional

from torch import Tensor
from torch.nn import functional as F

from l2l_niw.heads.base import TASKS, Head, Positive, Targets, check_choice
from l2l_niw.heads.predictions import Classes, Evidence, Gaussian, Prediction
from l2l_niw.utils._linear_algebra import ridge_factor, ridge_spread, ridge_weights


def with_constant(features: Tensor) -> Tensor:
    """Features with a constant 1 appended, (..., n, d + 1)."""
    return F.pad(features, (0, 1), value=1.0)


class Ridge(Head):
    """
    **Description**

    The linear layer w = argmin |phi w - y|^2 + lam |w|^2 of the support, differentiable in the features and
    in lam. For classification y is one-hot and logits are scale * phi_q w, as in R2D2.

    **Arguments**

    * **task** (str, *optional*, default='classification') - Or 'regression'.
    * **lam** (float, *optional*, default=0.1) - The regulariser.
    * **learn_lam** (bool, *optional*, default=False) - Whether it is learned, in log.
    * **bias** (bool, *optional*, default=True) - Whether features get a constant 1, whose weight is
        regularised as the others are.
    * **scale** (float, *optional*, default=1.0) - What a classification's logits are multiplied by.
    * **learn_scale** (bool, *optional*, default=True) - Whether it is learned, in log.
    * **noise** (float, *optional*, default=1.0) - A regression's standard deviation.
    * **learn_noise** (bool, *optional*, default=False) - Whether it is learned, in log.

    **References**

    1. Bertinetto et al. 2019. "Meta-learning with differentiable closed-form solvers."

    **Example**

    ~~~python
    model = EpisodicModel(MLP(1, (40, 40), activate_last=True), Ridge('regression', lam=0.1))
    ~~~
    """

    def __init__(
        self,
        task: str = "classification",
        lam: float = 0.1,
        learn_lam: bool = False,
        bias: bool = True,
        scale: float = 1.0,
        learn_scale: bool = True,
        noise: float = 1.0,
        learn_noise: bool = False,
    ):
        super().__init__()
        check_choice("task", task, TASKS)
        self.task, self.bias = task, bias
        self.lam = Positive("lam", lam, learn_lam)
        if task == "classification":
            self.scale = Positive("scale", scale, learn_scale)
        else:
            self.noise = Positive("noise", noise, learn_noise)

    def predict(self, support: Tensor, y: Targets, query: Tensor, query_y: Optional[Tensor]) -> Prediction:
        """Scaled logits, (..., m, ways), or a Gaussian's means, (..., m, targets), by ridge regression."""
        if self.bias:
            support, query = with_constant(support), with_constant(query)
        lower = ridge_factor(support, self.lam())
        if self.task == "regression":
            return Gaussian(query @ ridge_weights(support, lower, y), self.noise())
        scores = query @ ridge_weights(support, lower, y.onehot.to(support.dtype))
        return Classes(self.scale() * scores, y)


class BayesianRidge(Head):
    """
    **Description**

    Bayesian linear regression on the features: w ~ N(0, prior_scale^2 I), y = phi w + noise. The mean is
    that of `Ridge` with lam = (noise / prior_scale)^2, the variance is the exact one, and without a
    query the prediction is the support's `Evidence`, N(0, prior_scale^2 phi phi^T + noise^2 I): what
    five points say of the features.

    **Arguments**

    * **noise** (float, *optional*, default=0.3) - Standard deviation of the noise.
    * **prior_scale** (float, *optional*, default=1.0) - Standard deviation of the linear layer's weights.
    * **learned** (bool, *optional*, default=True) - Whether both are learned, in log.
    * **bias** (bool, *optional*, default=True) - Whether features get a constant 1.

    **References**

    1. Bishop. 2006. "Pattern Recognition and Machine Learning", Sec. 3.3 and 3.5.

    **Example**

    ~~~python
    model = EpisodicModel(MLP(1, (40, 40), activate_last=True), BayesianRidge(noise=0.3))
    learner = NIW(model, lr=0.01).clone()
    learner.adapt(learner(x, y).nll(y))           # the evidence
    prediction = learner(x, y, x_query)           # mean and stddev
    ~~~
    """

    task = "regression"

    def __init__(self, noise: float = 0.3, prior_scale: float = 1.0, learned: bool = True, bias: bool = True):
        super().__init__()
        self.bias = bias
        self.noise = Positive("noise", noise, learned)
        self.prior_scale = Positive("prior_scale", prior_scale, learned)

    def _scaled(self, features: Tensor) -> Tensor:
        """In double precision, as all that is solved: a task's own noise may be small beside its features."""
        return self.prior_scale().double() * (with_constant(features) if self.bias else features).double()

    def predict(self, support: Tensor, y: Tensor, query: Tensor, query_y: Optional[Tensor]) -> Gaussian:
        """The posterior predictive, a Gaussian over (..., m, targets) whose variance includes the noise."""
        phi, phi_query, noise = self._scaled(support), self._scaled(query), self.noise().double()
        lower = ridge_factor(phi, noise.square())
        spread = ridge_spread(phi, lower, phi_query, noise.square())
        mean, stddev = phi_query @ ridge_weights(phi, lower, y.double()), noise * (1.0 + spread).sqrt().unsqueeze(-1)
        return Gaussian(mean.to(support.dtype), stddev.to(support.dtype))

    def explain(self, support: Tensor, y: Tensor) -> Evidence:
        """The support's marginal likelihood, N(0, prior_scale^2 phi phi^T + noise^2 I)."""
        return Evidence(self._scaled(support), self.noise().double(), y.shape[-1])
