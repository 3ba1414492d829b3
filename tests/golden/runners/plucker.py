"""Maps of rays, distances between rays, Fourier features."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.multiview import (
    Cameras,
    camera_rays,
    patchify,
    plucker_map,
    ray_distance,
    ray_fourier,
    ray_octaves,
    raymap,
    to_plucker,
)
from mmpos.multiview.cameras import invert_rigid
from tests.golden.case import Case


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    if name.startswith("ray_octaves"):
        return 1e-5  # the reference keeps its frequencies in float32
    return 1e-9 if reference.dtype == torch.float64 else 1e-4


def run(case: Case) -> dict[str, Tensor]:
    if case.has("in.ray1"):
        return _rays(case)
    size = (case.option("height"), case.option("width"))
    cameras = Cameras(invert_rigid(case.input("c2w", torch.float64)), case.input("K", torch.float64), size)
    scale, patch = case.option("downscale"), case.option("patch")
    outputs = {
        "raymap": raymap(cameras, scale, up=case.option("include_ups")),
        "plucker": plucker_map(cameras, scale),
        "camray": camera_rays(cameras, scale),
    }
    if patch:
        outputs["plucker_patches"] = patchify(outputs["plucker"], patch)
    return outputs


def _rays(case: Case) -> dict[str, Tensor]:
    first, second = case.input("ray1", torch.float64), case.input("ray2", torch.float64)
    fourier, octaves = case.option("fourier"), case.option("ray_octaves")
    one, two = to_plucker(first), to_plucker(second)
    return {
        "plucker1": one,
        "plucker2": two,
        "distance": ray_distance(one, two),
        "fourier1": ray_fourier(one, fourier["n_freqs"], fourier["start_freq"]),
        "ray_octaves1": ray_octaves(
            torch.cat([first[..., :3], one[..., :3]], -1),
            octaves["pos_octaves"],
            octaves["pos_start_octave"],
            octaves["ray_octaves"],
            octaves["ray_start_octave"],
        ),
    }
