"""Views against what geometry says of them: silhouettes, turned meshes, brightness."""

import sys

import numpy as np
import pytest
from scipy.spatial import ConvexHull
from scipy.spatial.transform import Rotation

from l2l_niw.data.pose import Mesh, camera_rotation, normalised, primitives, render
from l2l_niw.data.pose.render import AMBIENT
from l2l_niw.errors import ArgumentError, ExtraError

trimesh = pytest.importorskip("trimesh", reason="needs the extra pose")
pytest.importorskip("embreex", reason="needs the extra pose")


def mesh_of(shape):
    return Mesh("shape", "test", np.asarray(shape.vertices), np.asarray(shape.faces))


SPHERE = mesh_of(trimesh.creation.icosphere(subdivisions=4))
BOX = normalised(mesh_of(trimesh.creation.box((1.0, 2.0, 0.6))))


def coverage(view):
    """Part of the image that objects cover."""
    return view.alpha.astype(float).mean((-2, -1)) / 255


def test_cameras_are_scipys_rotations():
    a, e = np.array([0.0, 30.0, 200.0, -75.0]), np.array([0.0, 10.0, -40.0, 90.0])
    expected = Rotation.from_euler("x", e[:, None], degrees=True) * Rotation.from_euler("y", -a[:, None], degrees=True)
    np.testing.assert_allclose(camera_rotation(a, e), expected.as_matrix(), atol=1e-15)


def test_the_camera_s_place():
    """Where the camera is, in the object's coordinates, is its z axis."""
    for azimuth, elevation, place in ((0, 0, (0, 0, 1)), (90, 0, (1, 0, 0)), (0, 90, (0, 1, 0))):
        assert camera_rotation(np.array(azimuth), np.array(elevation))[2] == pytest.approx(place, abs=1e-15)


def test_a_sphere_fills_the_image_of_either_camera():
    for distance in (None, 1.5, 4.0):
        view = render(SPHERE, [0, 50], [0, 30], 64, distance)
        assert coverage(view) == pytest.approx([np.pi / 4] * 2, abs=0.01)
        rows, columns = np.nonzero(view.alpha[0])
        assert (rows.min(), rows.max(), columns.min(), columns.max()) == (0, 63, 0, 63)


@pytest.mark.parametrize("distance", [None, 2.5])
def test_the_silhouette_of_a_box_is_the_hull_of_its_projected_corners(distance):
    azimuth, elevation = np.array([0.0, 25.0, 140.0, 250.0]), np.array([0.0, 35.0, -20.0, 80.0])
    view = render(BOX, azimuth, elevation, 96, distance)
    for rotation, found in zip(camera_rotation(azimuth, elevation), coverage(view)):
        corners = BOX.vertices @ rotation.T
        plane = corners[:, :2]
        if distance is not None:  # 1 at the edge of the cone that touches the unit sphere
            plane = plane / (distance - corners[:, 2:]) * np.sqrt(distance**2 - 1)
        assert found == pytest.approx(ConvexHull(plane).volume / 4, rel=0.015)  # rays along an edge


def test_the_object_is_the_right_way_up_and_not_mirrored():
    """A post at the left and a high beam to the right, seen from the front."""
    parts = [((0.2, 2, 0.2), (-1, 0, 0)), ((2, 0.2, 0.2), (0, 0.9, 0))]
    boxes = [trimesh.creation.box(e, trimesh.transformations.translation_matrix(c)) for e, c in parts]
    alpha = render(normalised(mesh_of(trimesh.util.concatenate(boxes))), [0, 180], [0, 0], 40).alpha
    column, row = alpha[0].sum(0).argmax(), alpha[0].sum(1).argmax()
    assert column < 17
    assert row < 14
    assert alpha[1].sum(0).argmax() > 22


def test_a_turn_of_the_camera_is_that_of_the_mesh_the_other_way():
    mesh, azimuth, elevation = primitives(1)[1], 73.0, 28.0
    turned = mesh._replace(vertices=mesh.vertices @ camera_rotation(azimuth, elevation).T)
    for distance in (None, 2.0):
        camera, object_ = render(mesh, [azimuth], [elevation], 64, distance), render(turned, [0], [0], 64, distance)
        for one, other in zip(camera, object_):
            different = one.astype(int) != other
            assert different.mean() < 0.005  # rays that graze an edge, in float32


def test_brightness_is_lambert_s():
    light = np.array([1.0, 2.0, 3.0])
    view = render(SPHERE, [0], [0], 64, light=light)
    side = (2 * np.arange(64) + 1) / 64 - 1
    x, y = np.meshgrid(side, -side)
    inside = x**2 + y**2 < 0.9
    normals = np.stack([x, y, np.sqrt(np.maximum(1 - x**2 - y**2, 0))], -1)
    expected = 255 * (AMBIENT + (1 - AMBIENT) * np.maximum(normals @ light / np.linalg.norm(light), 0))
    assert np.abs(view.shade[0] - expected)[inside].max() < 0.08 * 255  # of flat faces
    assert np.abs(view.shade[0] - expected)[inside].mean() < 0.015 * 255


def test_how_faces_are_oriented_does_not_matter():
    flipped = BOX._replace(faces=BOX.faces[:, ::-1])
    for one, other in zip(render(BOX, [20], [30], 32), render(flipped, [20], [30], 32)):
        np.testing.assert_array_equal(one, other)


def test_nearer_faces_hide_those_behind():
    """A plate before a bigger one: the small one's brightness in the middle, from the front only."""
    small = np.array([[-0.3, -0.3, 0.5], [0.3, -0.3, 0.5], [0, 0.5, 0.3]])  # leans back
    big = np.array([[-0.7, -0.6, -0.3], [0.7, -0.6, -0.3], [0, 0.8, -0.3]])
    mesh = Mesh("plates", "test", np.concatenate([small, big]), np.arange(6).reshape(2, 3))
    front, back = render(mesh, [0, 180], [0, 0], 33, light=(0, 0, 1)).shade[:, 16, 16]
    normal = np.cross(small[1] - small[0], small[2] - small[0])
    assert front == pytest.approx(255 * (AMBIENT + (1 - AMBIENT) * normal[2] / np.linalg.norm(normal)), abs=1)
    assert back == 255


def test_a_missing_package_is_named(monkeypatch):
    for module, call in (("embreex.rtcore_scene", lambda: render(BOX, [0], [0])), ("trimesh.creation", primitives)):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ExtraError, match=rf"{module.split('.')[0]} is needed here: pip install 'l2l_niw\[pose\]'"):
            call()


def test_arguments_are_named():
    for options, message in (
        ({"azimuth": [0, 1]}, r"must be \(views,\), got \(2,\) and \(1,\)"),
        ({"azimuth": 0, "elevation": 0}, r"must be \(views,\)"),
        ({"size": 0}, "size must be"),
        ({"distance": 1}, "distance must be"),
        ({"light": (0, 0, 0)}, "light must be"),
        ({"mesh": BOX._replace(vertices=2 * BOX.vertices)}, r"render\(normalised"),
    ):
        with pytest.raises(ArgumentError, match=message):
            render(**{"mesh": BOX, "azimuth": [0], "elevation": [0], **options})
