"""The benchmark of meta-gradients."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from drawings import SMALL, draw_cifarfs

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import meta_gradients

from l2l_niw.vision import build
from l2l_niw.vision.tasks import tasksets_of


def test_the_graph_of_all_steps_has_maml_s_gradient_and_others_come_near(tmp_path):
    config = replace(SMALL, method="maml")
    tasks = tasksets_of(config, draw_cifarfs(tmp_path)).train
    found = meta_gradients.compare(build(config).module.module, [tasks[i] for i in range(3)], lr=0.4, steps=2)
    cosines, ratios = ([line[k] for line in found] for k in (1, 2))
    assert cosines[3] == pytest.approx(1.0, abs=1e-5)
    assert ratios[3] == pytest.approx(1.0, abs=1e-4)
    assert cosines[1] < cosines[2] < 1 - 1e-5


def test_the_table_is_in_the_order_of_training(tmp_path, monkeypatch, capsys):
    line = ["--dataset", "cifarfs", "--ways", "2", "--steps", "1", "--tasks", "2", "--pretraining", "0"]
    line += ["--batches", "2", "0", "--data", str(draw_cifarfs(tmp_path, each=25))]
    monkeypatch.setattr(sys, "argv", ["meta_gradients.py", *line])
    meta_gradients.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| 0"] * 4 + ["| 2"] * 4
