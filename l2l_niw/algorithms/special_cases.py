"""MAML, ProtoNet and Reptile as settings of NIW (Sec. 3.1, "Interpretation").

Each one lets the posterior be a spike, V_i -> 0, and drops a part of the two problems that NIW solves:
the episode's, Eq. 11, and the one over L_0, Eq. 14.

| | the episode's problem, Eq. 11 | the objective, Eq. 14 |
|---|---|---|
| MAML | a few gradient steps on l_i from m_0, with their graph | f_i alone; g_i dropped |
| ProtoNet | l_i dropped, so m_i* = m_0: no step is taken | f_i alone, with a nearest-centroid head; g_i dropped |
| Reptile | the penalties dropped: m_i* = the chain's last iterate, a constant | g_i's (m_i* - m_0)^2; f_i dropped |

ProtoNet needs no settings: it is `niw.clone()` without a step, of an `EpisodicModel` with a `NearestCentroid` head.
"""

from typing import Any, Dict, Optional

from torch import Tensor, nn

from l2l_niw.algorithms.learner import NIWLearner
from l2l_niw.algorithms.niw import NIW


def maml(
    model: nn.Module,
    lr: float,
    first_order: bool = False,
    allow_unused: Optional[bool] = None,
    allow_nograd: bool = False,
) -> NIW:
    """
    **Description**

    NIW whose meta-gradient is that of `learn2learn.algorithms.MAML`: at temperature 0 the chain has no
    noise and no prior, and the KL has no weight. m_i* is a function of m_0 through the graph of the
    steps, or for `first_order` at a constant distance. No step size is learned.

    **Arguments**

    * **model, lr, first_order, allow_unused, allow_nograd** - As in `NIW`.

    **Returns** an `NIW` around the model.

    **Example**

    ~~~python
    learner = maml(model, lr=0.1).clone()
    learner.adapt(loss(learner(x), y))
    loss(learner(x_query), y_query).backward()
    ~~~
    """
    settings: Dict[str, Any] = {"temperature": 0.0, "second_order": "all", "learn_step_sizes": False}
    return NIW(model, lr, first_order, allow_unused, allow_nograd, **settings)


def reptile(model: nn.Module, lr: float, allow_unused: Optional[bool] = None, allow_nograd: bool = False) -> NIW:
    """
    **Description**

    NIW whose m_i* is the last iterate of gradient descent on the task, with P_0 = 1. SGD of
    rate epsilon on `reptile_objective` is Reptile's m_0 <- m_0 + epsilon (m_i* - m_0).

    **Arguments**

    * **model, lr, allow_unused, allow_nograd** - As in `NIW`.

    **Returns** an `NIW` around the model.

    **Example**

    ~~~python
    learner = reptile(model, lr=0.1).clone()
    learner.adapt(loss(learner(x), y))
    reptile_objective(learner).backward()
    ~~~
    """
    settings: Dict[str, Any] = {"temperature": 0.0, "prior_precision": 1.0, "learn_step_sizes": False}
    return NIW(model, lr, True, allow_unused, allow_nograd, **settings)


def reptile_objective(learner: NIWLearner) -> Tensor:
    """What is left of g_i / 2, a scalar: (m_i* - m_0)^2 / 2, for P_0 = 1, V_i -> 0 and m_i* a constant."""
    mean = learner.posterior().mean
    parameters = dict(learner.niw.module.named_parameters())
    return 0.5 * sum((mean[name].detach() - parameters[name]).square().sum() for name in mean)
