"""Triangle meshes: the furniture on disk, and shapes that need no file."""

import json
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence, Tuple, Union

import numpy as np

from l2l_niw.data.images import data_root
from l2l_niw.errors import ArgumentError, DataError, require
from l2l_niw.utils._checks import check_number


class Mesh(NamedTuple):
    """
    One object.

    * `name` - What it is.
    * `category` - Its category's name.
    * `vertices` - (n, 3), y up.
    * `faces` - (triangles, 3), numbers of vertices.
    """

    name: str
    category: str
    vertices: np.ndarray
    faces: np.ndarray


def normalised(mesh: Mesh) -> Mesh:
    """
    **Description**

    The mesh in the unit sphere: its surface's centroid on the vertical axis, so that a symmetric object is turned about
    its own axis, the middle of its height at 0, and its farthest vertex at distance 1.

    **Arguments**

    * **mesh** (Mesh) - With vertices (n, 3) and faces (triangles, 3).
    """
    vertices, faces = np.asarray(mesh.vertices, dtype=np.float64), np.asarray(mesh.faces)
    if vertices.ndim != 2 or vertices.shape[1] != 3 or not np.isfinite(vertices).all():
        raise ArgumentError(f"{mesh.name}: vertices must be finite numbers (n, 3), got shape {vertices.shape}.")
    if faces.ndim != 2 or faces.shape[1] != 3 or not len(faces) or not np.issubdtype(faces.dtype, np.integer):
        raise ArgumentError(f"{mesh.name}: faces must be whole numbers (triangles, 3), got shape {faces.shape}.")
    if faces.min() < 0 or faces.max() >= len(vertices):
        raise ArgumentError(f"{mesh.name}: faces has numbers that are no vertex: there are {len(vertices)} of them.")
    used, corners = np.unique(faces), vertices[faces]
    areas = np.linalg.norm(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]), axis=1)
    if areas.sum() == 0:
        raise ArgumentError(f"{mesh.name}: all faces are points or lines; leave this mesh out.")
    middle = np.average(corners.mean(1), axis=0, weights=areas)
    middle[1] = (vertices[used, 1].min() + vertices[used, 1].max()) / 2
    vertices = vertices - middle
    radius = np.linalg.norm(vertices[used], axis=1).max()
    return mesh._replace(vertices=vertices / radius, faces=faces.astype(np.int64))


def furniture(root: Union[str, Path, None] = None) -> List[Mesh]:
    """
    **Description**

    The furniture library of Sweet Home 3D, without duplicates: of objects with the same vertices and faces the first
    one stays.

    **Arguments**

    * **root** (str, *optional*, default=None) - The folder that has furniture/sh3d_meshes.npz and
        furniture/sh3d_meta.json; what the variable L2L_NIW_DATA says by default.

    **Example**

    ~~~python
    chairs = [mesh for mesh in furniture('~/data') if mesh.name == 'Chair']
    ~~~
    """
    folder = data_root(root) / "furniture"
    packed, facts = folder / "sh3d_meshes.npz", folder / "sh3d_meta.json"
    if not packed.is_file() or not facts.is_file():
        raise DataError(
            f"No furniture: looked for {packed} and {facts.name}. Put the two files there, or take `primitives()`, "
            "which needs none."
        )
    try:
        meta = json.loads(facts.read_text())
        with np.load(packed, allow_pickle=False) as arrays:
            meshes = [
                normalised(Mesh(own["name"], own["category"], arrays[f"v{own['id']}"], arrays[f"f{own['id']}"]))
                for own in meta
            ]
    except Exception as error:  # whatever zipfile, numpy and json raise on a file that is cut off
        raise DataError(f"{packed} and {facts.name} cannot be read: {error!r}. Get them anew.") from error
    first: Dict[Tuple[bytes, bytes], Mesh] = {}
    for mesh in meshes:
        first.setdefault((mesh.vertices.tobytes(), mesh.faces.tobytes()), mesh)
    return list(first.values())


def primitives(each: int = 4) -> List[Mesh]:
    """
    **Description**

    Shapes of boxes, cylinders and cones in five categories, none of them symmetric: meshes that need no file, for tests
    and demonstrations. Objects of a category differ in their proportions, which are the same every time.

    **Arguments**

    * **each** (int, *optional*, default=4) - Objects of a category.

    **Example**

    ~~~python
    meshes = primitives()
    ~~~
    """
    check_number("each", each, 1, whole=True)
    random = np.random.default_rng(0)
    return [
        _joined(f"{category} {number}", category, parts, 1 + 0.15 * random.uniform(-1, 1, (len(parts), 3)))
        for category, parts in PRIMITIVES.items()
        for number in range(each)
    ]


_Part = Tuple[str, Sequence[float], Sequence[float]]  # shape, extents, centre
PRIMITIVES: Dict[str, List[_Part]] = {
    "corner": [("box", (2.0, 0.6, 0.5), (0.0, 0.0, 0.0)), ("box", (0.5, 1.2, 1.4), (-0.9, 0.3, 0.8))],
    "chair": [
        ("box", (1.0, 0.2, 1.0), (0.0, 0.0, 0.0)),
        ("box", (1.0, 1.2, 0.2), (0.0, 0.7, -0.4)),
        ("box", (0.2, 0.5, 0.9), (0.5, 0.3, 0.0)),
    ],
    "car": [
        ("box", (2.2, 0.5, 1.0), (0.0, 0.0, 0.0)),
        ("box", (0.9, 0.5, 0.9), (-0.5, 0.5, 0.0)),
        ("cone", (0.5, 0.9, 0.5), (0.8, 0.6, 0.3)),
    ],
    "mug": [("cylinder", (1.0, 1.3, 1.0), (0.0, 0.0, 0.0)), ("box", (0.8, 0.7, 0.2), (0.8, 0.1, 0.0))],
    "crane": [
        ("cylinder", (0.3, 2.0, 0.3), (0.0, 0.0, 0.0)),
        ("box", (1.6, 0.3, 0.3), (0.6, 0.9, 0.0)),
        ("cone", (0.8, 0.8, 0.8), (-0.2, -0.8, 0.3)),
    ],
}


def _joined(name: str, category: str, parts: Sequence[_Part], stretch: np.ndarray) -> Mesh:
    """One mesh of parts, the extents of each stretched by its own factors."""
    creation = require("trimesh.creation", "pose")
    vertices, faces, count = [], [], 0
    for (shape, extents, centre), factors in zip(parts, stretch):
        if shape == "box":
            part = creation.box((1, 1, 1))
        elif shape == "cylinder":
            part = creation.cylinder(0.5, 1, sections=24)
        else:
            part = creation.cone(0.5, 1, sections=24)
        own = part.vertices - part.bounds.mean(0)
        own = own[:, [1, 2, 0]]  # trimesh's cylinders and cones stand on z
        vertices.append(own * (np.asarray(extents) * factors) + np.asarray(centre))
        faces.append(part.faces + count)
        count += len(own)
    return normalised(Mesh(name, category, np.concatenate(vertices), np.concatenate(faces)))
