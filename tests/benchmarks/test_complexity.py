"""Episodes whose cost is measured: what is trained of a transformer."""

import sys
from pathlib import Path

import pytest
import torch
from small_transformers import WIDTH, vit
from torch.nn import functional as F

from l2l_niw.models import vit_blocks

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import complexity_cells as cells


@pytest.fixture(autouse=True)
def small(monkeypatch):
    data = lambda: cells.images(16, ways=2, queries=1)  # noqa: E731
    network = (lambda: vit_blocks(vit(), size=16), WIDTH, data, F.cross_entropy)
    monkeypatch.setitem(cells.NETWORKS, "dinov2", network)
    monkeypatch.setitem(cells.HIDDEN, "dinov2", (5, WIDTH))


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("niw-block-5", {"4", "5", "out"}),  # the norm after it is the fifth
        ("niw-adapters-5", {"4 lora", "out"}),
        ("niw-adapters-all-5", {"2 lora", "3 lora", "4 lora", "out"}),
        ("niw-5", {"1", "2", "3", "4", "5", "out"}),
    ],
)
def test_what_a_task_adapts(method, expected):
    torch.manual_seed(0)
    niw, _, _ = cells.prepare("dinov2", method)
    names = [name.removeprefix("backbone.") for name in niw.prior().mean]
    assert {name.split(".")[0] + (" lora" if "lora_" in name else "") for name in names} == expected


@pytest.mark.parametrize("method", cells.OF_TRANSFORMERS)
def test_every_method_of_a_transformer_runs(method):
    episode, size = cells.episode_of("dinov2", method)
    episode()
    assert size == 1


def test_blocks_and_adapters_are_measured_on_pretrained_transformers_alone():
    assert set(cells.methods_of("dinov2", cells.METHODS)) == set(cells.OF_TRANSFORMERS)
    others = cells.methods_of("conv-4", cells.METHODS)
    assert set(cells.METHODS) - set(others) == {"niw-block-5", "niw-adapters-5", "niw-adapters-all-5"}
