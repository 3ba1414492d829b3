"""Cameras and the position encodings that read them: PRoPE, GTA, CaPE, RayRoPE, Plücker maps.

An encoding makes an immutable geometry from :class:`Cameras` once (``prepare``), and attention uses it; no module keeps
cameras, so batches may interleave. Attention of PRoPE, GTA and RayRoPE does not depend on the frame of the world;
:func:`frame_change_error` measures it for any function of cameras.
"""

from mmpos.multiview.cameras import Cameras
from mmpos.multiview.cape import Cape4, Cape6, look_at_pose
from mmpos.multiview.frames import frame_change_error, random_rigid
from mmpos.multiview.gta import Gta, gta_image, spherical_matrices
from mmpos.multiview.parts import Geometry, attend_views, encode
from mmpos.multiview.plucker import (
    camera_rays,
    patchify,
    plucker_map,
    ray_distance,
    ray_fourier,
    ray_octaves,
    raymap,
    to_plucker,
)
from mmpos.multiview.prope import Prope
from mmpos.multiview.rayrope import RayGeometry, RayRope

__all__ = [
    "Cameras",
    "Cape4",
    "Cape6",
    "Geometry",
    "Gta",
    "Prope",
    "RayGeometry",
    "RayRope",
    "attend_views",
    "camera_rays",
    "encode",
    "frame_change_error",
    "gta_image",
    "look_at_pose",
    "patchify",
    "plucker_map",
    "random_rigid",
    "ray_distance",
    "ray_fourier",
    "ray_octaves",
    "raymap",
    "spherical_matrices",
    "to_plucker",
]
