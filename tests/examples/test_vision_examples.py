"""The examples of examples/vision run, on drawn data and the smallest sizes."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from drawings import draw_cifarfs, draw_omniglot
from small_transformers import vit

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "vision"))

import niw_cifarfs
import niw_miniimagenet
import niw_omniglot
import niw_vit
import protonet_vs_niw
import reptile_as_niw

from l2l_niw.errors import DataError
from l2l_niw.models import vit_blocks

SMALL = {"ways": 2, "queries": 2, "filters": 4, "num_iterations": 2, "meta_batch_size": 2, "test_tasks": 3}


@pytest.mark.parametrize("method", ["niw", "maml"])
def test_omniglot_and_cifarfs_run_with_either_line(method, tmp_path, monkeypatch, capsys):
    for example, root in (
        (niw_omniglot, draw_omniglot(tmp_path, monkeypatch)),
        (niw_cifarfs, draw_cifarfs(tmp_path, classes=3)),
    ):
        results = example.main(method, data=root, **SMALL)
        assert 0 <= results["accuracy"] <= 1
        assert f"{method}: accuracy {results['accuracy']:.4f}, ece" in capsys.readouterr().out
        assert example.main(method, data=root, **SMALL) == results
        capsys.readouterr()


@pytest.mark.parametrize(("method", "adapters"), [("niw", 0), ("niw", 2), ("protonet", 0)])
def test_the_last_block_of_a_vision_transformer_is_trained(method, adapters, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    made = []

    def small(root):
        torch.manual_seed(0)
        made.append(vit_blocks(vit(), size=16))
        return made[-1]

    monkeypatch.setattr(niw_vit, "dinov2", small)
    root, options = draw_cifarfs(tmp_path, classes=3), {"ways": 2, "queries": 2, "num_iterations": 2, "test_tasks": 3}
    results = niw_vit.main(method, adapters=adapters, data=root, **options)
    assert f"{method}: accuracy {results['accuracy']:.4f}, ece" in capsys.readouterr().out
    assert niw_vit.main(method, adapters=adapters, data=root, **options) == results
    start, trained = small(root).state_dict(), made[-2]
    moved = {
        key.split(".")[0] for key, p in trained.state_dict().items() if "lora_" not in key
        and not torch.equal(p, start[key.replace(".base_layer.", ".")])
    }  # fmt: skip
    assert moved == (set() if adapters else {"4", "5"})  # the last block, and the norm after it


def test_without_the_transformers_file_the_example_says_where_it_looked(tmp_path):
    with pytest.raises(DataError, match="No DINOv2: looked for"):
        niw_vit.main(data=draw_cifarfs(tmp_path, classes=5))


@pytest.mark.parametrize("method", ["niw", "maml"])
def test_mini_imagenet_runs_with_either_line(method, tmp_path, capsys):
    random = np.random.default_rng(0)
    for mode in ("train", "validation", "test"):
        classes = {f"class{k}": list(range(4 * k, 4 * k + 4)) for k in range(2)}
        kept = {"image_data": random.integers(256, size=(8, 84, 84, 3), dtype=np.uint8), "class_dict": classes}
        (tmp_path / f"mini-imagenet-cache-{mode}.pkl").write_bytes(pickle.dumps(kept))
    found = niw_miniimagenet.main(
        method, ways=2, shots=1, meta_batch_size=1, num_iterations=1, fast_lr=0.01, root=str(tmp_path), cuda=False
    )
    printed = capsys.readouterr().out
    assert "iteration 0: train error" in printed
    assert f"test accuracy {found:.3f}" in printed


def test_support_and_query_of_mini_imagenet_share_no_image():
    class Learner:
        seen = []

        def __call__(self, data):
            self.seen.append(data[:, 0].tolist())
            return torch.zeros(len(data), 2, requires_grad=True)

        def adapt(self, error):
            pass

    data, labels = torch.arange(8.0).unsqueeze(1), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    niw_miniimagenet.fast_adapt((data, labels), Learner(), torch.nn.CrossEntropyLoss(), 1, 2, 2, "cpu")
    assert Learner.seen == [[0.0, 2.0, 4.0, 6.0], [1.0, 3.0, 5.0, 7.0]]


@pytest.mark.slow
def test_protonet_and_niw_are_compared(tmp_path, capsys):
    options = {"ways": 2, "queries": 2, "train_queries": 2, "filters": 4, "meta_batch": 1, "test_tasks": 12}
    protonet_vs_niw.main(
        iterations=1, data=draw_cifarfs(tmp_path / "data"), out=tmp_path / "out", validation_tasks=2, **options
    )
    printed = capsys.readouterr().out
    assert "| ProtoNet | 1 |" in printed
    assert "| NIW, nearest centroid | 1 |" in printed


def test_reptile_is_a_setting_of_niw(tmp_path, monkeypatch, capsys):
    root = draw_omniglot(tmp_path, monkeypatch)
    apart = reptile_as_niw.main(ways=2, shots=2, iterations=3, filters=4, data=root)
    assert apart < 1e-5
    assert f"differ by {apart:.2e}" in capsys.readouterr().out
