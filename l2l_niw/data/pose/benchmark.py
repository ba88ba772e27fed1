"""Few-shot pose estimation of rendered objects: which are in which split, and the three families of tasks."""

from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from l2l_niw.data.pose.images import on_backgrounds
from l2l_niw.data.pose.meshes import Mesh
from l2l_niw.data.pose.position import PositionTaskset
from l2l_niw.data.pose.targets import pose_targets
from l2l_niw.data.pose.tasksets import PoseData, PoseTaskset, ViewTaskset
from l2l_niw.data.pose.views import coloured, grey, random_views
from l2l_niw.errors import ArgumentError
from l2l_niw.utils._checks import check_number, check_seed

CROSS = ("Bathroom", "Lights", "Vehicles", "crane")  # of the furniture, and of the primitives
PARTS = {"validation": 0.1, "test": 0.2}  # of a training category's objects
LEAST = 5  # objects of a category, for all splits to have some of it
VIEWS = 48  # of an object
AZIMUTHS, ELEVATIONS = (0.0, 180.0), (0.0, 30.0)  # of rotations, as ShapeNet-2D's
LESS = 8 / 3  # how much smaller objects among others are than the image


class Splits(NamedTuple):
    """Objects: of training categories in three splits, and those of categories of which training has none."""

    train: List[Mesh]
    validation: List[Mesh]
    test: List[Mesh]
    cross: List[Mesh]


class PoseTasksets(NamedTuple):
    """
    Tasksets of the splits, no object in two of them.

    * `test` - New objects of training categories: intra-category.
    * `cross` - Objects of new categories: cross-category.
    """

    train: PoseTaskset
    validation: PoseTaskset
    test: PoseTaskset
    cross: PoseTaskset


def split_objects(meshes: Sequence[Mesh], cross: Sequence[str] = CROSS) -> Splits:
    """
    **Description**

    Deals out objects once and for all: those of the cross-category test's categories; and of every other category a
    tenth for validation and a fifth for the test, one at least, or none where the category has fewer than five.

    **Arguments**

    * **meshes** (sequence) - The objects, such as `screen(...).kept`.
    * **cross** (sequence, *optional*) - Categories of the cross-category test; by default 'Bathroom', 'Lights' and
        'Vehicles' of the furniture, 'crane' of the primitives.
    """
    found = Splits([], [], [], [mesh for mesh in meshes if mesh.category in cross])
    for category in sorted({mesh.category for mesh in meshes} - set(cross)):
        own = [mesh for mesh in meshes if mesh.category == category]
        own = [own[k] for k in np.random.default_rng(0).permutation(len(own))]
        validation, test = (max(1, round(part * len(own))) for part in PARTS.values())
        if len(own) < LEAST:
            validation = test = 0
        found.validation.extend(own[:validation])
        found.test.extend(own[validation : validation + test])
        found.train.extend(own[validation + test :])
    for name, own in found._asdict().items():
        if not own:
            raise ArgumentError(
                f"meshes gives no object to {name}: give {LEAST} objects at least of a category that is not in cross, "
                "and one of a category that is."
            )
    return found


_Shots = Union[int, Tuple[int, int]]
_Make = Callable[[int, List[Mesh], _Shots, int, Sequence[int]], PoseTaskset]


def _tasksets(
    meshes: Sequence[Mesh],
    cross: Sequence[str],
    shots: _Shots,
    test_shots: Optional[_Shots],
    num_tasks: int,
    test_tasks: int,
    seed: int,
    make: _Make,
) -> PoseTasksets:
    """Tasksets of all splits by a function of the split's number and objects, shots, number of tasks, and seed."""
    check_seed(seed)
    check_number("test_tasks", test_tasks, 1, whole=True)
    if test_shots is None:
        test_shots = shots if isinstance(shots, int) else shots[1]
    train, *others = split_objects(meshes, cross)
    return PoseTasksets(
        make(0, train, shots, num_tasks, (0, seed)),
        *(make(k, own, test_shots, test_tasks, (k, 0)) for k, own in enumerate(others, 1)),
    )


