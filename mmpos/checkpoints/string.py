"""STRING parameters as papers and re-implementations write them.

Full skew matrices, first columns of circulant blocks.
"""

from __future__ import annotations

from torch import Tensor

from mmpos.functional.skew import upper_from_square

__all__ = ["string_cayley_layer", "string_circulant_layer"]


def string_cayley_layer(skew: Tensor, freqs: Tensor) -> dict[str, Tensor]:
    """State dict of one ``string_cayley``. torch's ``orthogonal(..., "cayley")`` without trivialisation has ``S =
    -A/2``.

    Shape:
        skew ``(heads or 1, d, d)`` antisymmetric, freqs ``(A, heads or 1, d/2)``.
    """
    if skew.dim() != 3 or skew.shape[-1] != skew.shape[-2] or freqs.shape[-1] * 2 != skew.shape[-1]:
        raise ValueError(
            f"skew, freqs: expected (heads, d, d) and (axes, heads, d/2), got {tuple(skew.shape)} and "
            f"{tuple(freqs.shape)}"
        )
    if not bool((skew + skew.mT).abs().max() <= 1e-6 * skew.abs().max().clamp_min(1.0)):
        raise ValueError("skew: expected antisymmetric matrices, S = -S^T; give X - X^T when the checkpoint stores X")
    return {"skew": upper_from_square(skew), "freqs": freqs}


def string_circulant_layer(c: Tensor) -> dict[str, Tensor]:
    """State dict of one ``string_circulant`` from the first column of each circulant block.

    Shape:
        ``(A, heads, d)`` or ``(A, heads, d / b, b)``.
    """
    if c.dim() not in (3, 4):
        raise ValueError(f"c: expected (axes, heads, d) or (axes, heads, blocks, b), got {tuple(c.shape)}")
    return {"c": c if c.dim() == 4 else c[:, :, None]}
