"""Images of learn2learn's benchmarks as tensors in memory: where they are looked for, and how they are read."""

import hashlib
import os
import pickle
import warnings
from functools import cache
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from l2l_niw.errors import ArgumentError, DataError, require
from l2l_niw.utils._disk_cache import disk_cache

MODES = {"train": "train", "validation": "val", "test": "test"}  # and what folders call them
CHARACTERS = 1623  # of Omniglot
OMNIGLOT_SPLIT = {"train": (0, 1100), "validation": (1100, 1200), "test": (1200, CHARACTERS)}  # learn2learn's


class Images(NamedTuple):
    """All images of a split, (n, channels, height, width) in bytes, and their classes, 0, 1, ..., sorted."""

    pixels: Tensor
    labels: Tensor


def read_folders(folders: List[Path], size: Optional[int] = None, grey: bool = False) -> Images:
    """
    Every PNG of folders of which each is a class. To open 60,000 takes 20 s, so that what was read is kept, by the
    names, sizes and dates of all files.
    """
    files, digest = [], hashlib.sha256(repr((size, grey)).encode())
    for label, folder in enumerate(folders):
        with os.scandir(folder.resolve()) as entries:
            found = sorted((entry for entry in entries if entry.name.endswith(".png")), key=lambda entry: entry.name)
        if not found:
            raise DataError(f"There is no PNG in {folder}.")
        for entry in found:
            facts = entry.stat()
            digest.update(repr((label, entry.path, facts.st_size, facts.st_mtime_ns)).encode())
            files.append((label, entry.path))
    return Images(**disk_cache(f"images-{digest.hexdigest()[:32]}", lambda: read_files(files, size, grey)._asdict()))


def read_files(files: List[Tuple[int, str]], size: Optional[int], grey: bool) -> Images:
    """Pictures and their labels."""
    pil = require("PIL.Image", "vision")
    images = []
    for _, path in files:
        with pil.open(path) as image:
            image = image.convert("L" if grey else "RGB")
            if size is not None:
                image = image.resize((size, size), pil.Resampling.LANCZOS)
            images.append(np.asarray(image))
        if images[-1].shape != images[0].shape:
            raise DataError(f"{path} is of another size than {files[0][1]}.")
    pixels = torch.from_numpy(np.stack(images))
    pixels = pixels.unsqueeze(1) if grey else pixels.permute(0, 3, 1, 2).contiguous()
    return Images(pixels, torch.tensor([label for label, _ in files]))


def subfolders(folder: Path, depth: int = 1) -> List[Path]:
    """The folders at this depth below `folder`, sorted; a `DataError` if there are none."""
    found = sorted(path for path in folder.glob("/".join("*" * depth)) if path.is_dir())
    if not found:
        raise DataError(f"There is no folder of a class in {folder}.")
    return found


def from_dataset(dataset: Sequence) -> Images:
    """Images of a learn2learn dataset, whose items are tensors or pictures."""
    labels = torch.empty(len(dataset), dtype=torch.long)
    pixels = None
    for i in range(len(dataset)):
        image, labels[i] = dataset[i]
        if not isinstance(image, Tensor):
            image = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        if pixels is None:  # at once: tiered-ImageNet's are 9.5 GB
            pixels = torch.empty(len(dataset), *image.shape, dtype=torch.uint8)
        pixels[i] = image
    if pixels is None:
        raise DataError(f"{type(dataset).__name__} holds no image.")
    classes = labels.unique(return_inverse=True)[1]
    order = classes.argsort(stable=True)
    return Images(pixels if classes.equal(classes[order]) else pixels[order], classes[order])


