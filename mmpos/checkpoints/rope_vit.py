"""Weights of rope-vit and of timm's ``vit_*_patch16_rope_*`` models.

Three shapes are in use for the learned frequencies: ``(2, depth, heads * d/2)`` (rope-vit models),
``(2, depth, heads, d/2)`` (timm), and ``(2, heads * d/2)`` or ``(2, heads, d/2)`` (one layer). Row 0 is x (column),
row 1 is y (row).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

__all__ = ["rope_mixed_freqs", "rope_vit_state_dict"]

#: derived tables that rope-vit saves and that are computed here
DERIVED = ("freqs_t_x", "freqs_t_y", "freqs_cis")


def rope_mixed_freqs(freqs: Tensor, *, depth: int, num_heads: int) -> list[Tensor]:
    """Split a reference parameter into one ``freqs`` per layer in our axis order (row, col).

    Shape:
        Any of the shapes above; returns ``depth`` tensors ``(2, heads, d/2)``.
    """
    if freqs.shape[0] != 2 or freqs.numel() % (2 * depth * num_heads):
        raise ValueError(
            f"freqs: expected (2, depth {depth}, heads {num_heads}, d/2) or a flattened form of it, got "
            f"{tuple(freqs.shape)}; check depth and num_heads"
        )
    return [layer.flip(0) for layer in freqs.reshape(2, depth, num_heads, -1).unbind(1)]


def rope_vit_state_dict(
    weights: Mapping[str, Tensor], *, num_heads: int, into: str = "vit", stack: str = "position_encoding"
) -> dict[str, Tensor]:
    """State dict of a rope-vit or timm ``*_rope_*`` model for a ViT with ``rope_axial`` or ``rope_mixed`` attached.

    Attach ``("rope_axial", {"theta": 100.0})`` for the axial models and ``"rope_mixed"`` for the mixed ones; where the
    model also has a table (``*_ape_*``), attach with ``pos_embed="keep"``. Derived tables are left out.

    Args:
        weights: state dict of the reference model.
        num_heads: attention heads.
        into: class of the model that receives them: ``vit`` (``VisionTransformer``, whose layer scales are
            ``ls1.gamma`` where rope-vit has ``gamma_1``) or ``eva`` (timm's own rope models).
        stack: name of the attached stack in the model.
    """
    if into not in ("vit", "eva"):
        raise ValueError(f"into: expected 'vit' or 'eva', got {into!r}")
    depth = 1 + max((int(key.split(".")[1]) for key in weights if key.startswith("blocks.")), default=-1)
    if depth == 0:
        raise ValueError(f"weights: expected the state dict of a ViT with keys blocks.<i>.*, got {sorted(weights)[:5]}")
    out: dict[str, Tensor] = {}
    for key, value in weights.items():
        if key in DERIVED:
            continue
        if key in ("freqs", "rope.freqs"):
            for layer, freqs in enumerate(rope_mixed_freqs(value, depth=depth, num_heads=num_heads)):
                out[f"{stack}.layers.{layer}.rope_mixed.freqs"] = freqs
            continue
        parts = key.split(".")
        if into == "vit" and parts[-1] in ("gamma_1", "gamma_2"):
            parts[-1] = f"ls{parts[-1][-1]}.gamma"
        out[".".join(parts)] = value
    return out
