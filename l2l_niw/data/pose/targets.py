"""Targets of pose estimation, and what a task's own offset makes of them: task augmentation."""

from typing import Callable, Dict

import numpy as np
import torch
from torch import Tensor

from l2l_niw.errors import ArgumentError

SCALE = 10.0  # Pascal-1D's: a whole turn


def azimuth_vector(azimuth: Tensor) -> Tensor:
    """(sin, cos) of azimuths in degrees, (..., 2)."""
    radians = torch.deg2rad(azimuth)
    return torch.stack([radians.sin(), radians.cos()], -1)


def azimuth_scaled(azimuth: Tensor) -> Tensor:
    """Azimuths from 0 to 10, as Pascal-1D has them: 10 times the part of a turn, (..., 1)."""
    return (azimuth % 360 / 360 * SCALE).unsqueeze(-1)


def quaternion_product(p: Tensor, q: Tensor) -> Tensor:
    """The quaternion of the rotation by q and then by p, (..., 4), real part first."""
    a, u = p[..., :1], p[..., 1:]
    b, v = q[..., :1], q[..., 1:]
    return torch.cat([a * b - (u * v).sum(-1, keepdim=True), a * v + b * u + torch.linalg.cross(u, v)], -1)


def turn(axis: int, angle: Tensor) -> Tensor:
    """The quaternion of a rotation by an angle in degrees about axis 0, 1 or 2: x, y or z."""
    half = torch.deg2rad(angle) / 2
    parts = [half.cos(), *(half.sin() if k == axis else torch.zeros_like(half) for k in range(3))]
    return torch.stack(parts, -1)


def fixed_sign(quaternion: Tensor) -> Tensor:
    """Of q and -q, which are one rotation, that with a real part of at least 0."""
    return torch.where(quaternion[..., :1] < 0, -quaternion, quaternion)


def rotation_quaternion(azimuth: Tensor, elevation: Tensor) -> Tensor:
    """
    **Description**

    The unit quaternion (w, x, y, z) of `camera_rotation`, R_x(elevation) R_y(-azimuth), with w of at least 0. It is
    continuous in the azimuth from -180 to 180 degrees, so that networks are spared a jump where azimuths stay in there.

    **Arguments**

    * **azimuth, elevation** (Tensor) - In degrees, of any one shape.

    **Returns** (..., 4).
    """
    return fixed_sign(quaternion_product(turn(0, elevation), turn(1, -azimuth)))


def offset_vector(targets: Tensor, random: np.random.Generator, size: int) -> Tensor:
    """The azimuths (sin, cos) of a task, turned by one angle, uniform on the circle."""
    sine, cosine = azimuth_vector(torch.tensor(random.uniform(0, 360), dtype=targets.dtype))
    s, c = targets.unbind(-1)
    return torch.stack([s * cosine + c * sine, c * cosine - s * sine], -1)


def offset_scaled(targets: Tensor, random: np.random.Generator, size: int) -> Tensor:
    """The azimuths from 0 to 10 of a task, all by one amount farther round the circle."""
    return (targets + random.uniform(0, SCALE)) % SCALE


def offset_quaternion(targets: Tensor, random: np.random.Generator, size: int) -> Tensor:
    """
    The rotations of a task, all with an azimuth smaller by one angle of up to half a turn: from 0 to 180 degrees it
    goes to where `rotation_quaternion` does not jump.
    """
    angle = torch.tensor(random.uniform(-180, 0), dtype=targets.dtype)
    return fixed_sign(quaternion_product(targets, turn(1, -angle).expand_as(targets)))


def offset_position(targets: Tensor, random: np.random.Generator, size: int) -> Tensor:
    """The positions of a task, all by one offset of up to an eighth of the image farther, round its edges."""
    return (targets + torch.tensor(random.uniform(0, size / 8, 2), dtype=targets.dtype)) % size


OFFSETS: Dict[str, Callable[[Tensor, np.random.Generator, int], Tensor]] = {
    "vector": offset_vector,
    "scaled": offset_scaled,
    "quaternion": offset_quaternion,
    "position": offset_position,
}
WIDTHS = {"vector": 2, "scaled": 1, "quaternion": 4, "position": 2}


def pose_targets(kind: str, azimuth: Tensor, elevation: Tensor) -> Tensor:
    """
    **Description**

    What a task's targets are, of a camera at these angles.

    **Arguments**

    * **kind** (str) - 'vector', (sin, cos) of the azimuth; 'scaled', the azimuth from 0 to 10; 'quaternion', of
        azimuth and elevation.
    * **azimuth, elevation** (Tensor) - In degrees, of any one shape.
    """
    if kind == "vector":
        found = azimuth_vector(azimuth)
    elif kind == "scaled":
        found = azimuth_scaled(azimuth)
    elif kind == "quaternion":
        found = rotation_quaternion(azimuth, elevation)
    else:
        raise ArgumentError(f"kind must be vector, scaled or quaternion; got {kind!r}.")
    return found.float()