def omniglot(root: Path, split: str) -> Images:
    """
    From the folders of the two archives, whether torchvision has unpacked them or somebody else: it refuses folders
    whose archives are gone. Ink is bright, and characters are shuffled once and for all.
    """
    folders = [f for half in ("background", "evaluation") for f in subfolders(root / f"omniglot-py/images_{half}", 2)]
    if len(folders) != CHARACTERS:
        raise DataError(
            f"Omniglot has {CHARACTERS} characters, but {len(folders)} are under {root / 'omniglot-py'}: unpack both "
            "images_background.zip and images_evaluation.zip there."
        )
    order = np.random.default_rng(0).permutation(len(folders))
    first, last = OMNIGLOT_SPLIT[split]
    images = read_folders([folders[i] for i in sorted(order[first:last])], size=28, grey=True)
    return images._replace(pixels=255 - images.pixels)


def cifarfs(root: Path, split: str) -> Images:
    """Images of a split of CIFAR-FS, from one folder of PNGs per class."""
    return from_classes(root / "cifarfs/processed" / MODES[split], {"train": 64, "validation": 16, "test": 20}[split])


def fc100(root: Path, split: str) -> Images:
    """Images of a split of FC100: from one folder of PNGs per class, or else from learn2learn's pickle."""
    folder = root / "fc100-png" / MODES[split]
    if folder.exists():
        return from_classes(folder, {"train": 60, "validation": 20, "test": 20}[split])
    return from_dataset(learn2learn("FC100", root, split))


def from_classes(folder: Path, classes: int) -> Images:
    """Images of a folder for each class, of which there should be so many."""
    found = subfolders(folder)
    if len(found) != classes:
        text = f"{folder} has {len(found)} classes instead of {classes}. Was it cut off when it was copied or unpacked?"
        warnings.warn(text, stacklevel=2)
    return read_folders(found)


def mini_imagenet(root: Path, split: str) -> Images:
    """Images of a split of mini-ImageNet, from learn2learn's pickle."""
    return from_dataset(learn2learn("MiniImagenet", root, split))


def tiered_imagenet(root: Path, split: str) -> Images:
    """Images of a split of tiered-ImageNet, from learn2learn's pickles."""
    return from_dataset(learn2learn("TieredImagenet", root, split))


def learn2learn(dataset: str, root: Path, split: str, download: bool = False) -> Sequence:
    """A data set of learn2learn's."""
    import learn2learn as l2l  # which takes seconds, and l2l_niw has made sure that it can

    return getattr(l2l.vision.datasets, dataset)(str(root), mode=split, download=download)


def omniglot_archives(root: Path, split: str) -> object:
    """Downloads Omniglot, all splits at once, and returns learn2learn's data set."""
    import learn2learn as l2l

    return l2l.vision.datasets.FullOmniglot(str(root), download=True)


class Source(NamedTuple):
    """
    How to read a benchmark, which paths of a split have to be there (one or another list of them), how to get them, and
    what a download would write to.
    """

    read: Callable[[Path, str], Images]
    paths: Callable[[str], List[List[str]]]
    download: Callable[[Path, str], object]
    writes: Callable[[str], List[str]]
    remedy: str


SOURCES: Dict[str, Source] = {
    "omniglot": Source(
        omniglot,
        lambda split: [["omniglot-py/images_background", "omniglot-py/images_evaluation"]],
        omniglot_archives,
        lambda split: ["omniglot-py"],
        "unpack images_background.zip and images_evaluation.zip of github.com/brendenlake/omniglot into "
        "{root}/omniglot-py",
    ),
    "cifarfs": Source(
        cifarfs,
        lambda split: [[f"cifarfs/processed/{MODES[split]}"]],
        lambda root, split: learn2learn("CIFARFS", root, split, True),
        lambda split: ["cifarfs", "cifarfs.zip"],
        "put a folder of PNGs for each class into {root}/cifarfs/processed/train, val and test",
    ),
    "fc100": Source(
        fc100,
        lambda split: [[f"fc100-png/{MODES[split]}"], [f"FC100_{MODES[split]}.pickle"]],
        lambda root, split: learn2learn("FC100", root, split, True),
        lambda split: ["fc100.zip", *(f"FC100_{mode}.pickle" for mode in MODES.values())],  # all three at once
        "put a folder of PNGs for each class into {root}/fc100-png/train, val and test",
    ),
    "mini-imagenet": Source(
        mini_imagenet,
        lambda split: [[f"mini-imagenet-cache-{split}.pkl"]],
        lambda root, split: learn2learn("MiniImagenet", root, split, True),
        lambda split: [f"mini-imagenet-cache-{split}.pkl"],
        "get mini-imagenet-cache-train.pkl, -validation.pkl and -test.pkl from zenodo.org/record/7978538 into {root}",
    ),
    "tiered-imagenet": Source(
        tiered_imagenet,
        lambda split: [[f"tiered-imagenet/{MODES[split]}_{part}.pkl" for part in ("images_png", "labels")]],
        lambda root, split: learn2learn("TieredImagenet", root, split, True),
        lambda split: ["tiered-imagenet"],
        "get the tiered-imagenet-* files of zenodo.org/record/7978538 into {root}/tiered-imagenet, without that prefix",
    ),
}


