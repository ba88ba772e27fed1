"""learn2learn's image benchmarks as episodes: support and query, seeded, from memory."""

from pathlib import Path
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from l2l_niw.data._numbered import NumberedEpisodes
from l2l_niw.data.images import MODES, Images, load_images
from l2l_niw.data.sine_line import Tasks
from l2l_niw.errors import ArgumentError
from l2l_niw.utils._checks import check_number, check_seed


class ClassTaskset(NumberedEpisodes):
    """
    **Description**

    Few-shot tasks of data in memory of any kind: token ids, features, sounds. `taskset[i]` is one task, the same
    whenever it is asked for, `sample()` the next one, and `batch(n)` the next n, stacked: support and query, inputs of
    (data, ...) and labels from 0 to ways - 1, class by class.

    **Arguments**

    * **inputs** (Tensor) - (n, ...).
    * **labels** (Tensor) - Their classes, 0, 1, ..., (n,).
    * **ways** (int) - Classes per task.
    * **shots** (int) - Data of a class in the support.
    * **queries** (int) - Data of a class in the query, all others than the support's.
    * **num_tasks** (int, *optional*, default=-1) - How many there are; -1 for no end.
    * **seed** (int or sequence, *optional*, default=0) - Of the tasks.
    * **groups** (sequence, *optional*, default=None) - Of every class a group, 0, 1, ...: the classes of a task are
        then of one group, which makes tasks harder. Groups with fewer classes than ways are left out.

    **Example**

    ~~~python
    taskset = ClassTaskset(features, labels, ways=5, shots=1, queries=15)
    x, y, x_query, y_query = taskset[17]
    ~~~
    """

    def __init__(
        self,
        inputs: Tensor,
        labels: Tensor,
        ways: int,
        shots: int,
        queries: int,
        num_tasks: int = -1,
        seed: Union[int, Sequence[int]] = 0,
        groups: Optional[Sequence[int]] = None,
    ):
        super().__init__(num_tasks)
        for name, value in (("ways", ways), ("shots", shots), ("queries", queries)):
            check_number(name, value, 1, whole=True)
        for number in np.atleast_1d(seed):
            check_seed(int(number))
        if len(labels) and labels.min() < 0:
            raise ArgumentError(f"labels has {labels.min()} in it: classes are 0, 1, ...")
        if len(inputs) != len(labels):
            raise ArgumentError(f"labels has {len(labels)} of them, but there are {len(inputs)} inputs.")
        order = labels.argsort(stable=True)
        if not torch.equal(labels[order], labels):
            inputs, labels = inputs[order], labels[order]
        counts = torch.bincount(labels)
        if len(counts) < ways:
            raise ArgumentError(f"ways is {ways}, but there are {len(counts)} classes.")
        if counts.min() < shots + queries:
            raise ArgumentError(
                f"shots + queries is {shots + queries}, but a class has {counts.min()} examples: lower one of them."
            )
        self.inputs, self.labels, self.ways, self.shots, self.queries = inputs, labels, ways, shots, queries
        self.seed, self.groups = seed, groups
        self._starts, self._counts = (counts.cumsum(0) - counts).numpy(), counts.numpy()
        self._choices = self._by_group(groups)

    def _by_group(self, groups: Optional[Sequence[int]]) -> List[np.ndarray]:
        """The classes that those of a task are drawn from, for every group that has enough."""
        classes = np.arange(len(self._counts))
        if groups is None:
            return [classes]
        if len(groups) != len(classes):
            raise ArgumentError(f"groups has {len(groups)} entries, but there are {len(classes)} classes.")
        own = [classes[np.asarray(groups) == group] for group in np.unique(groups)]
        if max(map(len, own)) < self.ways:
            raise ArgumentError(f"ways is {self.ways}, but no group has more than {max(map(len, own))} classes.")
        return [group for group in own if len(group) >= self.ways]

    def task(self, i: int) -> Tasks:
        """Task i: inputs (n, ...) and labels (n,), n = ways * shots; so too of the query."""
        random, classes = self._classes(i)
        inputs = self._drawn(random, classes, self.shots + self.queries)
        labels = torch.arange(self.ways).to(inputs.device).unsqueeze(1)
        return Tasks(
            inputs[:, : self.shots].flatten(0, 1),
            labels.repeat(1, self.shots).flatten(),
            inputs[:, self.shots :].flatten(0, 1),
            labels.repeat(1, self.queries).flatten(),
        )

    def with_shape(
        self, ways: Optional[int] = None, shots: Optional[int] = None, queries: Optional[int] = None
    ) -> "ClassTaskset":
        """
        **Description**

        The same data, number of tasks and seed, with other ways, shots or queries. Task i has the classes of this
        taskset's task i if the ways are the same, and its data too if shots + queries is.

        **Arguments**

        * **ways, shots, queries** (int, *optional*, default=None) - As of the taskset; its own by default.

        **Example**

        ~~~python
        more_ways = tasksets.test.with_shape(ways=10)
        ~~~
        """
        return self._alike(_own(ways, self.ways), _own(shots, self.shots), _own(queries, self.queries))

    def _alike(self, ways: int, shots: int, queries: int) -> "ClassTaskset":
        """The same taskset with these numbers."""
        return ClassTaskset(self.inputs, self.labels, ways, shots, queries, self.num_tasks, self.seed, self.groups)

    def _classes(self, i: int) -> Tuple[np.random.Generator, np.ndarray]:
        """Task i's classes, and the generator that goes on to draw its data."""
        random = np.random.default_rng([i, *np.atleast_1d(self.seed)])
        group = random.integers(len(self._choices)) if len(self._choices) > 1 else 0
        return random, random.choice(self._choices[group], self.ways, replace=False)

    def _drawn(self, random: np.random.Generator, classes: np.ndarray, each: int) -> Tensor:
        """Inputs of classes, (classes, each, ...)."""
        which = [self._starts[c] + random.choice(self._counts[c], each, replace=False) for c in classes]
        return self.inputs[torch.from_numpy(np.stack(which))]


