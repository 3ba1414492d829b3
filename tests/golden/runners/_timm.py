"""Coordinates and bands of timm's rotary and Fourier embeddings, from the options as timm names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmpos import Positions
from mmpos.coordinates import endpoints, index, normalised
from mmpos.functional.rotary import inverse_frequencies, pixel_frequencies
from tests.golden.case import Unknown

BAND_OPTIONS = {"max_res", "temperature", "linear_bands", "in_pixels"}
GRID_OPTIONS = {"in_pixels", "ref_feat_shape", "grid_offset", "grid_type", "normalize_coords"}


def timm_bands(count: int, options: Mapping[str, Any]) -> Tensor:
    """Frequencies. Shape: ``(count,)``."""
    if options.get("in_pixels", True):
        return pixel_frequencies(count, options.get("max_res", 224), linear=bool(options.get("linear_bands", False)))
    return inverse_frequencies(count, float(options.get("temperature", 10000.0)))


def timm_coordinates(positions: Positions, options: Mapping[str, Any]) -> Tensor:
    """Coordinates in the order (row, col). Shape: ``(1, N, 2)``."""
    kind = options.get("grid_type") or ("pixel" if options.get("in_pixels", True) else "index")
    offset = float(options.get("grid_offset", 0.0))
    ratio = torch.ones(positions.axes)
    if options.get("ref_feat_shape") is not None:
        ratio = torch.tensor(options["ref_feat_shape"]) / positions.sizes("ref_feat_shape")[0]
    if kind == "pixel":  # the offset is not used
        return endpoints(positions) * ratio
    if kind == "index":
        return index(positions, offset) * ratio
    if kind == "centered":  # the reference shape acts on [0, 1], before the map to [-1, 1]
        return (normalised(positions, offset, options.get("normalize_coords", "separate")) + 1) * ratio - 1
    raise Unknown(f"grid_type={kind!r}")
