"""The families of rendered objects: no object in two splits, targets that match the images, tests without the seed."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from l2l_niw.data.pose import (
    AugmentedTaskset,
    Mesh,
    azimuth_tasksets,
    furniture,
    position_tasksets,
    primitives,
    render,
    rotation_tasksets,
    screen,
    split_objects,
)
from l2l_niw.data.pose.benchmark import CROSS
from l2l_niw.errors import ArgumentError

pytest.importorskip("trimesh", reason="needs the extra pose")
pytest.importorskip("embreex", reason="needs the extra pose")
SHARED = Path(__file__).parents[4] / "shared" / "data"
FAMILIES = (azimuth_tasksets, rotation_tasksets, position_tasksets)
MESHES = primitives(5)
SMALL = {"size": 16, "shots": (2, 4), "queries": 5, "test_tasks": 6}


def named(counts):
    """Meshes by category and number, which nobody looks at."""
    return [
        Mesh(f"{category} {k}", category, np.zeros((3, 3)), np.zeros((1, 3), int))
        for category, count in counts.items()
        for k in range(count)
    ]


def test_every_object_is_in_one_split():
    meshes = named({"chair": 20, "table": 7, "sofa": 3, "crane": 4, "Lights": 2})
    splits = split_objects(meshes)
    names = [[mesh.name for mesh in own] for own in splits]
    assert sorted(sum(names, [])) == sorted(mesh.name for mesh in meshes)
    assert [Counter(mesh.category for mesh in own) for own in splits] == [
        {"chair": 14, "table": 5, "sofa": 3},
        {"chair": 2, "table": 1},
        {"chair": 4, "table": 1},
        {"crane": 4, "Lights": 2},
    ]
    assert names == [[mesh.name for mesh in own] for own in split_objects(meshes)]
    assert names[0][:14] != sorted(names[0][:14])  # shuffled
    assert {mesh.category for mesh in split_objects(meshes, cross=["sofa"]).cross} == {"sofa"}


@pytest.mark.parametrize(("meshes", "name"), [
    (named({"chair": 4, "crane": 1}), "validation"),
    (named({"chair": 9}), "cross"),
    (named({"crane": 9}), "train"),
])  # fmt: skip
def test_splits_without_an_object_are_named(meshes, name):
    with pytest.raises(ArgumentError, match=f"no object to {name}"):
        split_objects(meshes)


def test_azimuths_are_those_of_the_images():
    for kind in ("vector", "scaled"):
        tasksets = azimuth_tasksets(MESHES, **SMALL, kind=kind)
        for taskset, own in zip(tasksets, split_objects(MESHES)):
            task = taskset[1]
            for image, target in zip(task.x, task.y.numpy()):
                azimuth = np.rad2deg(np.arctan2(*target)) if kind == "vector" else 36 * target[0]
                expected = render(own[taskset.object_of(1)], [azimuth], [20], 16).shade[0]
                assert (np.abs(255 * image[0].numpy() - expected) < 3).mean() > 0.98  # of rounding, at edges


def test_rotations_are_those_of_the_images():
    """The mesh turned by a target's quaternion, seen from the front, covers what is no background."""
    tasksets = rotation_tasksets(MESHES, **SMALL, randomised=True)
    own, task = split_objects(MESHES).train, tasksets.train[0]
    plain = rotation_tasksets(MESHES, **SMALL).train[0]
    assert torch.equal(task.y, plain.y)
    assert not torch.equal(task.x, plain.x)
    for image, other, (w, x, y, z) in zip(task.x, plain.x, task.y.numpy()):
        assert w >= 0
        matrix = np.array([
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ])  # fmt: skip
        mesh = own[tasksets.train.object_of(0)]
        turned = mesh._replace(vertices=mesh.vertices @ matrix.T * (1 - 1e-6))
        inside = torch.from_numpy(render(turned, [0], [0], 16).alpha[0] == 255)
        off = (image - other).abs().amax(0)
        assert (off[inside] < 0.02).float().mean() > 0.95
        assert (off[~inside] > 0.02).float().mean() > 0.6


