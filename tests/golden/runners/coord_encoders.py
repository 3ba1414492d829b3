"""Location encoders: spherical harmonics with a SIREN, and GeoCLIP's projection and random Fourier features."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos import Positions, create_encoding
from mmpos.checkpoints import geoclip_frequencies, siren_layers
from mmpos.functional.geographic import equal_earth, spherical_harmonics
from tests.golden.case import Case, Unknown


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    if case.has("in.latlon"):
        # sqrt(3) is a float32 constant in the reference; frequencies of sigma times 2 pi magnify the difference
        return 1e-6 * float(name.removeprefix("rff_sigma")) if name.startswith("rff_sigma") else 1e-7
    return 1e-6 * max(1.0, float(reference.abs().max()))


def run(case: Case) -> dict[str, Tensor]:
    return _geoclip(case) if case.has("in.latlon") else _harmonics(case)


def _harmonics(case: Case) -> dict[str, Tensor]:
    degree, lonlat = case.option("legendre_polys"), case.input("lonlat", torch.float64)
    outputs = {"sh": spherical_harmonics(lonlat, degree)}
    siren = case.option("siren", None)
    if siren is None:
        return outputs
    unknown = set(siren) - {"hidden", "layers", "out", "w0_initial", "w0"}
    if unknown:
        raise Unknown(f"config.siren.{unknown.pop()}")
    options = {"hidden": siren["hidden"], "layers": siren["layers"], "w0": siren["w0"], "w0_first": siren["w0_initial"]}
    stack = create_encoding("spherical", siren["out"], 1, degree=degree, **options).double()
    stack.shared["spherical"].siren.load_state_dict(siren_layers(case.params(torch.float64)))
    zeros = torch.zeros(1, len(lonlat), siren["out"], dtype=torch.float64)
    outputs["siren"] = stack.add_to_tokens(zeros, Positions.points(lonlat))[0]
    return outputs


def _geoclip(case: Case) -> dict[str, Tensor]:
    sigmas, features = case.option("sigmas"), case.option("encoded_size")
    latlon = case.input("latlon", torch.float64)
    stack = create_encoding("geoclip", 8, 1, sigmas=sigmas, features=features, hidden=8).double()
    encoding = stack.shared["geoclip"]
    encoding.frequencies.copy_(geoclip_frequencies(case.params(torch.float64), sigmas))
    features_of = dict(zip(sigmas, encoding.fourier(latlon), strict=True))
    return {"projected": equal_earth(latlon)} | {f"rff_sigma{sigma:g}": value for sigma, value in features_of.items()}
