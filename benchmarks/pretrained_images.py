#!/usr/bin/env python3

"""
Few-shot images on a pretrained transformer: the last block of DINOv2's ViT-S/14 with NIW and without it on CIFAR-FS.

    python benchmarks/pretrained_images.py --data ROOT --tune --jobs 2     # search settings, on validation tasks
    python benchmarks/pretrained_images.py --data ROOT --jobs 2            # train and test every method, three seeds
    python benchmarks/pretrained_images.py --report                        # tables and plots of what has been run

ROOT has CIFAR-FS, and dinov2/dinov2_vits14_11blocks_fp16.safetensors. What the frozen blocks compute of an image is
kept on disk, 25 kB each. Settings are searched and runs resume as few_shot.py says.
"""

from pathlib import Path

from few_shot import Benchmark

from l2l_niw.vision import Config

BUDGET = {
    "dataset": "cifarfs", "backbone": "dinov2", "blocks": 1, "precision": "bfloat16", "ways": 5, "queries": 15,
    "train_queries": 5, "iterations": 400, "validations": 4, "validation_tasks": 100, "scaling_tasks": 200,
    "test_tasks": 600,
}  # fmt: skip
COLUMNS = {f"cifarfs-5-{shots}": Config(shots=shots, **BUDGET) for shots in (1, 5)}
BENCHMARK = Benchmark(
    columns=COLUMNS,
    methods=(
        "simpleshot", "protonet", "metaoptnet", "metaqda", "niw-ncc", "niw-ncc-paper", "niw-ncc-lora", "niw-qda",
        "niw-qda-2",
    ),
    results=Path(__file__).parent / "results" / "pretrained_images",
    outer=(0.0005, 0.002, 0.006, 0.02),
    two=(0.002, 0.006),
    alone=(0.003, 0.006, 0.02, 0.06),
    inner={},
    full_widths=(),
    of_heads={"cifarfs-5-5": {"inner_lr": 0.001}},
)  # fmt: skip


if __name__ == "__main__":
    BENCHMARK.main(__doc__)
