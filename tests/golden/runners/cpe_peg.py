"""PEG of CPVT and Twins, with and without stride."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos import Positions, create_encoding
from mmpos.checkpoints import cpe_weights
from mmpos.encodings._raster import Raster
from mmpos.encodings.cpe import peg
from tests.golden.case import Case, Unknown


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-10 if reference.dtype == torch.float64 else 2e-5


def run(case: Case) -> dict[str, Tensor]:
    dim, kernel, stride, prefix = (case.option(name) for name in ("dim", "kernel", "stride", "prefix"))
    if case.option("padding", kernel // 2) != kernel // 2:
        raise Unknown(f"config.padding={case.option('padding')}")
    positions = Positions.grid(case.option("height"), case.option("width"), num_prefix=prefix)
    x = case.input("x", torch.float64)
    stack = create_encoding("cpe", dim, 1, kernel=kernel, num_prefix=prefix).double()
    encoding = stack.shared["cpe"]
    encoding.load_state_dict(cpe_weights([case.params(torch.float64)]))
    if stride == 1:
        return {"x": stack.mix_tokens(0, x, positions)}
    return {"x": peg(x, encoding.weights[0], encoding.biases[0], Raster.of(positions, "peg"), stride=stride)}
