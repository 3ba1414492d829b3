"""PaPE and PaPE-RI weights of DTU-PAS/parabolic-position-encoding.

The reference stores, per layer, ``position.weight (h M, A)`` and one fused ``ab.weight (2 h M, D)``, curvatures first;
PaPE-RI stores ``a.weight (h, D)`` and the buffer ``position_scales (1, h, 1, 1)``. Its image coordinates are (x, y),
ours (row, col).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

__all__ = ["pape_layer", "pape_layers", "pape_ri_layer"]


def pape_layer(weights: Mapping[str, Tensor], *, num_heads: int, xy: bool) -> dict[str, Tensor]:
    """State dict of our ``pape`` from the ``position_encoder`` of one reference layer.

    Args:
        weights: ``position.weight`` and ``ab.weight``.
        num_heads: attention heads.
        xy: whether the reference coordinates were (x, y): images. ``False`` for its video and event models, whose axes
            stay in order.
    """
    position, fused = weights["position.weight"], weights["ab.weight"]
    if position.shape[0] % num_heads or fused.shape[0] != 2 * position.shape[0]:
        raise ValueError(
            f"weights: expected position.weight (heads * M, A) and ab.weight (2 * heads * M, D) for {num_heads} heads, "
            "got "
            f"{tuple(position.shape)} and {tuple(fused.shape)}; check num_heads"
        )
    curvature, slope = fused.chunk(2)
    axes_map = position.unflatten(0, (num_heads, -1))
    return {
        "axes_map": axes_map.flip(-1) if xy else axes_map,
        "curvature.weight": curvature,
        "slope.weight": slope,
    }


def pape_ri_layer(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of our ``pape_ri`` from ``a.weight`` and ``position_scales`` of one reference layer.

    The axis order of the reference does not matter here.
    """
    return {"curvature.weight": weights["a.weight"], "scales": weights["position_scales"].flatten()}


def pape_layers(state: Mapping[str, Tensor], *, num_heads: int, xy: bool = True) -> list[dict[str, Tensor]]:
    """One state dict per layer from a whole reference model, for ``pape`` or ``pape_ri``, whichever it holds."""
    marker = ".attention.position_encoder."
    layers: dict[int, dict[str, Tensor]] = {}
    for key, value in state.items():
        if marker in key:
            front, name = key.split(marker)
            layers.setdefault(int(front.rsplit(".", 1)[-1]), {})[name] = value
    if sorted(layers) != list(range(len(layers))) or not layers:
        raise ValueError(
            f"state: expected keys such as 'encoder.layers.0{marker}ab.weight' for every layer, found layers "
            f"{sorted(layers)}; "
            "is this a PaPE model?"
        )
    ordered = [layers[i] for i in range(len(layers))]
    return [pape_ri_layer(w) if "a.weight" in w else pape_layer(w, num_heads=num_heads, xy=xy) for w in ordered]
