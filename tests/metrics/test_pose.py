"""Errors of poses: against scipy's rotations, complex numbers and Pythagoras."""

import math

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from l2l_niw.errors import ArgumentError
from l2l_niw.metrics import angular_error, pixel_distance, quaternion_distance, rotation_error


def test_angles_are_those_of_complex_numbers(double):
    torch.manual_seed(0)
    a, b = 2 * math.pi * torch.rand(2, 200)
    sizes = 0.1 + 5 * torch.rand(200, 1)
    found = angular_error(sizes * torch.stack([a.sin(), a.cos()], -1), torch.stack([b.sin(), b.cos()], -1))
    expected = np.abs(np.angle(np.exp(1j * (a - b).numpy()), deg=True))
    torch.testing.assert_close(found, torch.from_numpy(expected))


def test_angles_go_the_short_way_round():
    def at(degrees):
        return torch.tensor([[math.sin(math.radians(degrees)), math.cos(math.radians(degrees))]])

    assert angular_error(at(359), at(2)).item() == pytest.approx(3, abs=1e-3)
    assert angular_error(at(-90), at(90)).item() == pytest.approx(180, abs=1e-3)


def test_rotations_are_scipys(double):
    p, q = (Rotation.random(200, random_state=seed) for seed in (0, 1))
    p_wxyz, q_wxyz = (torch.from_numpy(np.roll(r.as_quat(), 1, -1)) for r in (p, q))
    expected = torch.from_numpy(np.rad2deg((p.inv() * q).magnitude()))
    torch.testing.assert_close(rotation_error(3 * p_wxyz, -q_wxyz), expected)
    assert rotation_error(p_wxyz, -p_wxyz).max() < 1e-12
    small = Rotation.from_rotvec([0, 1e-7, 0]) * p  # where arccos in float32 would say 0 or much more
    found = rotation_error(torch.from_numpy(np.roll(small.as_quat(), 1, -1)), p_wxyz)
    torch.testing.assert_close(found, torch.full((200,), math.degrees(1e-7)), rtol=1e-6, atol=0)


def test_quaternions_by_hand():
    target = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5], [0.6, 0.8, 0, 0]])
    prediction = torch.tensor([[3.0, 0, 4.0, 0], [-2.0, -2.0, -2.0, -2.0], [1.0, 1.0, 1.0, -1.0], [0, -7.0, 0, 0]])
    expected = torch.tensor([0.4 + 0.8, 0, 1, 0.6 + 0.2])
    torch.testing.assert_close(quaternion_distance(prediction, target), expected)


def test_positions_by_hand():
    found = pixel_distance(torch.tensor([[[3.0, 4.0], [1.0, 1.0]]]), torch.tensor([[[0.0, 0.0], [1.0, 1.0]]]))
    assert found.tolist() == [[5.0, 0.0]]


@pytest.mark.parametrize("metric", [angular_error, pixel_distance, quaternion_distance, rotation_error])
def test_other_shapes_are_named(metric):
    width = 2 if metric in (angular_error, pixel_distance) else 4
    with pytest.raises(ArgumentError, match=rf"must both be \(\.\.\., {width}\); got \(5, 3\)"):
        metric(torch.ones(5, 3), torch.ones(5, 3))
    with pytest.raises(ArgumentError, match="must both be"):
        metric(torch.ones(5, width), torch.ones(1, width))


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_no_direction_is_named(value):
    for metric, width in ((angular_error, 2), (quaternion_distance, 4), (rotation_error, 4)):
        with pytest.raises(ArgumentError, match="no direction"):
            metric(torch.full((3, width), value), torch.ones(3, width))
