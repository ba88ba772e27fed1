"""Views of many objects: rendered once, by content, and the same ones whenever they are asked for."""

import numpy as np
import pytest
import torch

from l2l_niw.data.pose import primitives, random_views, render, rendered
from l2l_niw.data.pose import views as module
from l2l_niw.data.pose.views import coloured, grey
from l2l_niw.errors import ArgumentError

pytest.importorskip("embreex", reason="needs the extra pose")
pytest.importorskip("trimesh", reason="needs the extra pose")


@pytest.fixture
def renders(monkeypatch, tmp_path):
    """How often `render` has been called since, with an empty cache."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return render(*arguments)

    monkeypatch.setattr(module, "render", counted)
    return calls


def test_views_are_those_of_render():
    meshes, azimuth = primitives(1)[:2], np.array([[0.0, 50.0], [10.0, 300.0]])
    found = rendered(meshes, azimuth, np.array([20.0, 30.0]), 16)
    for k, mesh in enumerate(meshes):
        expected = render(mesh, azimuth[k], [20.0, 30.0], 16)
        np.testing.assert_array_equal(found.shade[k], expected.shade)
        np.testing.assert_array_equal(found.alpha[k], expected.alpha)
    assert found.azimuth.tolist() == azimuth.tolist()
    assert found.elevation.tolist() == [[20, 30]] * 2


def test_views_are_rendered_once_and_anew_for_whatever_changes_them(renders):
    meshes, azimuth, elevation = primitives(1)[:2], np.array([0.0, 90.0]), np.array([20.0, 20.0])
    first = rendered(meshes, azimuth, elevation, 8)
    assert len(renders) == 2
    again = rendered([mesh._replace(name="other") for mesh in meshes], azimuth, elevation, 8)
    assert len(renders) == 2
    assert torch.equal(first.shade, again.shade)
    moved = meshes[0]._replace(vertices=0.9 * meshes[0].vertices)
    for other in (
        ((moved, meshes[1]), azimuth, elevation, 8),
        (meshes[::-1], azimuth, elevation, 8),
        (meshes, azimuth + 1, elevation, 8),
        (meshes, azimuth, elevation + 1, 8),
        (meshes, azimuth, elevation, 9),
        (meshes, azimuth, elevation, 8, 3.0),
        (meshes, azimuth, elevation, 8, None, (0, 0, 1)),
    ):
        before = len(renders)
        rendered(*other)
        assert len(renders) == before + 2


def test_random_views_are_uniform_within_their_ranges():
    found = random_views(primitives(2), 100, (-30, 60), (0, 30), size=4)
    for angles, low, high in ((found.azimuth, -30, 60), (found.elevation, 0, 30)):
        assert low <= angles.min() < low + 0.1 * (high - low)
        assert high - 0.1 * (high - low) < angles.max() <= high
        assert angles.mean().item() == pytest.approx((low + high) / 2, abs=0.04 * (high - low))
    assert len(found.azimuth.unique()) == 1000  # of every object its own
    assert torch.equal(random_views(primitives(2), 100, (-30, 60), (0, 30), size=4).azimuth, found.azimuth)


def test_grey_and_coloured_images_have_the_views_brightness():
    found = random_views(primitives(1), 5, size=16)
    assert torch.equal(grey(found)[:, :, 0], found.shade)
    images = coloured(found)
    assert images.shape == (5, 5, 3, 16, 16)
    colours = []
    for shade, own in zip(found.shade.float(), images.float()):
        bright = shade > 100
        ratio = torch.stack([(own[:, c] / shade)[bright] for c in range(3)])
        colours.append(ratio.mean(1))
        assert (ratio - ratio.mean(1, keepdim=True)).abs().max() < 0.01
    assert all(((colour > 0.29) & (colour <= 1)).all() for colour in colours)
    assert min((a - b).abs().max() for i, a in enumerate(colours) for b in colours[:i]) > 0.05


def test_arguments_are_named():
    meshes = primitives(1)
    for call, message in (
        (lambda: rendered([], np.zeros(2), np.zeros(2)), "meshes is empty"),
        (lambda: rendered(meshes, np.zeros((2, 3)), np.zeros(3)), r"azimuth must be \(objects, views\)"),
        (lambda: rendered(meshes, np.zeros(()), np.zeros(())), "azimuth must be"),
        (lambda: random_views(meshes, 0), "views must be"),
        (lambda: random_views(meshes, 2, (10, 5)), "azimuths must be"),
        (lambda: random_views(meshes, 2, elevations=(0, 400)), "elevations must be"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
