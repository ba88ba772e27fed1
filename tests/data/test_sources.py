"""Sine-Line as learn2learn and torchmeta hand out tasks."""

import builtins
from importlib.util import find_spec
from itertools import islice

import pytest
import torch
from torch.nn import functional as F

from l2l_niw import NIW
from l2l_niw.data import SineLine
from l2l_niw.data.sources import SineLineTaskset, sine_line_tasksets, torchmeta_sine_line
from l2l_niw.errors import ArgumentError, ExtraError
from l2l_niw.models import MLP


def test_a_task_is_the_same_whenever_it_is_asked_for():
    one, other = (SineLineTaskset(SineLine(), 10, seed=3) for _ in range(2))
    for i in (0, 9, 4):
        assert all(torch.equal(a, b) for a, b in zip(one[i], other[i]))
    assert len(one) == 10
    assert all(torch.equal(a, b) for a, b in zip(one.sample(), other.sample()))
    assert not torch.equal(one[0][1], one[1][1])


def test_its_tasks_are_the_family_s():
    family = SineLine(shots=3, points=20)
    x, y = SineLineTaskset(family)[7]
    assert x.shape == y.shape == (20, 1)
    assert torch.equal(x.flatten().sort().values, family.grid)
    everything = torch.stack([y for _, y in islice(SineLineTaskset(SineLine(), seed=1), 3000)])
    # E y^2 = (E A^2 E sin^2 + E a^2 E x^2 + E b^2) / 2 + noise^2, over the 50 inputs
    grid = SineLine().grid.double()
    phases = torch.linspace(0, torch.pi, 2001).double().unsqueeze(1)
    expected = (
        (5**3 - 0.1**3) / (3 * 4.9) * torch.sin(grid + phases).square().mean() + 3 * grid.square().mean() + 3
    ) / 2
    assert everything.square().mean().item() == pytest.approx(expected.item() + 0.09, rel=0.05)


def test_train_validation_and_test_differ_and_train_an_unmodified_loop():
    tasksets = sine_line_tasksets(num_tasks=-1, test_tasks=4)
    assert len(tasksets.test) == 4
    assert len({tuple(taskset[0][1].flatten().tolist()) for taskset in tasksets}) == 3
    niw = NIW(MLP(1, (16, 1)), lr=0.01)
    x, y = tasksets.train.sample()
    learner = niw.clone()
    learner.adapt(F.mse_loss(learner(x[:5]), y[:5]))
    F.mse_loss(learner(x[5:]), y[5:]).backward()
    assert all(p.grad.isfinite().all() for p in niw.parameters())
    assert [len(task) for task in tasksets.test] == [2] * 4


@pytest.mark.skipif(find_spec("torchmeta") is None, reason="torchmeta is not installed")
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_torchmeta_s_loader_has_the_same_tasks(split):
    data = torchmeta_sine_line(num_tasks=8, seed=2, split=split)
    from torchmeta.utils.data import BatchMetaDataLoader

    batch = next(iter(BatchMetaDataLoader(data, batch_size=4, shuffle=False)))
    taskset = getattr(sine_line_tasksets(num_tasks=8, test_tasks=8, seed=2), split)
    for part, rows in (("train", slice(0, 5)), ("test", slice(5, 50))):
        for found, k in zip(batch[part], (0, 1)):
            assert torch.equal(found, torch.stack([taskset[i][k][rows] for i in range(4)]))
    assert len(data) == 8


def test_bad_input_is_named(monkeypatch):
    with pytest.raises(ArgumentError, match="num_tasks"):
        SineLineTaskset(SineLine(), 0)
    with pytest.raises(ArgumentError, match="seed"):
        sine_line_tasksets(seed=-1)
    with pytest.raises(ArgumentError, match="split"):
        torchmeta_sine_line(split="val")
    with pytest.raises(IndexError):
        SineLineTaskset(SineLine(), 3)[3]
    original = builtins.__import__
    absent = lambda name, *a: (_ for _ in ()).throw(ImportError) if "torchmeta" in name else original(name, *a)  # noqa: E731
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ExtraError, match="--no-deps torchmeta"):
        torchmeta_sine_line()
