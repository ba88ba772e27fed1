"""Rendered views of many objects, on disk once they were made, and images of them in grey or colour."""

import hashlib
from typing import Dict, NamedTuple, Optional, Sequence

import numpy as np
import torch
from torch import Tensor

from l2l_niw.data.pose.meshes import Mesh
from l2l_niw.data.pose.render import LIGHT, render
from l2l_niw.errors import ArgumentError
from l2l_niw.utils._checks import check_number
from l2l_niw.utils._disk_cache import disk_cache

RENDERER = 1  # to be raised whenever `render` changes, for files that older versions left


class Views(NamedTuple):
    """
    Views of objects, in bytes, and where the camera was, in degrees.

    * `shade`, `alpha` - (objects, views, size, size), as of `View`.
    * `azimuth`, `elevation` - (objects, views).
    """

    shade: Tensor
    alpha: Tensor
    azimuth: Tensor
    elevation: Tensor


def rendered(
    meshes: Sequence[Mesh],
    azimuth: np.ndarray,
    elevation: np.ndarray,
    size: int = 64,
    distance: Optional[float] = None,
    light: Sequence[float] = LIGHT,
) -> Views:
    """
    **Description**

    Views of meshes, rendered once: a file in torch's cache (the variable TORCH_HOME) keeps them, by the meshes' content
    and all that `render` is told.

    **Arguments**

    * **meshes** (sequence) - In the unit sphere.
    * **azimuth, elevation** (array) - Of the camera, in degrees, (objects, views), or (views,) for all alike.
    * **size, distance, light** - As of `render`.

    **Example**

    ~~~python
    views = rendered(primitives(), np.arange(0, 360, 15), np.full(24, 20))
    ~~~
    """
    if not meshes:
        raise ArgumentError("meshes is empty: give one object at least.")
    azimuth, elevation = np.broadcast_arrays(np.asarray(azimuth, float), np.asarray(elevation, float))
    if azimuth.ndim not in (1, 2) or (azimuth.ndim == 2 and len(azimuth) != len(meshes)):
        raise ArgumentError(f"azimuth must be (objects, views) or (views,), got {azimuth.shape}.")
    shape = (len(meshes), azimuth.shape[-1])
    azimuth, elevation = np.broadcast_to(azimuth, shape), np.broadcast_to(elevation, shape)
    digest = hashlib.sha256(repr((RENDERER, size, distance, tuple(map(float, light)))).encode())
    for mesh, a, e in zip(meshes, azimuth, elevation):
        for array in (mesh.vertices, mesh.faces, a, e):
            digest.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())

    def make() -> Dict[str, Tensor]:
        found = [render(mesh, a, e, size, distance, light) for mesh, a, e in zip(meshes, azimuth, elevation)]
        return {name: torch.from_numpy(np.stack([getattr(v, name) for v in found])) for name in ("shade", "alpha")}

    pixels = disk_cache(f"views-{digest.hexdigest()[:32]}", make)
    angles = torch.from_numpy(azimuth.copy()), torch.from_numpy(elevation.copy())
    return Views(pixels["shade"], pixels["alpha"], *angles)


def random_views(
    meshes: Sequence[Mesh],
    views: int,
    azimuths: Sequence[float] = (0, 360),
    elevations: Sequence[float] = (20, 20),
    size: int = 64,
) -> Views:
    """
    **Description**

    Views from anywhere within two ranges of angles, uniformly: the same of every object whenever they are asked for.

    **Arguments**

    * **meshes** (sequence) - In the unit sphere.
    * **views** (int) - Of every object.
    * **azimuths, elevations** (sequence, *optional*, default=(0, 360), (20, 20)) - Least and greatest, in degrees.
    * **size** (int, *optional*, default=64) - Height and width of an image.
    """
    check_number("views", views, 1, whole=True)
    for name, (low, high) in (("azimuths", azimuths), ("elevations", elevations)):
        if not -360 <= low <= high <= 360:
            raise ArgumentError(f"{name} must be (least, greatest) within -360 and 360 degrees, got {(low, high)}.")
    angles = np.random.default_rng(0).uniform(size=(len(meshes), 2, views))
    ranges = np.array([azimuths, elevations], float)
    angles = ranges[:, :1] + angles * (ranges[:, 1:] - ranges[:, :1])
    return rendered(meshes, angles[:, 0], angles[:, 1], size)


def grey(views: Views) -> Tensor:
    """Images on black in bytes, (objects, views, 1, size, size)."""
    return views.shade.unsqueeze(2)


def coloured(views: Views) -> Tensor:
    """Images on black in bytes, (objects, views, 3, size, size); an object has a colour of its own, always the same."""
    colours = np.random.default_rng(0).uniform(0.3, 1, size=(len(views.shade), 1, 3, 1, 1)).astype(np.float32)
    images = [(shade.unsqueeze(1) * colour).round().byte() for shade, colour in zip(views.shade, torch.tensor(colours))]
    return torch.stack(images)  # object by object: all of them in floats would take gigabytes
