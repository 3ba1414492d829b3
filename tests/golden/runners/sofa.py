"""SoFA: the soft mask and both readings of it."""

from __future__ import annotations

from torch import Tensor

from mmpos.multimodal.sofa import sofa_attention, sofa_bias, sofa_mask
from tests.golden.case import Case

__all__ = ["run", "tolerance"]


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-9


def run(case: Case) -> dict[str, Tensor]:
    sigma = float(case.option("sigma"))
    case.describe("heads", "head_dim")
    image, q, k, v = (case.input(name) for name in ("image_id", "q", "k", "v"))
    logits = q @ k.mT * q.shape[-1] ** -0.5 + sofa_bias(image, sigma)
    return {
        "soft_mask": sofa_mask(image, sigma),
        "weights_softmask": logits.softmax(-1),
        "output_softmask": sofa_attention(q, k, v, image, sigma),
        "output_blend": sofa_attention(q, k, v, image, sigma, reading="blend"),
    }
