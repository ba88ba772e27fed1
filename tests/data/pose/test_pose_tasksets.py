"""Tasks of views that there are: numbers, shots, backgrounds, augmentation."""

import numpy as np
import pytest
import torch

from l2l_niw.data.pose import AugmentedTaskset, PoseData, ViewTaskset
from l2l_niw.errors import ArgumentError

OBJECTS, VIEWS = 6, 30


def data(kind="scaled", alpha=False):
    """Views that say which they are: the first pixel is the object's number, the second one the view's."""
    images = torch.zeros(OBJECTS, VIEWS, 1, 8, 8, dtype=torch.uint8)
    images[..., 0, 0] = torch.arange(OBJECTS).view(-1, 1, 1)
    images[..., 0, 1] = torch.arange(VIEWS).view(1, -1, 1)
    width = {"scaled": 1, "position": 2}[kind]
    targets = (torch.arange(VIEWS) / 3.0).view(1, -1, 1).expand(OBJECTS, VIEWS, width).contiguous()
    covered = torch.zeros(OBJECTS, VIEWS, 8, 8, dtype=torch.uint8)
    covered[..., 0, :2] = 255
    return PoseData(images, targets, kind, covered if alpha else None)


def views(x):
    return (255 * x[..., 0, 0, :2]).round().int()


def test_a_task_is_one_object_and_every_view_is_in_it_once_with_its_target():
    taskset = ViewTaskset(data(), shots=10, queries=20)
    objects = []
    for i in range(60):
        x, y, x_query, y_query = taskset[i]
        assert x.shape == (10, 1, 8, 8)
        assert y_query.shape == (20, 1)
        found = views(torch.cat([x, x_query]))
        assert len(found[:, 0].unique()) == 1
        assert sorted(found[:, 1].tolist()) == list(range(VIEWS))
        torch.testing.assert_close(torch.cat([y, y_query])[:, 0], found[:, 1] / 3.0)
        objects.append(found[0, 0].item())
        assert objects[-1] == taskset.object_of(i)
    assert set(objects) == set(range(OBJECTS))


def test_tasks_have_numbers_and_seeds():
    one, two, other = ViewTaskset(data()), ViewTaskset(data()), ViewTaskset(data(), seed=(0, 1))
    two[3], two.sample()
    for a, b in zip(one[17], two[17]):
        assert torch.equal(a, b)
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one[17], other[17]))
    first = [one.sample() for _ in range(3)]
    assert all(torch.equal(a.x, one[k].x) for k, a in enumerate(first))
    short = ViewTaskset(data(), num_tasks=2)
    assert len(list(short)) == 2
    assert torch.equal(short.batch(3).x_query[2], short[0].x_query)
    with pytest.raises(IndexError):
        short[2]


def test_numbers_of_shots_are_uniform_and_their_own():
    taskset = ViewTaskset(data(), shots=(3, 15), queries=15)
    counts = np.bincount([len(taskset[i].x) for i in range(1300)], minlength=16)
    assert counts[:3].sum() == 0
    assert (np.abs(counts[3:] - 100) < 35).all()  # 3.6 standard deviations
    assert {len(ViewTaskset(data(), shots=4)[i].x) for i in range(20)} == {4}


def test_a_batch_has_its_first_tasks_number_of_shots_and_the_tasks_own_objects_and_queries():
    taskset = ViewTaskset(data(), shots=(3, 15), queries=15)
    sizes = set()
    for start in range(0, 40, 4):
        batch = taskset.batch(4)
        shots = len(taskset[start].x)
        assert batch.x.shape == (4, shots, 1, 8, 8)
        sizes.add(shots)
        for k in range(4):
            alone = taskset[start + k]
            assert torch.equal(batch.x_query[k], alone.x_query)
            assert torch.equal(batch.y_query[k], alone.y_query)
            both = min(shots, len(alone.x))
            assert torch.equal(batch.x[k, :both], alone.x[:both])
            assert torch.equal(batch.y[k, :both], alone.y[:both])
    assert len(sizes) > 3


