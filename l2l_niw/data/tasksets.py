"""learn2learn's image benchmarks as episodes: support and query, seeded, from memory."""

from pathlib import Path
from typing import NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from l2l_niw.data._numbered import NumberedEpisodes
from l2l_niw.data.images import MODES, Images, load_images
from l2l_niw.data.sine_line import Tasks
from l2l_niw.errors import ArgumentError
from l2l_niw.utils._checks import check_number, check_seed


class ImageTaskset(NumberedEpisodes):
    """
    **Description**

    Few-shot tasks of images in memory. `taskset[i]` is one task, the same whenever it is asked for, `sample()` the next
    one, and `batch(n)` the next n, stacked: support and query, inputs of (images, channels, height, width) between 0
    and 1 and labels from 0 to ways - 1, class by class.

    **Arguments**

    * **images** (Images) - Pixels in bytes, and their classes.
    * **ways** (int) - Classes per task.
    * **shots** (int) - Images of a class in the support.
    * **queries** (int) - Images of a class in the query, all others than the support's.
    * **num_tasks** (int, *optional*, default=-1) - How many there are; -1 for no end.
    * **rotate** (bool, *optional*, default=False) - Whether every class of a task is turned by a multiple of 90
        degrees, as is usual on Omniglot.
    * **seed** (int or sequence, *optional*, default=0) - Of the tasks.
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
    ):
        super().__init__(num_tasks)
        for name, value in (("ways", ways), ("shots", shots), ("queries", queries)):
            check_number(name, value, 1, whole=True)
        for number in np.atleast_1d(seed):
            check_seed(int(number))
        if images.pixels.dtype != torch.uint8:
            raise ArgumentError(f"images must have pixels in bytes, torch.uint8; got {images.pixels.dtype}.")
        if len(images.labels) and images.labels.min() < 0:
            raise ArgumentError(f"images has a label of {images.labels.min()}: classes are 0, 1, ...")
        if len(images.pixels) != len(images.labels):
            raise ArgumentError(f"images has {len(images.pixels)} pictures, but {len(images.labels)} labels.")
        order = images.labels.argsort(stable=True)
        if not torch.equal(images.labels[order], images.labels):
            images = Images(images.pixels[order], images.labels[order])
        counts = torch.bincount(images.labels)
        if len(counts) < ways:
            raise ArgumentError(f"ways is {ways}, but there are {len(counts)} classes.")
        if counts.min() < shots + queries:
            raise ArgumentError(
                f"shots + queries is {shots + queries}, but a class has {counts.min()} images: lower one of them."
            )
        self.images, self.ways, self.shots, self.queries = images, ways, shots, queries
        self.rotate, self.seed = rotate, seed
        self._starts, self._counts = (counts.cumsum(0) - counts).numpy(), counts.numpy()

    def task(self, i: int) -> Tasks:
        """Task i: images (n, channels, height, width) and labels (n,), n = ways * shots; so too of the query."""
        random, classes = self._classes(i)
        pixels = self._images(random, classes, self.shots + self.queries)
        labels = torch.arange(self.ways).to(pixels.device).unsqueeze(1)
        return Tasks(
            pixels[:, : self.shots].flatten(0, 1),
            labels.repeat(1, self.shots).flatten(),
            pixels[:, self.shots :].flatten(0, 1),
            labels.repeat(1, self.queries).flatten(),
        )

    def with_shape(
        self, ways: Optional[int] = None, shots: Optional[int] = None, queries: Optional[int] = None
    ) -> "ImageTaskset":
        """
        **Description**

        The same images, number of tasks, rotations and seed, with other ways, shots or queries. Task i has the classes
        of this taskset's task i if the ways are the same, and its images too if shots + queries is.

        **Arguments**

        * **ways, shots, queries** (int, *optional*, default=None) - As of the taskset; its own by default.

        **Example**

        ~~~python
        more_ways = tasksets.test.with_shape(ways=10)
        ~~~
        """
        shape = _own(ways, self.ways), _own(shots, self.shots), _own(queries, self.queries)
        return ImageTaskset(self.images, *shape, self.num_tasks, self.rotate, self.seed)

    def _classes(self, i: int) -> Tuple[np.random.Generator, np.ndarray]:
        """Task i's classes, and the generator that goes on to draw its images."""
        random = np.random.default_rng([i, *np.atleast_1d(self.seed)])
        return random, random.choice(len(self._counts), self.ways, replace=False)

    def _images(self, random: np.random.Generator, classes: np.ndarray, each: int) -> Tensor:
        """Images of classes, between 0 and 1, (classes, each, channels, height, width)."""
        which = [self._starts[c] + random.choice(self._counts[c], each, replace=False) for c in classes]
        pixels = self.images.pixels[torch.from_numpy(np.stack(which))]
        if self.rotate:
            turns = random.integers(4, size=len(classes))
            pixels = torch.stack([torch.rot90(own, int(turn), (-2, -1)) for own, turn in zip(pixels, turns)])
        return pixels.float() / 255.0


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
