"""PESI metrics: of given tables, and of the three orders of the paper's Table 5."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from mmpos.diagnostics import Pesi, cosine_kernel, pesi, pesi_metrics
from tests.golden.case import Case, Unknown


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    # where similarities tie, the last bit of the reference decided ranks: allowed per centre, nearly gone in the mean.
    # The three numbers of Table 5 are stored together, the second is such a mean; the digits of the paper itself are
    # met
    return 1e-3 if name.startswith("map_M_D") else 1e-6 if name.startswith(("M_U", "A_SU", "map")) else 2e-4


def run(case: Case) -> dict[str, Tensor]:
    if not case.has("in.embed"):
        return _table5(case)
    embed = case.input("embed", torch.float64)
    grid = tuple(embed.shape[:2])
    counts = case.option("N")
    counts = counts if isinstance(counts, list) else [counts]
    options = {"ring": case.option("ring", "round"), "include_self": case.option("include_self", True)}
    options["empty_bucket"] = case.option("empty_bucket", "zero")
    options["tie"] = 0.0  # the reference ranks the bits as they are
    similarity = cosine_kernel(embed)
    outputs = {}
    for buckets in counts:
        found = pesi_metrics(similarity, grid, buckets=buckets, **options)
        outputs[f"M_D_N{buckets}"] = _scalar(found.directed)
        outputs[f"map_M_D_N{buckets}"] = found.directed_map
        outputs |= {"M_U": _scalar(found.undirected), "map_M_U": found.undirected_map}
        outputs |= {"A_SU": _scalar(found.asymmetry), "map_A_SU": found.asymmetry_map}
    return outputs


def _table5(case: Case) -> dict[str, Tensor]:
    """The orders named by the outputs, at the size the source line states."""
    match = re.search(r"D=(\d+), (\d+)x(\d+), base (\d+)", case.spec.get("source", ""))
    if match is None:
        raise Unknown(f"source {case.spec.get('source')!r}")
    dim, height, width, base = (int(value) for value in match.groups())
    size = {"grid": (height, width), "dim": dim, "buckets": case.option("N")}
    outputs = {"sincos2d": _triple(pesi("sincos", base=base, **size))}
    for curve in ("raster", "gilbert"):
        outputs[curve] = _triple(pesi("loope", context="none", curve=curve, base=base, **size))
    return outputs


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _triple(found: Pesi) -> Tensor:
    return torch.tensor([found.undirected, found.directed, found.asymmetry], dtype=torch.float64)
