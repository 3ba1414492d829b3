"""LieRE generators of StanfordMIMI/LieRE.

The reference keeps one parameter for the whole network, ``generator_raw_params (A, layers or 1, heads * m or m, g,
g)``, of which only the strict upper triangle acts. Its layer loop applies the slice of layer 0 everywhere; to
reproduce a model trained that way, load layer 0 into every layer.
"""

from __future__ import annotations

from torch import Tensor

from mmpos.functional.skew import upper_from_square

__all__ = ["liere_layers"]


def liere_layers(raw: Tensor, *, num_heads: int) -> list[dict[str, Tensor]]:
    """One state dict of ``liere`` per stored layer.

    Args:
        raw: ``generator_raw_params``.
        num_heads: heads with generators of their own; 1 when they are shared.

    Shape:
        raw ``(A, layers, heads * m, g, g)``; returns ``generators (A, heads, m, g (g - 1) / 2)`` for each layer.
    """
    if raw.dim() != 5 or raw.shape[-1] != raw.shape[-2] or raw.shape[2] % num_heads:
        raise ValueError(
            f"raw: expected (axes, layers, {num_heads} heads x blocks, g, g), got {tuple(raw.shape)}; "
            "num_heads is 1 when heads share"
        )
    entries = upper_from_square(raw).unflatten(2, (num_heads, -1))
    return [{"generators": layer} for layer in entries.unbind(1)]