def test_domain_randomisation_leaves_the_object_and_changes_what_is_behind():
    plain, taskset = ViewTaskset(data(alpha=True)), ViewTaskset(data(alpha=True), randomised=True)
    same = {}
    for i in range(30):
        task, before = taskset[i], plain[i]
        assert torch.equal(views(task.x), views(before.x))
        assert torch.equal(task.x_query, taskset[i].x_query)
        for x, number in zip(task.x_query, views(task.x_query).tolist()):
            same.setdefault(tuple(number), []).append(x[0, 4])
    rows = [torch.stack(own) for own in same.values() if len(own) > 1]
    assert len(rows) > 20
    assert all(torch.pdist(own).min() > 0.01 for own in rows)
    with pytest.raises(ArgumentError, match="data has no alpha"):
        ViewTaskset(data(), randomised=True)


def test_task_augmentation_is_one_offset_for_a_task_and_leaves_images_alone():
    plain = ViewTaskset(data())
    taskset = AugmentedTaskset(plain, images=False)
    offsets = []
    for i in range(50):
        task, before = taskset[i], plain[i]
        assert torch.equal(task.x, before.x)
        assert torch.equal(task.x_query, before.x_query)
        off = (torch.cat([task.y, task.y_query]) - torch.cat([before.y, before.y_query])) % 10
        assert off.max() - off.min() < 1e-4
        offsets.append(off[0].item())
        assert torch.equal(taskset[i].y, task.y)
    assert np.histogram(offsets, 5, (0, 10))[0].min() >= 4
    assert np.abs(np.subtract(offsets, [AugmentedTaskset(plain, seed=1)[i].y[0, 0] for i in range(50)])).min() > 0


def test_data_augmentation_changes_images_and_leaves_targets_alone():
    bright = data()
    bright.images[..., 3:6, 3:6] = 200
    plain = ViewTaskset(bright)
    taskset = AugmentedTaskset(plain, targets=False)
    for i in range(5):
        task, before = taskset[i], plain[i]
        assert torch.equal(task.y, before.y)
        assert torch.equal(task.y_query, before.y_query)
        assert not torch.equal(task.x_query, before.x_query)
        assert torch.equal(task.x_query, taskset[i].x_query)
    batch = taskset.batch(4)
    assert batch.x.shape[:2] == (4, len(plain[0].x))
    assert torch.equal(batch.x_query[2], taskset[2].x_query)


def test_images_of_positions_do_not_move():
    bright = data("position")
    bright.images[:] = 0
    bright.images[..., 2, 6] = 255
    taskset = AugmentedTaskset(ViewTaskset(bright, shots=3), targets=False)
    seen = torch.cat([taskset[i].x_query for i in range(10)])[:, 0]
    there = seen.amax((1, 2)) > 0.3
    brightest = seen[there].flatten(1) >= seen[there].amax((1, 2)).unsqueeze(1) - 1e-6
    assert there.sum() > 60
    assert brightest[:, 2 * 8 + 6].float().mean() > 0.95  # but for a dropped one that was blurred before


@pytest.mark.parametrize(("options", "message"), [
    ({"shots": 16}, "shots . queries is 31, but an object has 30 views"),
    ({"shots": 0}, "shots must be"),
    ({"shots": (5, 4)}, "greatest number must be"),
    ({"queries": 0}, "queries must be"),
    ({"num_tasks": 0}, "num_tasks must be"),
    ({"seed": (0, -1)}, "seed must be"),
    ({"data": data()._replace(kind="angle")}, "kind must be one of"),
    ({"data": data()._replace(kind="vector")}, r"targets of shape \(6, 30, 2\), got \(6, 30, 1\)"),
    ({"data": data()._replace(images=data().images.float())}, "images in bytes"),
    ({"data": data()._replace(images=data().images[:, :, 0])}, "images in bytes"),
    ({"data": data()._replace(images=data().images[:0])}, "objects must be"),
])  # fmt: skip
def test_arguments_are_named(options, message):
    with pytest.raises(ArgumentError, match=message):
        ViewTaskset(**{"data": data(), **options})


def test_only_tasks_of_poses_are_augmented():
    with pytest.raises(ArgumentError, match="taskset must be"):
        AugmentedTaskset(data())
    with pytest.raises(ArgumentError, match="n must be"):
        ViewTaskset(data()).batch(0)
