"""BatchNorm under sampled weights.

Running statistics describe the activations of the weights that they were collected at. A sampled network has other
weights, so its BatchNorm takes the statistics of its own batch: training mode, as in MAML. In evaluation mode the
running statistics of meta-training are used for every sampled network alike, which is right to the extent that tasks
stay near m_0; the learner shares them with the model and `GaussianWeights.predict` never writes to them.
`batch_statistics(model)` takes them away: then both modes agree, and `torch.func.vmap` over weights works.
"""

from torch import nn
from torch.func import replace_all_batch_norm_modules_
from torch.nn.modules.batchnorm import _BatchNorm


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether some BatchNorm normalises by the batch at hand, so that examples are not independent of each other."""
    return any(isinstance(m, _BatchNorm) and (m.training or m.running_mean is None) for m in module.modules())


def batch_statistics(model: nn.Module) -> nn.Module:
    """
    **Description**

    Removes the running statistics of every BatchNorm, in place, and returns the model. It then
    normalises by the batch's statistics in evaluation mode too, and writes to no buffer, which
    `torch.func.vmap` over weights does not allow.

    **Example**

    ~~~python
    model = batch_statistics(l2l.vision.models.CNN4(output_size=5, hidden_size=32))
    ~~~
    """
    return replace_all_batch_norm_modules_(model)
