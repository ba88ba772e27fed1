"""What the tests of the pose benchmark share: tiny columns, and the script in this process."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import pose
from pose_estimation.columns import COLUMNS, tasksets_of
from pose_estimation.rows import ROWS
from pose_estimation.scoring import encoded

TINY = {"size": 16, "batches": 4, "meta_batch": 2, "validations": 2, "validation_tasks": 2, "test_tasks": 3}
TINY |= {"shots": 4, "queries": 4, "primitives": True}


def tiny(name, **more):
    """A column with tiny images and little of everything."""
    return replace(COLUMNS[name], **{**TINY, **more})


def built(column, method, index=0):
    """A row's method with one of its settings."""
    space = ROWS[method].space
    settings = {key: value for key, value in (space[index] if space else {}).items() if key != "lr"}
    return ROWS[method].build(column, **settings)


def batches(column):
    """A batch of training, and one of the intra-category test whose queries are poses."""
    tasksets = tasksets_of(column, 0)
    test = tasksets.test.batch(2)
    return encoded(column.space, tasksets.train.batch(2)), encoded(column.space, test), test.y_query


def call(monkeypatch, results, *arguments):
    """The benchmark's command line with --quick, which the tests make tiny."""
    monkeypatch.setattr(pose, "QUICK", TINY)
    monkeypatch.setattr(sys, "argv", ["pose.py", "--quick", "--results", str(results), *arguments])
    pose.main()
