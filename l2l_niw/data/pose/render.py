"""Views of a triangle mesh by ray casting: where the camera is, what its rays hit, and how bright that is."""

from typing import Any, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from l2l_niw.data.pose.meshes import Mesh
from l2l_niw.errors import ArgumentError, require
from l2l_niw.utils._checks import check_number

LIGHT = (-0.5, 1.0, 1.0)  # from above, over the camera's left shoulder
AMBIENT = 0.3  # brightness of a face that the light does not reach
SAMPLES = 2  # rays along either side of a pixel


class View(NamedTuple):
    """
    Bytes, (views, size, size) each. An image on a background b is shade + (1 - alpha) b.

    * `shade` - Brightness of the object, on black.
    * `alpha` - How much of a pixel it covers.
    """

    shade: np.ndarray
    alpha: np.ndarray


def camera_rotation(azimuth: np.ndarray, elevation: np.ndarray) -> np.ndarray:
    """
    **Description**

    From the object's coordinates to those of a camera that looks at the origin, x to its right, y up and z towards it:

        R = R_x(elevation) R_y(-azimuth).

    At azimuth 0 and elevation 0 the camera is on the object's z axis; at azimuth 90 on its x axis.

    **Arguments**

    * **azimuth, elevation** (array) - In degrees, of any one shape.

    **Returns** rotation matrices, (..., 3, 3).
    """
    a, e = np.deg2rad(np.asarray(azimuth, float)), np.deg2rad(np.asarray(elevation, float))
    zero = np.zeros_like(a)
    rows = [
        [np.cos(a), zero, -np.sin(a)],
        [np.sin(e) * -np.sin(a), np.cos(e), np.sin(e) * -np.cos(a)],
        [np.cos(e) * np.sin(a), np.sin(e), np.cos(e) * np.cos(a)],
    ]
    return np.stack([np.stack(row, -1) for row in rows], -2)


def camera_rays(size: int, distance: Optional[float] = None) -> Tuple[np.ndarray, np.ndarray]:
    """
    **Description**

    Origins and directions, in the camera's coordinates, of rays through an image that the unit sphere just fills.

    **Arguments**

    * **size** (int) - Rays along a side; the first goes through the upper left corner's pixel.
    * **distance** (float, *optional*, default=None) - Of a perspective camera from the origin, more than 1; an
        orthographic one by default.
    """
    side = (2 * np.arange(size) + 1) / size - 1
    x, y = np.meshgrid(side, -side)
    if distance is None:
        origins = np.stack([x, y, np.full_like(x, 2.0)], -1).reshape(-1, 3)
        return origins, np.broadcast_to([0.0, 0.0, -1.0], origins.shape)
    tangent = 1 / np.sqrt(distance**2 - 1)  # of half the angle at which the sphere is seen
    directions = np.stack([x * tangent, y * tangent, np.full_like(x, -1.0)], -1).reshape(-1, 3)
    directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
    return np.broadcast_to([0.0, 0.0, distance], directions.shape), directions


def shading(normals: np.ndarray, directions: np.ndarray, light: Sequence[float]) -> np.ndarray:
    """
    **Description**

    Lambert's law with ambient light, c + (1 - c) max(n l, 0), c = 0.3, where the normal n is on the side that the
    camera sees: meshes need not be closed, nor their faces be oriented.

    **Arguments**

    * **normals** (array) - Of faces, of length 1, (n, 3).
    * **directions** (array) - Of the rays that hit them, (n, 3).
    * **light** (sequence) - Direction to the light.
    """
    towards = np.asarray(light, float) / np.linalg.norm(light)
    seen = np.where((normals * directions).sum(-1, keepdims=True) > 0, -normals, normals)
    return AMBIENT + (1 - AMBIENT) * np.maximum(seen @ towards, 0)


def render(
    mesh: Mesh,
    azimuth: Union[np.ndarray, Sequence[float]],
    elevation: Union[np.ndarray, Sequence[float]],
    size: int = 64,
    distance: Optional[float] = None,
    light: Sequence[float] = LIGHT,
) -> View:
    """
    **Description**

    Views of a mesh that lies in the unit sphere (`normalised`), which just fills the image. The light goes with the
    camera, so that shadows do not tell where the camera is. There is no display involved; a view takes milliseconds.

    **Arguments**

    * **mesh** (Mesh) - In the unit sphere.
    * **azimuth, elevation** (sequence) - Of the camera, in degrees, one of each per view; see `camera_rotation`.
    * **size** (int, *optional*, default=64) - Height and width of an image.
    * **distance** (float, *optional*, default=None) - Of a perspective camera, in radii of the unit sphere; an
        orthographic one by default.
    * **light** (sequence, *optional*, default=(-0.5, 1, 1)) - Direction to the light in the camera's coordinates: x to
        the right, y up, z towards the camera.

    **Example**

    ~~~python
    view = render(primitives()[0], azimuth=[0, 90], elevation=[20, 20])
    ~~~
    """
    check_number("size", size, 1, whole=True)
    shapes = np.shape(azimuth), np.shape(elevation)
    if len(shapes[0]) != 1 or shapes[0] != shapes[1]:
        raise ArgumentError(f"azimuth and elevation must be (views,), got {shapes[0]} and {shapes[1]}.")
    if distance is not None:
        check_number("distance", distance, 1, strict=True)
    if np.shape(light) != (3,) or not np.linalg.norm(light) > 0:
        raise ArgumentError(f"light must be a direction, three numbers that are not all 0; got {light!r}.")
    if np.linalg.norm(mesh.vertices[mesh.faces], axis=-1).max() > 1 + 1e-6:
        raise ArgumentError(f"{mesh.name}: mesh is not in the unit sphere: render(normalised(mesh), ...).")
    scene = _scene(mesh)
    corners = mesh.vertices[mesh.faces]
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    normals /= np.maximum(np.linalg.norm(normals, axis=-1, keepdims=True), 1e-300)
    origins, directions = camera_rays(SAMPLES * size, distance)
    cameras = camera_rotation(np.asarray(azimuth), np.asarray(elevation))
    shade = np.zeros((len(cameras), SAMPLES * size * SAMPLES * size))
    alpha = np.zeros_like(shade)
    for i, rotation in enumerate(cameras):  # v R is R^T v, back to the object's coordinates
        hit = scene.run((origins @ rotation).astype(np.float32), (directions @ rotation).astype(np.float32))
        seen = hit >= 0
        alpha[i, seen] = 1
        shade[i, seen] = shading(normals[hit[seen]] @ rotation.T, directions[seen], light)
    return View(_bytes(shade, size), _bytes(alpha, size))


def _scene(mesh: Mesh) -> Any:
    scene = require("embreex.rtcore_scene", "pose").EmbreeScene()
    triangles = require("embreex.mesh_construction", "pose").TriangleMesh
    triangles(scene, mesh.vertices.astype(np.float32), mesh.faces.astype(np.int32))
    return scene


def _bytes(samples: np.ndarray, size: int) -> np.ndarray:
    """Averages over the rays of a pixel, (views, size, size)."""
    pixels = samples.reshape(len(samples), size, SAMPLES, size, SAMPLES).mean((2, 4))
    return np.rint(255 * pixels).astype(np.uint8)
