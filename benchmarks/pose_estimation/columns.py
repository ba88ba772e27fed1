"""The three families of tasks, and the budget that all methods of one have."""

from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from l2l_niw.data.pose import (
    AugmentedTaskset,
    azimuth_tasksets,
    furniture,
    position_tasksets,
    primitives,
    rotation_tasksets,
    screen,
)
from pose_estimation.spaces import space_of

AUGMENTATIONS = {"paper": (None, ""), "data": (True, "da"), "none": (False, "plain")}  # of images alone, of nothing
SPLITS = ("intra", "cross")  # test objects of training categories, and of others


@dataclass(frozen=True)
class Column:
    """
    What all methods of a table share. Support sets of training have 3 to 15 views, one number per batch, those of
    validation and tests 15; queries are 15 views.

    * `kind` - Of the targets.
    * `channels`, `size` - Of an image.
    * `task_augmentation`, `data_augmentation` - Whether training tasks have an offset of their own, and whether their
        images are changed at random.
    * `batches` - Of `meta_batch` tasks.
    * `validations`, `validation_tasks`, `test_tasks` - Rounds, and tasks of a round and of either test.
    * `primitives` - Whether objects are shapes that need no file.
    """

    name: str
    kind: str
    channels: int = 1
    size: int = 64
    task_augmentation: bool = True
    data_augmentation: bool = True
    batches: int = 1400
    meta_batch: int = 5
    validations: int = 10
    validation_tasks: int = 50
    test_tasks: int = 200
    shots: int = 15
    queries: int = 15
    primitives: bool = False

    @property
    def space(self):
        return space_of(self.kind, self.size)

    def augmented(self, how):
        """The same tasks with less augmentation, one of `AUGMENTATIONS`: results have a folder of their own."""
        data, suffix = AUGMENTATIONS[how]
        if data is None or (data and not self.task_augmentation):
            return self
        return replace(self, name=f"{self.name}-{suffix}", task_augmentation=False, data_augmentation=data)

    def facts(self):
        """All settings, for a run's config."""
        return asdict(self)


COLUMNS = {
    "azimuth": Column("azimuth", "vector"),
    "rotation": Column("rotation", "quaternion", channels=3),
    "position": Column("position", "position", task_augmentation=False),
}


@lru_cache(maxsize=1)
def objects(root, small):
    return tuple(primitives(5) if small else screen(furniture(root)).kept)


def tasksets_of(column, seed, root=None):
    """
    Tasksets of a column, as Gao et al. train and test: with task and data augmentation, domain randomisation for
    rotations, and without task augmentation for positions, unless the column has less. Tests are the same for all.
    """
    shared = {"shots": (3, column.shots), "queries": column.queries, "size": column.size, "seed": seed}
    shared["test_tasks"] = max(column.validation_tasks, column.test_tasks)
    meshes = objects(root, column.primitives)
    if column.kind == "vector":
        found = azimuth_tasksets(meshes, **shared)
    elif column.kind == "quaternion":
        found = rotation_tasksets(meshes, randomised=True, **shared)
    else:
        found = position_tasksets(meshes, **shared)
    train = AugmentedTaskset(found.train, column.data_augmentation, column.task_augmentation, seed)
    return found._replace(train=train)
