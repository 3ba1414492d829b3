"""Fixed sine-cosine tables: MAE, timm (table and Fourier bands), positional-encodings of PyPI, PaPE."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from mmpos import Positions
from mmpos.functional.sincos import SINCOS_PRESETS, fourier_bands, sincos
from tests.golden.case import Case, Unknown
from tests.golden.runners._timm import BAND_OPTIONS, GRID_OPTIONS, timm_bands, timm_coordinates


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-9 if reference.dtype == torch.float64 else 2e-5


def run(case: Case) -> dict[str, Tensor]:
    source = str(case.spec.get("source", ""))
    if "get_2d_sincos_pos_embed" in source or "util/pos_embed.py" in source:
        return _mae(case)
    if "build_fourier_pos_embed" in source:
        return _fourier(case)
    if "build_sincos2d_pos_embed" in source:
        return _timm(case)
    if "multidim-positional-encoding" in source:
        return _pypi(case)
    if "parabolic-position-encoding" in source:
        coords = case.input("positions")
        return {"pe": sincos(coords, case.option("dim"), float(case.option("base", 10000)), **SINCOS_PRESETS["pape"])}
    raise Unknown(f"source {source!r}")


def _raster(*sizes: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return Positions.grid(*sizes, dtype=dtype).coords[0]


def _settings(name: str, given: Any, common: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """Options of one table of a case, over those of the whole case; any other key is unknown."""
    if not isinstance(given, dict):
        raise Unknown(f"config.{name}={given!r}")
    unknown = sorted(set(given) - known)
    if unknown:
        raise Unknown(f"config.{name}.{unknown[0]}")
    return common | given


def _own(case: Case, name: str) -> Any:
    """Options of one table; a case with a single table may have them at the top."""
    single = len({output.rpartition("_")[0] for output in case.outputs()}) == 1
    nested = any(isinstance(value, dict) for value in case.config.values())
    return case.option(name, {}) if single and not nested else case.option(name)


def _common(case: Case, keys: set[str]) -> dict[str, Any]:
    return {key: case.option(key) for key in keys if case.has_option(key)}


def _mae(case: Case) -> dict[str, Tensor]:
    known = {"dim", "base", "h", "w", "size", "cls"}
    common = _common(case, {"dim", "base"})
    outputs = {}
    for name in case.outputs():
        options = _settings(name, case.option(name, {}), common, known)
        if name == "one_d":
            coords, dim = case.input("pos", torch.float64)[:, None], case.option("one_d_dim")
        else:
            match = re.fullmatch(r"(?:square(?:_(\d+))?|rect(?:_(\d+)x(\d+))?)(_cls)?", name)
            if match is None:
                raise Unknown(f"out.{name}")
            side, h, w, cls = match.groups()
            size = options.get("size", side)
            height, width = options.get("h", h or size), options.get("w", w or size)
            if height is None or width is None or "dim" not in options:
                raise Unknown(f"out.{name} without sizes or dim")
            coords, dim = _raster(int(height), int(width)), options["dim"]
            options["cls"] = bool(options.get("cls", cls))
        values = sincos(coords, dim, float(options.get("base", 10000)), **SINCOS_PRESETS["mae"])
        outputs[name] = torch.cat([torch.zeros_like(values[:1]), values]) if options.get("cls") else values
    return outputs


def _timm(case: Case) -> dict[str, Tensor]:
    known = {"feat_shape", "dim", "temperature", "reverse_coord", "interleave_sin_cos"}
    common = _common(case, known)
    outputs = {}
    for name in case.outputs():
        options = _settings(name, _own(case, name), common, known)
        if "feat_shape" not in options or "dim" not in options:
            raise Unknown(f"out.{name} without feat_shape or dim")
        sizes = list(options["feat_shape"])
        if options.get("reverse_coord", False):  # the reference also lists the tokens column by column
            sizes.reverse()
        # what is called interleaved there puts the blocks of an axis side by side
        preset = SINCOS_PRESETS["default" if options.get("interleave_sin_cos", False) else "timm"]
        base = float(options.get("temperature", 10000.0))
        outputs[name] = sincos(_raster(*sizes, dtype=torch.float32), options["dim"], base, **preset)
    return outputs


def _pypi(case: Case) -> dict[str, Tensor]:
    outputs = {}
    for name, reference in case.outputs().items():
        match = re.fullmatch(r"d(\d)(_\w+)?", name)
        sizes = reference.shape[:-1]
        if match is None or int(match[1]) != len(sizes):
            raise Unknown(f"out.{name}")
        values = sincos(_raster(*sizes, dtype=torch.float32), case.option(name), **SINCOS_PRESETS["pypi"])
        outputs[name] = values.reshape(*sizes, -1)
    return outputs


def _fourier(case: Case) -> dict[str, Tensor]:
    known = {"feat_shape", "num_bands", "grid_indexing", *BAND_OPTIONS, *GRID_OPTIONS}
    common = _common(case, known)
    strange = [output for output in case.outputs() if not output.endswith(("_sin", "_cos"))]
    if strange:
        raise Unknown(f"out.{strange[0]}")
    outputs = {}
    for name in sorted({output.rpartition("_")[0] for output in case.outputs()}):
        options = _settings(name, _own(case, name), common, known)
        if "feat_shape" not in options:
            raise Unknown(f"out.{name}_* without feat_shape")
        sizes = tuple(options["feat_shape"])
        coords = timm_coordinates(Positions.grid(*sizes), options)[0].reshape(*sizes, len(sizes))
        order = options.get("grid_indexing", "ij")
        if order not in ("ij", "xy"):
            raise Unknown(f"config.{name}.grid_indexing={order!r}")
        if order == "xy":  # swaps the first two axes
            coords = torch.cat([coords[..., :2].flip(-1), coords[..., 2:]], dim=-1)
        bands = timm_bands(options.get("num_bands", 64), options)
        outputs[f"{name}_sin"], outputs[f"{name}_cos"] = fourier_bands(coords, bands)
    return outputs
