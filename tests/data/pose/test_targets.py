"""Targets of poses against scipy's rotations, and what an offset does to them."""

import math

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from l2l_niw.data.pose import camera_rotation, pose_targets, rotation_quaternion
from l2l_niw.data.pose.targets import OFFSETS, quaternion_product, turn
from l2l_niw.errors import ArgumentError
from l2l_niw.metrics import angular_error, rotation_error

A = torch.tensor([0.0, 10.0, 95.0, 180.0, 200.0, 355.0], dtype=torch.float64)
E = torch.tensor([0.0, 30.0, -20.0, 15.0, 0.0, 5.0], dtype=torch.float64)


def scipys(quaternion):
    return Rotation.from_quat(np.roll(quaternion.numpy(), -1, -1))


def test_quaternions_are_the_cameras_rotations():
    found = rotation_quaternion(A, E)
    np.testing.assert_allclose(scipys(found).as_matrix(), camera_rotation(A.numpy(), E.numpy()), atol=1e-12)
    assert (found[:, 0] >= 0).all()
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(6, dtype=torch.float64))


def test_products_are_scipys():
    p, q = (torch.from_numpy(np.roll(Rotation.random(50, random_state=k).as_quat(), 1, -1)) for k in (0, 1))
    expected = (scipys(p) * scipys(q)).as_matrix()
    np.testing.assert_allclose(scipys(quaternion_product(p, q)).as_matrix(), expected, atol=1e-12)
    for axis, name in enumerate("xyz"):
        expected = Rotation.from_euler(name, 70, degrees=True).as_matrix()
        np.testing.assert_allclose(scipys(turn(axis, torch.tensor(70.0))).as_matrix(), expected, atol=1e-6)


def test_azimuths_as_vectors_and_in_pascals_scale():
    found = pose_targets("vector", A, E).double()
    angle = np.angle(found[:, 1].numpy() + 1j * found[:, 0].numpy(), deg=True) % 360
    assert angle == pytest.approx(A.numpy(), abs=1e-4)
    assert pose_targets("scaled", A, E).squeeze(1).tolist() == pytest.approx((A / 36).tolist())
    assert pose_targets("scaled", torch.tensor([-36.0, 720.0]), torch.zeros(2)).tolist() == [[9.0], [0.0]]
    with pytest.raises(ArgumentError, match="kind must be"):
        pose_targets("position", A, E)


def test_an_offset_turns_all_azimuths_of_a_task_by_one_angle():
    before = pose_targets("vector", A, E)
    offsets = []
    for seed in range(200):
        after = OFFSETS["vector"](before, np.random.default_rng(seed), 64)
        turned = (after[:, 1] + 1j * after[:, 0]) / (before[:, 1] + 1j * before[:, 0])
        assert (turned - turned[0]).abs().max() < 1e-5
        offsets.append(turned[0].angle().item())
    assert np.abs(np.exp(1j * np.array(offsets)).mean()) < 0.15  # all round the circle
    assert angular_error(after[1:2], after[2:3]).item() == pytest.approx(85, abs=1e-2)


def test_an_offset_of_the_scaled_azimuth_goes_round_at_10():
    before = pose_targets("scaled", A, E)
    after = torch.stack([OFFSETS["scaled"](before, np.random.default_rng(k), 64) for k in range(100)])
    assert after.min() >= 0
    assert after.max() < 10
    off = (after - before) / 10 * 2 * math.pi
    phase = torch.exp(1j * off).squeeze(-1)
    assert (phase - phase[:, :1]).abs().max() < 1e-4
    assert phase[:, 0].mean().abs() < 0.25


def test_an_offset_of_quaternions_is_a_smaller_azimuth_without_a_jump():
    azimuth, elevation = torch.linspace(0, 180, 37, dtype=torch.float64), torch.full((37,), 20.0, dtype=torch.float64)
    before = rotation_quaternion(azimuth, elevation)
    for seed in range(20):
        offset = np.random.default_rng(seed).uniform(-180, 0)
        after = OFFSETS["quaternion"](before, np.random.default_rng(seed), 64)
        assert rotation_error(after, rotation_quaternion(azimuth + offset, elevation)).max() < 1e-6
        assert (after[1:] - after[:-1]).norm(dim=-1).max() < 0.06  # 5 degrees each
        assert (after[:, 0] >= 0).all()


def test_an_offset_of_positions_is_one_shift_round_the_edges():
    before = torch.tensor([[3.0, 60.0], [31.5, 31.5], [60.0, 2.0]])
    for seed in range(20):
        after = OFFSETS["position"](before, np.random.default_rng(seed), 64)
        shift = (after - before) % 64
        torch.testing.assert_close(shift, shift[:1].expand(3, 2))
        assert (shift[0] <= 8).all()
        assert ((after >= 0) & (after < 64)).all()
