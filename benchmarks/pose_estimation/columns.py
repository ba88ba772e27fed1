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

SPLITS = ("intra", "cross")  # test objects of training categories, and of others


@dataclass(frozen=True)
class Column:
    """
    What all methods of a table share. Support sets of training have 3 to 15 views, one number per batch, those of
    validation and tests 15; queries are 15 views.

    * `kind` - Of the targets.
    * `channels`, `size` - Of an image.
    * `task_augmentation` - Whether training tasks have an offset of their own; images are augmented in any case.
    * `batches` - Of `meta_batch` tasks.
    * `validations`, `validation_tasks`, `test_tasks` - Rounds, and tasks of a round and of either test.
    * `primitives` - Whether objects are shapes that need no file.
    """

    name: str
    kind: str
    channels: int = 1
    size: int = 64
    task_augmentation: bool = True
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

    def without_task_augmentation(self):
        """The column in which data augmentation is all: its results have a folder of their own."""
        if not self.task_augmentation:
            return self
        return replace(self, name=f"{self.name}-da", task_augmentation=False)

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
    rotations, and without task augmentation for positions. Tests of all seeds have the same tasks.
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
    return found._replace(train=AugmentedTaskset(found.train, targets=column.task_augmentation, seed=seed))
