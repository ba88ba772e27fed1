"""How far a pose is off: azimuths, rotations and positions."""

import torch
from torch import Tensor

from l2l_niw.errors import ArgumentError


def _check(prediction: Tensor, target: Tensor, width: int) -> None:
    if prediction.shape != target.shape or prediction.shape[-1:] != (width,):
        raise ArgumentError(
            f"prediction and target must both be (..., {width}); got {tuple(prediction.shape)} and "
            f"{tuple(target.shape)}."
        )


def _unit(vectors: Tensor) -> Tensor:
    """Of length 1."""
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    if not (length > 0).all():
        raise ArgumentError("prediction or target has a row that is 0 or not a number, which is no direction.")
    return vectors / length


def angular_error(prediction: Tensor, target: Tensor) -> Tensor:
    """
    **Description**

    The angle between two azimuths, in degrees from 0 to 180: ShapeNet-1D's error. A prediction need not be of length 1.

    **Arguments**

    * **prediction, target** (Tensor) - (sin, cos), (..., 2).

    **Returns** an angle for every row, (...).

    **Example**

    ~~~python
    angular_error(prediction.mean, y_query).mean()
    ~~~
    """
    _check(prediction, target, 2)
    (s, c), (t, d) = _unit(prediction).unbind(-1), _unit(target).unbind(-1)
    return torch.rad2deg(torch.atan2(s * d - c * t, s * t + c * d).abs())


def quaternion_distance(prediction: Tensor, target: Tensor) -> Tensor:
    """
    **Description**

    ShapeNet-2D's error, min(|q - p|_1, |-q - p|_1) with the prediction p divided by its length: q and -q are one
    rotation. The paper has it times 100.

    **Arguments**

    * **prediction** (Tensor) - Quaternions of any length above 0, (..., 4).
    * **target** (Tensor) - Unit quaternions, their parts in the same order, (..., 4).

    **Returns** a distance for every row, (...).

    **References**

    1. Gao et al. 2022. "What Matters For Meta-Learning Vision Regression Tasks?" CVPR.
    """
    _check(prediction, target, 4)
    prediction = _unit(prediction)
    return torch.minimum((target - prediction).abs().sum(-1), (target + prediction).abs().sum(-1))


def rotation_error(prediction: Tensor, target: Tensor) -> Tensor:
    """
    **Description**

    The angle of the rotation that leads from one to the other, 2 arccos |<p, q>|, in degrees from 0 to 180.

    **Arguments**

    * **prediction, target** (Tensor) - Quaternions of any length above 0, (..., 4).

    **Returns** an angle for every row, (...).
    """
    _check(prediction, target, 4)
    p, q = _unit(prediction), _unit(target)
    near, far = torch.linalg.vector_norm(p - q, dim=-1), torch.linalg.vector_norm(p + q, dim=-1)
    return torch.rad2deg(4 * torch.atan2(torch.minimum(near, far), torch.maximum(near, far)))  # arccos is bad near 1


def pixel_distance(prediction: Tensor, target: Tensor) -> Tensor:
    """
    **Description**

    The Euclidean distance of two positions, in pixels: Distractor's error.

    **Arguments**

    * **prediction, target** (Tensor) - Row and column, (..., 2).

    **Returns** a distance for every row, (...).
    """
    _check(prediction, target, 2)
    return torch.linalg.vector_norm(prediction - target, dim=-1)
