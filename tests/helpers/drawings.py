"""Folders of pictures as the image benchmarks have them, drawn at random."""

import numpy as np
from PIL import Image

from l2l_niw.data import images
from l2l_niw.vision import Config

SMALL = Config(
    ways=3, queries=2, train_queries=2, filters=4, iterations=4, meta_batch=2, steps=2, inner_lr=0.05, samples=2,
    validations=2, validation_tasks=3, scaling_tasks=12, test_tasks=12,
)  # fmt: skip


def draw(folder, classes, each, shape, seed=0):
    """A folder for each class, of pictures that are noise around a colour of its own."""
    random = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        colour = random.integers(60, 196, size=shape[2:])
        for i in range(each):
            pixels = (colour + random.normal(0, 60, size=shape)).clip(0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i}.png")


def draw_cifarfs(root, classes=5, each=6):
    for seed, mode in enumerate(("train", "val", "test")):
        names = [f"class{k}" for k in range(classes)]
        draw(root / "cifarfs" / "processed" / mode, names, each, (32, 32, 3), seed)
    images._read.cache_clear()
    return root


def draw_omniglot(root, monkeypatch, each=6):
    """Eight characters instead of 1,623: four to train on, two each to validate and test."""
    monkeypatch.setattr(images, "CHARACTERS", 8)
    monkeypatch.setattr(images, "OMNIGLOT_SPLIT", {"train": (0, 4), "validation": (4, 6), "test": (6, 8)})
    draw(root / "omniglot-py" / "images_background", ["Greek/a", "Greek/b", "Latin/a"], each, (105, 105), 1)
    others = ["Tifinagh/a", "Tifinagh/b", "Korean/a", "Korean/b", "Korean/c"]
    draw(root / "omniglot-py" / "images_evaluation", others, each, (105, 105), 2)
    images._read.cache_clear()
    return root
