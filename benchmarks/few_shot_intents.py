#!/usr/bin/env python3

"""
Few-shot intents: the last layer of a sentence encoder, all-MiniLM-L6-v2, with NIW and without it on CLINC150: accuracy,
calibration, and which texts are out of scope.

    python benchmarks/few_shot_intents.py --data ROOT --tune --jobs 2     # search settings, on validation tasks
    python benchmarks/few_shot_intents.py --data ROOT --jobs 2            # train and test every method, three seeds
    python benchmarks/few_shot_intents.py --columns clinc150-50-1 --methods protonet niw-ncc --data ROOT
    python benchmarks/few_shot_intents.py --report                        # tables and plots of what has been run

ROOT has clinc150/data_full.json.xz and clinc150/domains.json. A third of the intents each is for training, validation
and test; in the columns of domains the intents of a task are of one domain. Settings are searched and runs resume as
few_shot.py says.
"""

from pathlib import Path

from few_shot import Benchmark

from l2l_niw.vision import Config

BUDGET = {
    "backbone": "minilm", "blocks": 1, "precision": "bfloat16", "iterations": 400, "validations": 4,
    "validation_tasks": 50, "scaling_tasks": 200, "test_tasks": 400,
}  # fmt: skip
WAYS = {50: {"queries": 2, "train_queries": 2}, 10: {"queries": 5, "train_queries": 5}}
COLUMNS = {
    f"{dataset}-{ways}-{shots}": Config(dataset=dataset, ways=ways, shots=shots, **WAYS[ways], **BUDGET)
    for dataset, ways in (("clinc150", 50), ("clinc150", 10), ("clinc150-domains", 10))
    for shots in (1, 5)
}
BENCHMARK = Benchmark(
    columns=COLUMNS,
    methods=(
        "simpleshot", "protonet", "anil", "ridge", "metaqda", "niw-ncc", "niw-ncc-lora", "niw-ridge", "niw-qda",
        "niw-qda-2",
    ),
    results=Path(__file__).parent / "results" / "intents",
    outer=(0.0005, 0.002, 0.006, 0.02),
    two=(0.002, 0.006),
    alone=(0.003, 0.006, 0.02, 0.06),
    inner={"anil": (0.1, 0.3)},
    full_widths=(),
    of_heads={column: {"inner_lr": 0.001} for column in COLUMNS if column.endswith("-5")},
    shifted=tuple(COLUMNS),
)  # fmt: skip


if __name__ == "__main__":
    BENCHMARK.main(__doc__)
