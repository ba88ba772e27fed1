#!/usr/bin/env python3

"""
Few-shot images: NIW beside MAML, ANIL, Reptile, ProtoNet, ridge, MetaOptNet, FEAT, MetaQDA and the fixed backbone alone
on CIFAR-FS, with calibration, in domain and under shift.

    python benchmarks/few_shot_images.py --data ROOT --tune --jobs 2     # search settings, on validation tasks
    python benchmarks/few_shot_images.py --data ROOT --jobs 2            # train and test every method, three seeds
    python benchmarks/few_shot_images.py --columns cifarfs-5-1 --methods protonet niw-ncc --data ROOT
    python benchmarks/few_shot_images.py --report                        # tables and plots of what has been run

Settings are searched and runs resume as few_shot.py says. Four pretrainings are shared by all methods; their weights
are kept under results/images/pretrained, and without them the first run makes them, half an hour each.
"""

import shutil
from pathlib import Path

from few_shot import Benchmark

from l2l_niw.utils._disk_cache import cache_path
from l2l_niw.utils._files import make_folder
from l2l_niw.vision import Config
from l2l_niw.vision.methods import trainable

BUDGET = {
    "filters": 64, "pretraining": 60, "backbones": 4, "batchnorm": "running", "precision": "bfloat16",
    "iterations": 1000, "validations": 5, "validation_tasks": 100,
}  # fmt: skip
COLUMNS = {
    "cifarfs-5-1": Config(dataset="cifarfs", ways=5, shots=1, queries=15, train_queries=5, **BUDGET),
    "cifarfs-5-5": Config(dataset="cifarfs", ways=5, shots=5, queries=15, train_queries=5, **BUDGET),
}
ELSEWHERE = ("niw-ncc-rank", "niw-qda-rank", "niw-ncc-paper")  # in results/small_images, and pretrained_images.py
BENCHMARK = Benchmark(
    columns=COLUMNS,
    methods=tuple(method for method in trainable(COLUMNS["cifarfs-5-1"]) if method not in ELSEWHERE),
    results=Path(__file__).parent / "results" / "images",
    outer=(0.0002, 0.0005, 0.001, 0.002),
    two=(0.0005, 0.001),
    alone=(0.003, 0.006, 0.02, 0.06),
    inner={
        **dict.fromkeys(("maml", "fomaml", "reptile"), (0.01, 0.03)), "anil": (0.1, 0.3), "linear": (0.1, 0.4)
    },
    full_widths=(10.0, 40.0),  # a tenth of these is the prior's width
    of_heads={"cifarfs-5-5": {"inner_lr": 0.001}},  # with five shots 0.01 costs accuracy on validation tasks
    shifted=("cifarfs-5-1",),
)  # fmt: skip


def share_pretrained(results):
    """Puts pretrained weights that are kept beside the results into the cache, and new ones beside the results."""
    kept, cache = results / "pretrained", cache_path("").parent
    for source, target in ((kept, cache), (cache, kept)):
        for path in source.glob("cifarfs-conv4-64-60-*.safetensors"):
            if not (target / path.name).exists():
                make_folder(target)
                shutil.copy(path, target / path.name)


if __name__ == "__main__":
    BENCHMARK.main(__doc__, share_pretrained)
