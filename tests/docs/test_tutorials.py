"""The tutorials run, on few iterations, and find what their pages say."""

import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch

from l2l_niw import EpisodicModel
from l2l_niw.heads import LeaveOneOut

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted(path.stem for path in (ROOT / "examples" / "tutorials").glob("*.py"))


def tutorial(name):
    """A tutorial as a module, under a name that no benchmark or example has."""
    path = ROOT / "examples" / "tutorials" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"tutorial_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_maml_and_niw_learn_in_the_same_loop(capsys):
    found = tutorial("swap").main(iterations=60, tasks_per_batch=4)
    printed = capsys.readouterr().out
    for method in ("MAML", "NIW"):
        assert found[method]["after"] < found[method]["before"]
        assert f"{method:4s}  loss on new tasks" in printed
    assert found["outputs"].shape == (10, 10, 1)
    assert found["outputs"].std(0).min() > 0  # sampled networks differ


def test_every_head_learns_to_classify():
    found = tutorial("heads").main(iterations=15, tasks_per_batch=2, test_tasks=20)
    assert len(found) == 3
    for scores in found.values():
        assert scores["accuracy"] > 0.6  # chance is 0.2
        assert scores["nll"] < math.log(5)


def test_the_width_is_the_best_on_validation_tasks_and_the_plot_is_written(tmp_path):
    plot = tmp_path / "reliability.png"
    found = tutorial("calibration").main(iterations=15, tasks=20, plot=plot)
    assert found["widths"][found["best"]] == min(found["widths"].values())
    assert 0.2 < found["temperature"] < 5
    assert found["accuracy"] > 0.5
    assert 0 <= found["ece"] < 0.3
    assert plot.stat().st_size > 0


def test_a_mixture_s_uncertainty_is_of_use():
    found = tutorial("uncertainty").main(iterations=40, tasks=40)
    assert found["responsibilities"] == pytest.approx([1 / 3] * 3)
    assert found["entropy"] > 0.65  # 0.5 is chance
    assert found["entropy"] > found["mutual information"]
    assert found["error of the surer half"] < 0.5 * found["error"]
    assert found["error"] < 0.4
    assert abs(found["coverage"] - 0.95) < 0.04


def test_a_batch_of_episodes_has_the_loops_gradient():
    found = tutorial("batches").main(iterations=40)
    assert found["last"] < found["first"]
    assert found["difference"] < 1e-4
    assert found["outputs"].shape == (10, 20, 45, 1)


def test_the_tutorials_own_head_learns():
    found = tutorial("own_head").main(iterations=40, tasks_per_batch=2, test_tasks=20)
    assert found["after"]["nll"] < found["before"]["nll"]
    assert found["after"]["accuracy"] > 0.5  # chance is 0.2


def test_the_tutorials_own_head_is_a_head():
    """What tests/heads asks of every head: probabilities, any order of the support, any labels, batches of episodes."""
    torch.manual_seed(0)
    model = EpisodicModel(torch.nn.Linear(16, 8), tutorial("own_head").Matching())
    x, y, x_query = torch.randn(9, 16), torch.tensor([7, 30, 2] * 3), torch.randn(4, 16)
    prediction = model(x, y, x_query)
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(4))
    order = torch.randperm(9)
    torch.testing.assert_close(model(x[order], y[order], x_query).probs, prediction.probs)
    assert set(prediction.mode.tolist()) <= {2, 7, 30}
    batched = model(torch.stack([x, x[order]]), torch.stack([y, y[order]]), torch.stack([x_query] * 2))
    torch.testing.assert_close(batched.probs[1], prediction.probs)
    by_vmap = torch.func.vmap(lambda a, b, c: model(a, b, c, ways=3).probs)(x[None], y[None], x_query[None])
    torch.testing.assert_close(by_vmap[0], prediction.probs)
    left_out = EpisodicModel(model.backbone, LeaveOneOut(model.head))
    assert left_out(x, y).nll(y) > model(x, y).nll(y)  # an example that may look at itself finds itself


def test_own_data_become_tasks_of_new_classes():
    module = tutorial("own_data")
    found = module.main(iterations=15, test_tasks=20)
    assert found["accuracy"] > 0.35  # chance is 0.2
    once, again = found["taskset"][3], found["taskset"][3]
    assert all(torch.equal(a, b) for a, b in zip(once, again))
    x, y, x_query, y_query = found["sample"]()
    assert torch.equal(torch.bincount(y), torch.full((5,), 2))
    assert torch.equal(torch.bincount(y_query), torch.full((5,), 5))
    assert not any(torch.equal(a, b) for a in x for b in x_query)
    images, labels = module.make_data()
    numbered = module.split(images, labels, range(20, 30))[1]
    assert torch.equal(numbered.unique(), torch.arange(10))


@pytest.mark.parametrize("name", TUTORIALS)
def test_every_tutorial_has_a_page_with_its_code(name):
    page = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text()
    assert f'--8<-- "examples/tutorials/{name}.py' in page
    assert f"tutorials/{name}.md" in (ROOT / "mkdocs.yml").read_text()
    sections = re.findall(rf'--8<-- "examples/tutorials/{name}\.py:(\w+)"', page)
    text = (ROOT / "examples" / "tutorials" / f"{name}.py").read_text()
    assert all(f"--8<-- [start:{section}]" in text for section in sections)