def azimuth_tasksets(
    meshes: Sequence[Mesh],
    shots: _Shots = (3, 15),
    queries: int = 15,
    size: int = 64,
    kind: str = "vector",
    randomised: bool = False,
    test_shots: Optional[_Shots] = None,
    num_tasks: int = -1,
    test_tasks: int = 500,
    cross: Sequence[str] = CROSS,
    seed: int = 0,
) -> PoseTasksets:
    """
    **Description**

    Which way does the object face? As in Pascal-1D and ShapeNet-1D: grey images on black, from 20 degrees above. An
    object is one task; it has 48 views from random azimuths, the same ones whenever they are asked for. No object is in
    two splits, which do not depend on the seed, and neither do tasks of validation and tests, so that all methods and
    seeds are scored on the same ones.

    **Arguments**

    * **meshes** (sequence) - Objects whose azimuth can be told: `screen(furniture(root)).kept` or `primitives(5)`.
    * **shots** (int or pair, *optional*, default=(3, 15)) - Views in the support, or the least and the greatest number
        of them, which is then drawn for every task, and by `batch` for all of its tasks.
    * **queries** (int, *optional*, default=15) - Views in the query.
    * **size** (int, *optional*, default=64) - Height and width of an image.
    * **kind** (str, *optional*, default='vector') - Targets: 'vector', (sin, cos) of the azimuth, or 'scaled', the
        azimuth from 0 to 10, as Pascal-1D has it.
    * **randomised** (bool, *optional*, default=False) - Domain randomisation: whether training views get a new
        background in every task, instead of black.
    * **test_shots** (int or pair, *optional*, default=None) - Those of validation and test tasks; by default the
        greatest number of `shots`.
    * **num_tasks** (int, *optional*, default=-1) - Training tasks; -1 for no end.
    * **test_tasks** (int, *optional*, default=500) - Tasks of the validation and of either test.
    * **cross** (sequence, *optional*) - Categories of the cross-category test, as of `split_objects`.
    * **seed** (int, *optional*, default=0) - Of the training tasks.

    **References**

    1. Gao et al. 2022. "What Matters For Meta-Learning Vision Regression Tasks?" CVPR.
    2. Yin et al. 2020. "Meta-Learning without Memorization." ICLR.

    **Example**

    ~~~python
    tasksets = azimuth_tasksets(screen(furniture('~/data')).kept)
    x, y, x_query, y_query = tasksets.train.batch(10)  # x is (10, shots, 1, 64, 64)
    ~~~
    """
    if kind not in ("vector", "scaled"):
        raise ArgumentError(f"kind must be vector or scaled, got {kind!r}.")

    def make(split: int, own: List[Mesh], shots: _Shots, tasks: int, seed: Sequence[int]) -> ViewTaskset:
        views = random_views(own, VIEWS, size=size)
        new = randomised and split == 0
        targets = pose_targets(kind, views.azimuth, views.elevation)
        data = PoseData(grey(views), targets, kind, views.alpha if new else None)
        return ViewTaskset(data, shots, queries, tasks, new, seed)

    return _tasksets(meshes, cross, shots, test_shots, num_tasks, test_tasks, seed, make)


def rotation_tasksets(
    meshes: Sequence[Mesh],
    shots: _Shots = (3, 15),
    queries: int = 15,
    size: int = 64,
    randomised: bool = False,
    test_shots: Optional[_Shots] = None,
    num_tasks: int = -1,
    test_tasks: int = 500,
    cross: Sequence[str] = CROSS,
    seed: int = 0,
) -> PoseTasksets:
    """
    **Description**

    From where is the object seen? As in ShapeNet-2D: RGB images of objects in colours of their own before random
    patterns, azimuths from 0 to 180 degrees and elevations from 0 to 30, targets unit quaternions (w, x, y, z) with w
    of at least 0, as of `rotation_quaternion`. Splits and tasks are as of `azimuth_tasksets`.

    **Arguments**

    * **meshes, shots, queries, size** - As of `azimuth_tasksets`.
    * **randomised** (bool, *optional*, default=False) - Domain randomisation: whether training views get a new
        background in every task, instead of one that stays.
    * **test_shots, num_tasks, test_tasks, cross, seed** - As of `azimuth_tasksets`.

    **Example**

    ~~~python
    tasksets = rotation_tasksets(primitives(5), randomised=True)
    ~~~
    """

    def make(split: int, own: List[Mesh], shots: _Shots, tasks: int, seed: Sequence[int]) -> ViewTaskset:
        views = random_views(own, VIEWS, AZIMUTHS, ELEVATIONS, size)
        images, targets = coloured(views), pose_targets("quaternion", views.azimuth, views.elevation)
        new = randomised and split == 0
        if not new:
            images = on_backgrounds(images, views.alpha, np.random.default_rng(split))
        data = PoseData(images, targets, "quaternion", views.alpha if new else None)
        return ViewTaskset(data, shots, queries, tasks, new, seed)

    return _tasksets(meshes, cross, shots, test_shots, num_tasks, test_tasks, seed, make)


def position_tasksets(
    meshes: Sequence[Mesh],
    shots: _Shots = (3, 15),
    queries: int = 15,
    size: int = 64,
    distractors: int = 2,
    test_shots: Optional[_Shots] = None,
    num_tasks: int = -1,
    test_tasks: int = 500,
    cross: Sequence[str] = CROSS,
    seed: int = 0,
) -> PoseTasksets:
    """
    **Description**

    Where is the object among others? As in Distractor: the tasks of `PositionTaskset`, with objects 3/8 as wide as the
    image, and distractors of the same split. Splits and tasks are as of `azimuth_tasksets`.

    **Arguments**

    * **meshes, shots, queries, size** - As of `azimuth_tasksets`.
    * **distractors** (int, *optional*, default=2) - Other objects in an image.
    * **test_shots, num_tasks, test_tasks, cross, seed** - As of `azimuth_tasksets`.

    **Example**

    ~~~python
    tasksets = position_tasksets(screen(furniture('~/data')).kept)
    ~~~
    """

    def make(split: int, own: List[Mesh], shots: _Shots, tasks: int, seed: Sequence[int]) -> PositionTaskset:
        views = random_views(own, VIEWS, size=round(size / LESS))
        return PositionTaskset(views, size, distractors, shots, queries, tasks, seed)

    return _tasksets(meshes, cross, shots, test_shots, num_tasks, test_tasks, seed, make)