def data_root(root: Union[str, Path, None]) -> Path:
    """The argument, or what L2L_NIW_DATA says."""
    root = os.environ.get("L2L_NIW_DATA") if root is None else root
    if not root:
        raise ArgumentError("root: say where the data are, by the argument or by the variable L2L_NIW_DATA.")
    return Path(root).expanduser()


def is_in_the_way(path: Path) -> bool:
    """Whether a download would write over something; an empty folder is nothing."""
    return any(path.iterdir()) if path.is_dir() else path.exists()


def load_images(name: str, split: str, root: Union[str, Path, None] = None, download: bool = False) -> Images:
    """
    **Description**

    All images of a split of a benchmark. They are read once a process. Nothing that is on disk is ever written over or
    deleted: where a download would have to, it is refused.

    **Arguments**

    * **name** (str) - One of learn2learn's benchmarks: 'omniglot', 'cifarfs', 'fc100', 'mini-imagenet',
        'tiered-imagenet'.
    * **split** (str) - 'train', 'validation' or 'test'.
    * **root** (str, *optional*, default=None) - Folder of the data; what the variable L2L_NIW_DATA says by default.
    * **download** (bool, *optional*, default=False) - Whether learn2learn may download what is not there.
    """
    if name not in SOURCES:
        raise ArgumentError(f"name must be one of {', '.join(SOURCES)}; got {name!r}.")
    if split not in MODES:
        raise ArgumentError(f"split must be one of {', '.join(MODES)}; got {split!r}.")
    source, root = SOURCES[name], data_root(root)
    remedy = source.remedy.format(root=root)
    if not any(all((root / path).exists() for path in paths) for paths in source.paths(split)):
        wanted = ", or ".join(" and ".join(str(root / path) for path in paths) for paths in source.paths(split))
        if not download:
            raise DataError(
                f"No {name} ({split}): looked for {wanted}. Either {remedy}, or let learn2learn download it: "
                "download=True, `python -m l2l_niw train --download`."
            )
        in_the_way = [str(root / path) for path in source.writes(split) if is_in_the_way(root / path)]
        if in_the_way:
            raise DataError(
                f"No {name} ({split}): looked for {wanted}. A download would write to {in_the_way[0]}, which is there "
                "already, perhaps of an earlier download that was cut off: move it away first."
            )
        root.mkdir(parents=True, exist_ok=True)
        try:
            source.download(root, split)
        except Exception as error:  # of the network, or of whatever reads what has come instead of the data
            left = [str(root / path) for path in source.writes(split) if is_in_the_way(root / path)]
            again = f"Move away {' and '.join(left)}, try again" if left else "Try again"
            raise DataError(
                f"{name} ({split}) cannot be downloaded: {error}. {again} where there is a network, or {remedy}."
            ) from error
    try:
        return _read(name, split, root)
    except (OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).rstrip(".")
        raise DataError(
            f"{name} ({split}) under {root} cannot be read: {reason}. Move away what is broken, and {remedy}."
        ) from error


@cache
def _read(name: str, split: str, root: Path) -> Images:
    return SOURCES[name].read(root, split)
