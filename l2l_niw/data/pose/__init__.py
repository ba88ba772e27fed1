"""Few-shot pose estimation: rendered objects, and the files of the original benchmarks."""

from l2l_niw.data.pose.benchmark import (
    PoseTasksets,
    Splits,
    azimuth_tasksets,
    position_tasksets,
    rotation_tasksets,
    split_objects,
)
from l2l_niw.data.pose.identifiable import Counts, Screened, distinctness, screen
from l2l_niw.data.pose.images import augmented, backgrounds
from l2l_niw.data.pose.meshes import Mesh, furniture, normalised, primitives
from l2l_niw.data.pose.originals import (
    OriginalData,
    load_distractor,
    load_pascal1d,
    load_shapenet1d,
    load_shapenet2d,
)
from l2l_niw.data.pose.position import PositionTaskset
from l2l_niw.data.pose.render import View, camera_rotation, render
from l2l_niw.data.pose.targets import pose_targets, rotation_quaternion
from l2l_niw.data.pose.tasksets import AugmentedTaskset, PoseData, PoseTaskset, ViewTaskset
from l2l_niw.data.pose.views import Views, random_views, rendered

__all__ = [
    "AugmentedTaskset",
    "Counts",
    "Mesh",
    "OriginalData",
    "PoseData",
    "PoseTaskset",
    "PoseTasksets",
    "PositionTaskset",
    "Screened",
    "Splits",
    "View",
    "ViewTaskset",
    "Views",
    "augmented",
    "azimuth_tasksets",
    "backgrounds",
    "camera_rotation",
    "distinctness",
    "furniture",
    "load_distractor",
    "load_pascal1d",
    "load_shapenet1d",
    "load_shapenet2d",
    "normalised",
    "pose_targets",
    "position_tasksets",
    "primitives",
    "random_views",
    "render",
    "rendered",
    "rotation_quaternion",
    "rotation_tasksets",
    "screen",
    "split_objects",
]
