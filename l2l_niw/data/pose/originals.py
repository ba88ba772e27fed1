"""The files of the original pose benchmarks: Pascal-1D, ShapeNet-1D, ShapeNet-2D and Distractor."""

from functools import partial
from pathlib import Path
from typing import Any, Callable, List, NamedTuple, Optional, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from l2l_niw.data.pose._pickles import Budget, numbers, read_pickle, rows
from l2l_niw.data.pose.targets import pose_targets
from l2l_niw.data.pose.tasksets import PoseData
from l2l_niw.errors import ArgumentError, DataError

SOURCE = "github.com/boschresearch/what-matters-for-meta-learning"
TRAINING = ("02691156", "02828884", "02933112", "02958343", "02992529", "03001627", "03211117", "03636649", "03691459",
            "04379243")  # fmt: skip
NEW = ("04256520", "04530566")  # sofa and ship
_Path = Union[str, Path]


class OriginalData(NamedTuple):
    """
    An original benchmark.

    * `train` - To train on.
    * `intra` - New objects of training categories, which the originals validate on and report.
    * `cross` - Objects of new categories; None in Pascal-1D, which has none.
    """

    train: PoseData
    intra: PoseData
    cross: Optional[PoseData]


def load_pascal1d(folder: _Path) -> OriginalData:
    """
    **Description**

    Pascal-1D: grey images of 128 x 128, targets the azimuth from 0 to 10. Usual are 10 shots and 10 queries.

    **Arguments**

    * **folder** (str) - That has train_data_ins.pkl and val_data_ins.pkl, which the code of the reference makes.

    **References**

    1. Yin et al. 2020. "Meta-Learning without Memorization." ICLR.

    **Example**

    ~~~python
    taskset = ViewTaskset(load_pascal1d('~/data/Pascal1D').train, shots=10, queries=10)
    ~~~
    """
    remedy = "Make it with github.com/google-research/google-research/tree/master/meta_learning_without_memorization."
    files = [Path(folder).expanduser() / f"{name}_data_ins.pkl" for name in ("train", "val")]
    train, intra = (_load(path, remedy, partial(_azimuths, kind="scaled")) for path in files)
    return OriginalData(train, intra, None)


def load_shapenet1d(folder: _Path, amount: str = "large") -> OriginalData:
    """
    **Description**

    ShapeNet-1D: grey images of 128 x 128, targets (sin, cos) of the azimuth.

    **Arguments**

    * **folder** (str) - That has train_data_large.pkl, val_data.pkl and test_data.pkl.
    * **amount** (str, *optional*, default='large') - Of training data: 'small', 'middle' or 'large', whose file is then
        train_data_small.pkl, for example.

    **References**

    1. Gao et al. 2022. "What Matters For Meta-Learning Vision Regression Tasks?" CVPR.
    """
    if amount not in ("small", "middle", "large"):
        raise ArgumentError(f"amount must be small, middle or large; got {amount!r}.")
    names = f"train_data_{amount}.pkl", "val_data.pkl", "test_data.pkl"
    remedy = f"Get ShapeNet1D.tar.xz of {SOURCE} by git lfs and unpack it."
    paths = [Path(folder).expanduser() / name for name in names]
    return OriginalData(*(_load(path, remedy, partial(_azimuths, kind="vector")) for path in paths))


def load_shapenet2d(folder: _Path, cut_out: bool = False) -> OriginalData:
    """
    **Description**

    ShapeNet-2D: RGB images of 64 x 64, targets unit quaternions, with their parts in the order and the sign that the
    files have.

    **Arguments**

    * **folder** (str) - That has shapenet3d_azi180ele30_train.pkl, _val.pkl and _test.pkl.
    * **cut_out** (bool, *optional*, default=False) - Whether training images are of the object alone, on black, with an
        alpha from their fourth channel, for domain randomisation: `ViewTaskset(data.train, randomised=True)`.

    **References**

    1. Gao et al. 2022. "What Matters For Meta-Learning Vision Regression Tasks?" CVPR.
    """
    remedy = f"Get ShapeNet3D_azi180ele30.tar.xz of {SOURCE} by git lfs and unpack it."
    paths = [Path(folder).expanduser() / f"shapenet3d_azi180ele30_{name}.pkl" for name in ("train", "val", "test")]
    cut = cut_out, False, False
    return OriginalData(*(_load(path, remedy, partial(_quaternions, cut_out=own)) for path, own in zip(paths, cut)))


def load_distractor(folder: _Path, training: Tuple[str, ...] = TRAINING, new: Tuple[str, ...] = NEW) -> OriginalData:
    """
    **Description**

    Distractor: grey images of 128 x 128, ink bright, targets the object's centre in pixels, in the order that the files
    have. Four fifths of the training categories' objects are to train on, dealt out once and for all.

    **Arguments**

    * **folder** (str) - That has <category>_multi.npy for every category. All of them take 32 GB of memory.
    * **training, new** (tuple, *optional*) - Categories, by their numbers in ShapeNet; the original's by default.

    **References**

    1. Gao et al. 2022. "What Matters For Meta-Learning Vision Regression Tasks?" CVPR.
    """
    if not training or not new or set(training) & set(new):
        raise ArgumentError("training and new must be different categories, one at least in either.")
    remedy = f"Get distractor.tar.xz of {SOURCE} by git lfs and unpack it."

    def read(categories: Tuple[str, ...]) -> PoseData:
        paths = [Path(folder).expanduser() / f"{category}_multi.npy" for category in categories]
        parts = [_load(path, remedy, _positions) for path in paths]
        if len({part.images.shape[1:] for part in parts}) > 1:
            raise DataError(f"{folder}: categories differ in their numbers of views or the size of images. {remedy}")
        images, targets = [part.images for part in parts], [part.targets for part in parts]
        return PoseData(torch.cat(images), torch.cat(targets), "position")

    known, cross = read(training), read(new)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(known.images)))
    count = round(0.8 * len(order))
    train, intra = (
        PoseData(known.images[own], known.targets[own], "position") for own in order.split([count, len(order) - count])
    )
    return OriginalData(train, intra, cross)


