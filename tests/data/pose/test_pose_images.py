"""Backgrounds, scenes and random changes of images."""

import numpy as np
import pytest
import torch

from l2l_niw.data.pose import augmented, backgrounds
from l2l_niw.data.pose.images import _moved, on_backgrounds, over, place, scene
from l2l_niw.errors import ArgumentError


def generator(seed=0):
    return np.random.default_rng(seed)


def test_backgrounds_are_smooth_of_two_colours_and_all_different():
    found = backgrounds(60, 3, 32, generator())
    assert found.shape == (60, 3, 32, 32)
    assert found.min() >= 0
    assert found.max() <= 1
    assert torch.equal(found, backgrounds(60, 3, 32, generator()))
    for image in found:
        points = image.flatten(1).T
        assert torch.linalg.matrix_rank(points - points[0], atol=1e-3) <= 1  # on a line between two colours
        assert (image[:, 1:] - image[:, :-1]).abs().max() <= 0.6
    flat = found.flatten(1)
    assert torch.pdist(flat).min() > 1
    spread = (found.amax((-2, -1)) - found.amin((-2, -1))).amax(1)
    assert spread.mean() > 0.3


def test_gradients_are_planes():
    """The fifth kind: brightness is linear in the place."""
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    planes = torch.stack([x.flatten(), y.flatten(), torch.ones(256)], 1)
    residues = []
    for image in backgrounds(100, 1, 16, generator()):
        fit = torch.linalg.lstsq(planes, image.flatten().unsqueeze(1)).solution
        residues.append((planes @ fit - image.flatten().unsqueeze(1)).abs().max())
    assert 8 < sum(residue < 1e-4 for residue in residues) < 35  # a fifth of 100


def test_objects_go_over_what_is_behind():
    image, alpha = torch.tensor([0.6, 0.3, 0.0]), torch.tensor([1.0, 0.5, 0.0])
    torch.testing.assert_close(over(image, alpha, torch.full((3,), 0.8)), torch.tensor([0.6, 0.7, 0.8]))


def test_every_view_has_a_background_of_its_own():
    images = torch.zeros(2, 3, 3, 8, 8, dtype=torch.uint8)
    images[..., 2:4, 2:4] = 77
    alpha = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    alpha[..., 2:4, 2:4] = 255
    found = on_backgrounds(images, alpha, generator())
    assert (found[..., 2:4, 2:4] == 77).all()
    corner = found[..., 0, :].flatten(0, 1).flatten(1).float()
    assert torch.pdist(corner).min() > 1
    assert torch.equal(found, on_backgrounds(images, alpha, generator()))


def test_places_are_far_enough_apart_and_the_first_is_anywhere():
    first = np.zeros((12, 9))
    for seed in range(3000):
        found = place(3, 4.5, (12, 9), generator(seed))
        first[found[0]] += 1
        for i, (row, column) in enumerate(found):
            assert 0 <= row < 12
            assert 0 <= column < 9
            assert all((row - r) ** 2 + (column - c) ** 2 >= 4.5**2 for r, c in found[:i])
    assert ((first - 3000 / 108) ** 2 / (3000 / 108)).sum() < 160  # chi-squared with 107 degrees of freedom, p = 0.0007
    with pytest.raises(ArgumentError, match="3 objects do not fit"):
        place(3, 30, (12, 9), generator())


def test_a_scene_has_later_objects_before_earlier_ones():
    shades = [torch.full((2, 2), 0.4), torch.tensor([[0.9, 0.0], [0.45, 0.9]])]
    alphas = [torch.ones(2, 2), torch.tensor([[1.0, 0.0], [0.5, 1.0]])]
    found = scene(shades, alphas, [(0, 0), (0, 1)], 4)
    expected = torch.zeros(4, 4)
    expected[:2, :2] = 0.4
    expected[0, 1], expected[1, 1], expected[1, 2] = 0.9, 0.45 + 0.5 * 0.4, 0.9
    torch.testing.assert_close(found, expected)


def test_a_move_scales_about_the_middle_and_shifts_to_the_right_and_down():
    y, x = torch.meshgrid(torch.arange(40.0), torch.arange(40.0), indexing="ij")
    blob = torch.exp(-((x - 24.5) ** 2 + (y - 19.5) ** 2) / 8).expand(3, 1, 40, 40)
    scale, shift = np.array([[1, 1], [1.2, 1], [0.8, 0.9]]), np.array([[0.1, -0.05], [0, 0], [0, 0.1]])
    found = _moved(blob, scale, shift)
    weights = found / found.sum((-2, -1), keepdim=True)
    centre_x, centre_y = (weights * x).sum((-3, -2, -1)), (weights * y).sum((-3, -2, -1))
    assert centre_x.tolist() == pytest.approx([24.5 + 4, 19.5 + 1.2 * 5, 19.5 + 0.8 * 5], abs=0.02)
    assert centre_y.tolist() == pytest.approx([19.5 - 2, 19.5, 19.5 + 4], abs=0.02)
    width = (weights * (x - centre_x.view(-1, 1, 1, 1)) ** 2).sum((-3, -2, -1)) ** 0.5
    assert width.tolist() == pytest.approx([2, 2.4, 1.6], rel=0.03)


def test_changes_are_within_their_bounds_and_of_half_of_all_images():
    """Brightness 0.8 at the left, 0.6 at the right: only what is dropped becomes 0."""
    images = torch.full((4000, 1, 8, 8), 0.8)
    images[..., 4:] = 0.6
    found = augmented(images, generator(), moved=False)
    assert torch.equal(found, augmented(images, generator(), moved=False))
    kept = found[found > 0]
    assert kept.max().item() == pytest.approx(1)  # 0.8 ** 0.5 + 30 / 255 is more
    assert kept.min().item() == pytest.approx(0.6**2 - 30 / 255, abs=0.03)
    left = found[..., :3].amax((1, 2, 3))  # the average does not reach it
    assert ((left - 0.8).abs() < 1e-6).float().mean().item() == pytest.approx(0.25, abs=0.03)  # neither of two changes
    dropped = (found == 0).flatten(1)
    single = 1 - np.mean((1 - np.linspace(0.01, 0.1, 100)) ** 64)
    assert dropped.any(1).float().mean().item() == pytest.approx(0.5 * (0.5 * single + 0.5), abs=0.03)
    edge, inside = found[:, 0, 2, 4], found[:, 0, 2, 6]
    whole = (edge > 0) & (inside > 0)
    assert ((edge - inside).abs() > 1e-4)[whole].float().mean().item() == pytest.approx(0.5, abs=0.03)


def test_only_moves_change_places():
    """A bright pixel stays where it is unless images may move."""
    images = torch.zeros(200, 1, 17, 17)
    images[:, :, 8, 3] = 1

    def columns(moved):
        found = augmented(images, generator(), moved)
        return {int(image.sum((0, 1)).argmax()) for image in found if image[0, 8].max() > 0.3}

    assert columns(False) <= {3, 2}  # of a blurred one, the first of three alike
    assert len(columns(True)) > 3