class ImageTaskset(ClassTaskset):
    """
    **Description**

    A `ClassTaskset` of images, (images, channels, height, width), between 0 and 1.

    **Arguments**

    * **images** (Images) - Pixels in bytes, and their classes.
    * **ways, shots, queries, num_tasks** - As of `ClassTaskset`.
    * **rotate** (bool, *optional*, default=False) - Whether every class of a task is turned by a multiple of 90
        degrees, as is usual on Omniglot.
    * **seed, groups** - As of `ClassTaskset`.
    """

    def __init__(
        self,
        images: Images,
        ways: int,
        shots: int,
        queries: int,
        num_tasks: int = -1,
        rotate: bool = False,
        seed: Union[int, Sequence[int]] = 0,
        groups: Optional[Sequence[int]] = None,
    ):
        if images.pixels.dtype != torch.uint8:
            raise ArgumentError(f"images must have pixels in bytes, torch.uint8; got {images.pixels.dtype}.")
        super().__init__(images.pixels, images.labels, ways, shots, queries, num_tasks, seed, groups)
        self.rotate = rotate

    @property
    def images(self) -> Images:
        """All of them, class by class."""
        return Images(self.inputs, self.labels)

    def _alike(self, ways: int, shots: int, queries: int) -> "ImageTaskset":
        return ImageTaskset(self.images, ways, shots, queries, self.num_tasks, self.rotate, self.seed, self.groups)

    def _drawn(self, random: np.random.Generator, classes: np.ndarray, each: int) -> Tensor:
        pixels = super()._drawn(random, classes, each)
        if self.rotate:
            turns = random.integers(4, size=len(classes))
            pixels = torch.stack([torch.rot90(own, int(turn), (-2, -1)) for own, turn in zip(pixels, turns)])
        return pixels.float() / 255.0


