"""Objects whose azimuth their views do not tell, and objects that look like others."""

from typing import Dict, List, NamedTuple, Sequence

import numpy as np

from l2l_niw.data.pose.meshes import Mesh
from l2l_niw.data.pose.views import rendered
from l2l_niw.errors import ArgumentError
from l2l_niw.utils._checks import check_number

ANGLES = 60  # a symmetry by 180, 120, 90, 72 or 60 degrees takes one view to another
SIZE = 32
ELEVATION = 20.0
FAR = 20.0  # degrees: nearer views are alike of any object
AMBIGUOUS = 0.1
ALIKE = 0.05


class Counts(NamedTuple):
    """Objects of a category: all, left out as ambiguous, left out as copies, and kept."""

    total: int
    ambiguous: int
    copies: int
    kept: int


class Screened(NamedTuple):
    """
    What became of meshes.

    * `kept` - Those to use.
    * `ambiguous` - Those whose azimuth cannot be told.
    * `copies` - Those that look like one that is kept.
    """

    kept: List[Mesh]
    ambiguous: List[Mesh]
    copies: List[Mesh]

    def counts(self) -> Dict[str, Counts]:
        """Of every category, by name."""
        categories = [[mesh.category for mesh in meshes] for meshes in (self.ambiguous, self.copies, self.kept)]
        names = sorted(set().union(*categories))
        found = {name: [own.count(name) for own in categories] for name in names}
        return {name: Counts(sum(own), *own) for name, own in found.items()}


def distinctness(images: np.ndarray) -> float:
    """
    **Description**

    How much the views of an object differ from those after a turn. With v_a the view at azimuth a, |.| the sum over
    pixels of absolute values,

        min over turns s of more than 20 degrees of  mean_a |v_a - v_(a + s)| / mean_a |v_a|,

    the part of the object's light that moves. It is 0 if a turn maps the object to itself, at most 2, and does not
    depend on the object's size in the image or its brightness.

    **Arguments**

    * **images** (array) - Views on black at azimuths equally far apart, all around, (views, size, size).
    """
    images = np.asarray(images, np.float32)
    light, step = images.mean(), 360 / len(images)
    if light == 0:
        raise ArgumentError("images are all black: the object is not in them.")
    turns = [k for k in range(1, len(images) // 2 + 1) if k * step > FAR]  # turns by s and by -s are alike
    if not turns:
        raise ArgumentError(f"images has {len(images)} views: give more, at azimuths all around.")
    return float(min(np.abs(images - np.roll(images, k, 0)).mean() for k in turns) / light)


def screen(meshes: Sequence[Mesh], ambiguous: float = AMBIGUOUS, alike: float = ALIKE) -> Screened:
    """
    **Description**

    Sorts out objects whose azimuth cannot be told, since `distinctness` is below a threshold, and objects that look
    like one before them, so that no two splits have the same. Of bodies of revolution, boxes and prisms the
    distinctness is below 0.02. Above 0.1 views can be told apart: in noise with a standard deviation of half the range
    of brightness, the nearest view has the right azimuth 19 times of 20.

    **Arguments**

    * **meshes** (sequence) - In the unit sphere.
    * **ambiguous** (float, *optional*, default=0.1) - Least `distinctness`.
    * **alike** (float, *optional*, default=0.05) - Least part of an object's light by which it differs from others at
        the same azimuths.

    **Example**

    ~~~python
    screened = screen(furniture('~/data'))
    print(len(screened.kept), screened.counts()['Kitchen'])
    ~~~
    """
    check_number("ambiguous", ambiguous, 0)
    check_number("alike", alike, 0)
    azimuth = np.arange(ANGLES) * 360 / ANGLES
    shade = rendered(meshes, azimuth, np.full(ANGLES, ELEVATION), SIZE).shade.numpy()
    found = Screened([], [], [])
    seen: List[np.ndarray] = []
    for mesh, images in zip(meshes, shade):
        if distinctness(images) < ambiguous:
            found.ambiguous.append(mesh)
            continue
        some = images[::10].astype(np.int16)
        if any(np.abs(some - other).sum() < alike * some.sum() for other in seen):
            found.copies.append(mesh)
            continue
        seen.append(some)
        found.kept.append(mesh)
    return found