def test_azimuths_and_elevations_of_rotations_are_within_their_ranges():
    y = torch.cat([rotation_tasksets(MESHES, **SMALL).train[i].y_query for i in range(20)])
    w, x, y, z = y.unbind(-1)
    azimuth = torch.rad2deg(2 * torch.atan2(-y, w))  # w, y = cos(e/2) (cos(a/2), -sin(a/2))
    elevation = torch.rad2deg(2 * torch.atan2((x**2 + z**2).sqrt(), (w**2 + y**2).sqrt()))
    assert 0 <= azimuth.min() < 20
    assert 160 < azimuth.max() <= 180
    assert 0 <= elevation.min() < 5
    assert 25 < elevation.max() <= 30.001


def test_domain_randomisation_is_of_training_tasks_alone():
    for family in (azimuth_tasksets, rotation_tasksets):
        new, plain = family(MESHES, **SMALL, randomised=True), family(MESHES, **SMALL)
        for name in ("validation", "test", "cross"):
            assert torch.equal(getattr(new, name)[0].x, getattr(plain, name)[0].x)
        assert torch.equal(new.train[0].y, plain.train[0].y)
        corners = new.train[0].x_query[:, 0, 0, 0]
        assert len(corners.unique()) == len(corners)
        first, again = next(
            (i, j) for j in range(60) for i in range(j) if new.train.object_of(i) == new.train.object_of(j)
        )
        assert not set(new.train[first].x_query[:, 0, 0, 0].tolist()) & set(
            new.train[again].x_query[:, 0, 0, 0].tolist()
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_test_tasks_do_not_depend_on_the_seed_and_training_tasks_do(family):
    one, other = (family(MESHES, **SMALL, seed=seed) for seed in (0, 1))
    for name in ("validation", "test", "cross"):
        for a, b in zip(getattr(one, name), getattr(other, name)):
            assert all(torch.equal(part, own) for part, own in zip(a, b))
            assert len(a.x) == 4
        assert len(getattr(one, name)) == 6
    assert any(one.train[i].x_query.ne(other.train[i].x_query).any() for i in range(3))
    counts = [len(own) for own in split_objects(MESHES)]
    assert [taskset.objects for taskset in one] == counts == [12, 4, 4, 5]


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_can_be_augmented(family):
    tasksets = family(MESHES, **SMALL, test_shots=3)
    assert tasksets.cross.batch(2).x.shape[1] == 3
    x, y, x_query, y_query = AugmentedTaskset(tasksets.train).batch(3)
    channels = 3 if family is rotation_tasksets else 1
    assert x.shape[2:] == (channels, 16, 16)
    assert x_query.shape[:2] == y_query.shape[:2] == (3, 5)
    assert torch.isfinite(y).all()
    assert x.min() >= 0
    assert x.max() <= 1


def test_arguments_are_named():
    for call, message in (
        (lambda: azimuth_tasksets(MESHES, kind="quaternion"), "kind must be vector or scaled"),
        (lambda: azimuth_tasksets(MESHES, test_tasks=0), "test_tasks must be"),
        (lambda: azimuth_tasksets(MESHES, seed=-1), "seed must be"),
        (lambda: position_tasksets(MESHES, size=64, distractors=4), "distractors is 4, "),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()


@pytest.mark.skipif(not (SHARED / "furniture").is_dir(), reason="needs the furniture in ../shared/data")
def test_the_furniture_has_all_splits():
    kept = screen(furniture(SHARED)[::10]).kept
    splits = split_objects(kept, CROSS)
    assert min(map(len, splits)) >= 3
    assert not {mesh.category for mesh in splits.cross} & {mesh.category for mesh in splits.train}
    assert {mesh.category for mesh in splits.test} <= {mesh.category for mesh in splits.train}