class MappedTaskset(NumberedEpisodes):
    """
    **Description**

    The tasks of a taskset, with a function's outputs for their inputs: features of a frozen network, for example.

    **Arguments**

    * **taskset** (ClassTaskset, or OpenSetQueries or CorruptedQueries of one) - Where tasks come from.
    * **function** (callable) - From inputs (n, ...) to tensors (n, ...), each by itself: support and query are given
        together.

    **Example**

    ~~~python
    tasks = MappedTaskset(tasksets.train, FrozenFeatures(blocks[:-2]))
    ~~~
    """

    def __init__(self, taskset: NumberedEpisodes, function: Callable[[Tensor], Tensor]):
        if not isinstance(taskset, NumberedEpisodes):
            raise ArgumentError(f"taskset must be one of support and query; got {type(taskset).__name__}.")
        super().__init__(taskset.num_tasks)
        self.taskset, self.function = taskset, function

    def task(self, i: int) -> Tasks:
        """Task i of the taskset, its inputs gone over."""
        task = self.taskset.task(i)
        mapped = self.function(torch.cat([task.x, task.x_query]))
        return task._replace(x=mapped[: len(task.x)], x_query=mapped[len(task.x) :])


class Tasksets(NamedTuple):
    """The three splits, as of learn2learn's `get_tasksets`."""

    train: ImageTaskset
    validation: ImageTaskset
    test: ImageTaskset


def _own(number: Optional[int], other: int) -> int:
    return other if number is None else number


def get_tasksets(
    name: str,
    ways: int = 5,
    shots: int = 1,
    queries: int = 15,
    train_ways: Optional[int] = None,
    train_shots: Optional[int] = None,
    train_queries: Optional[int] = None,
    validation_ways: Optional[int] = None,
    validation_shots: Optional[int] = None,
    validation_queries: Optional[int] = None,
    num_tasks: int = -1,
    test_tasks: int = 1000,
    root: Union[str, Path, None] = None,
    seed: int = 0,
    device: Optional[torch.device] = None,
    download: bool = False,
) -> Tasksets:
    """
    **Description**

    A benchmark of `l2l.vision.benchmarks` as episodes with a number of shots and a number of queries, from images that
    are held in memory. No class is in two of the splits, which are learn2learn's; only Omniglot's characters, which
    learn2learn deals out anew every time, are dealt out once and for all. Validation and test tasks do not depend on
    the seed, so that all methods and seeds are scored on the same ones.

    **Arguments**

    * **name** (str) - 'omniglot', 'cifarfs', 'fc100', 'mini-imagenet' or 'tiered-imagenet'.
    * **ways, shots, queries** (int) - Classes per task, and images of a class in support and query.
    * **train_ways, train_shots, train_queries** (int, *optional*, default=None) - Those of training tasks, and
    * **validation_ways, validation_shots, validation_queries** (int, *optional*, default=None) - of validation tasks,
        where they differ from the test's.
    * **num_tasks** (int, *optional*, default=-1) - Training tasks; -1 for no end.
    * **test_tasks** (int, *optional*, default=1000) - Tasks of the validation and of the test.
    * **root** (str, *optional*, default=None) - Folder of the data; what the variable L2L_NIW_DATA says by default.
    * **seed** (int, *optional*, default=0) - Of the training tasks.
    * **device** (torch.device, *optional*, default=None) - Where images are held.
    * **download** (bool, *optional*, default=False) - Whether learn2learn may download what is not there.

    **Returns** `Tasksets`: an `ImageTaskset` each for `train`, `validation` and `test`.

    **Example**

    ~~~python
    tasksets = get_tasksets('cifarfs', ways=5, shots=1, queries=15, root='~/data')
    x, y, x_query, y_query = tasksets.train.sample()
    ~~~
    """
    check_seed(seed)
    check_number("test_tasks", test_tasks, 1, whole=True)

    def taskset(split: str, ways: int, shots: int, queries: int, tasks: int, seed: int) -> ImageTaskset:
        pixels, labels = load_images(name, split, root, download)
        images = Images(pixels.to(device), labels)
        seeds = (list(MODES).index(split), seed)
        try:
            return ImageTaskset(images, ways, shots, queries, tasks, name == "omniglot", seeds)
        except ArgumentError as error:
            raise ArgumentError(f"{name} ({split}): {error}") from error

    train = _own(train_ways, ways), _own(train_shots, shots), _own(train_queries, queries)
    validation = _own(validation_ways, ways), _own(validation_shots, shots), _own(validation_queries, queries)
    return Tasksets(
        taskset("train", *train, num_tasks, seed),
        taskset("validation", *validation, test_tasks, 0),
        taskset("test", ways, shots, queries, test_tasks, 0),
    )