def _load(path: Path, remedy: str, make: Callable[[Any, Budget], PoseData]) -> PoseData:
    """What `make` makes of a file's content, with the file's name in its errors."""
    content = read_pickle(path, remedy)
    try:
        return make(content, Budget(path))
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise DataError(f"{path} is not as it should be: {error}. {remedy}") from error


def _within(what: str, values: np.ndarray, low: float, high: float) -> np.ndarray:
    if not values.size or not (low <= values.min() and values.max() <= high):  # not a number is neither
        raise ValueError(f"{what} are not all from {low:g} to {high:g}")
    return values


def _bytes(images: np.ndarray, channels: int) -> Tensor:
    """Images with values from 0 to 255, (objects, views, ...), as (objects, views, channels, size, size)."""
    side = int((images[0, 0].size / channels) ** 0.5)
    if images[0, 0].size != channels * side**2:
        raise ValueError(f"images of shape {images.shape[2:]} are not square with {channels} channels")
    images = images.reshape(*images.shape[:2], side, side, channels)
    if images.dtype.kind == "f":
        images = np.rint(images)
    return torch.from_numpy(np.array(np.moveaxis(images, -1, 2), np.uint8, order="C"))


def _azimuths(content: Any, budget: Budget, kind: str) -> PoseData:
    """A pair: images (objects, views, ...) from 0 to 255, labels (objects, views, n) with the part of a turn last."""
    images, labels = (numbers(node, budget) for node in rows(content))
    if images.ndim < 3 or labels.ndim != 3 or images.shape[:2] != labels.shape[:2] or not labels.shape[2]:
        raise ValueError(f"images {images.shape} and labels {labels.shape} are not (objects, views, ...) of both")
    _within("images", images, 0, 255)
    if images.dtype.kind == "f" and images.max() <= 1:
        raise ValueError("images are not from 0 to 255, but to 1")
    azimuth = torch.from_numpy(_within("azimuths", labels[:, :, -1], 0, 1).astype(np.float64)) * 360
    return PoseData(_bytes(images, 1), pose_targets(kind, azimuth, torch.zeros_like(azimuth)), kind)


def _quaternions(content: Any, budget: Budget, cut_out: bool) -> PoseData:
    """A dict: images (n, 64, 64, 3 or 4) from 0 to 1, item_indices (n,) and Q (n, 4)."""
    images, items, targets = (numbers(content[name], budget) for name in ("images", "item_indices", "Q"))
    if images.ndim != 4 or images.shape[3] not in (3, 4) or items.shape != images.shape[:1]:
        raise ValueError(f"images {images.shape} and item_indices {items.shape} are not (n, 64, 64, 4) and (n,)")
    if targets.shape != (len(items), 4) or not np.allclose((targets**2).sum(-1), 1, atol=1e-3):
        raise ValueError(f"Q {targets.shape} are not unit quaternions, (n, 4)")
    if cut_out and images.shape[3] == 3:
        raise ValueError("images have no fourth channel, which cut_out needs")
    counts = np.unique(items, return_counts=True)[1]
    if (counts != counts[0]).any():
        raise ValueError("objects differ in their numbers of views")
    order, shape = items.argsort(kind="stable"), (len(counts), counts[0])
    _within("images", images[..., :3], 0, 1)
    pixels = np.empty((*images.shape[:3], 3), np.uint8)
    for k, own in enumerate(order):  # one by one: there may be gigabytes
        pixels[k] = np.rint(255 * images[own, ..., :3])
    alpha = None
    if cut_out:
        covered = images[order, ..., 3] < 1  # the original replaces the background where it is not
        pixels *= covered[..., None]
        alpha = torch.from_numpy(255 * covered.astype(np.uint8)).unflatten(0, shape)
    x = _bytes(pixels.reshape(*shape, *pixels.shape[1:]), 3)
    y = torch.from_numpy(targets[order].astype(np.float32)).unflatten(0, shape)
    return PoseData(x, y, "quaternion", alpha)


def _positions(content: Any, budget: Budget) -> PoseData:
    """Objects of views of four entries or more: an image from 0 to 1, two numbers, and the centre."""
    images: List[np.ndarray] = []
    centres: List[np.ndarray] = []
    for item in rows(content):
        views = [rows(view) for view in rows(item)]
        own = np.stack([numbers(view[0], budget) for view in views])
        images.append(255 - np.rint(255 * _within("images", own, 0, 1)).astype(np.uint8))
        centres.append(np.stack([numbers(view[3], budget).reshape(-1) for view in views]))
    x, y = _bytes(np.stack(images), 1), np.stack(centres)
    if y.shape[2] != 2:
        raise ValueError(f"centres have {y.shape[2]} numbers instead of 2")
    _within("centres", y, 0, x.shape[-1])
    return PoseData(x, torch.from_numpy(y.astype(np.float32)), "position")
