"""Swin, SwinV2 and timm relative-position parameters; CSWin, Twins, CvT, ViTDet and MViTv2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

__all__ = [
    "cpe_weights",
    "cswin_block",
    "cvt_attention",
    "decomposed_tables",
    "lepe_weights",
    "swin_bias_table",
    "swin_block",
    "swin_cpb_network",
]


def swin_bias_table(table: Tensor, window: Sequence[int]) -> dict[str, Tensor]:
    """State dict of ``swin_rpb`` from a flat ``relative_position_bias_table (rows [+ 3], heads)``.

    Args:
        table: the table of Swin, timm or BEiT; three rows more than offsets are those of a prefix token.
        window: the window or grid it covers, height before width.
    """
    sides = [2 * size - 1 for size in window]
    rows = 1
    for side in sides:
        rows *= side
    extra = table.shape[0] - rows
    if extra not in (0, 3):
        raise ValueError(
            f"table: a window {tuple(window)} has {rows} offsets (and 3 rows for a prefix token), got "
            f"{tuple(table.shape)}; "
            "give the window the table was trained with"
        )
    state = {"table": table[:rows].T.unflatten(1, sides).contiguous()}
    if extra:
        state["prefix_table"] = table[rows:].T.contiguous()
    return state


def swin_cpb_network(state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """State dict of ``swin_cpb`` from SwinV2 (``cpb_mlp``, ``logit_scale``) or timm (``mlp.fc1``, ``mlp.fc2``)."""
    names = {
        "cpb_mlp.0.weight": "fc1.weight",
        "cpb_mlp.0.bias": "fc1.bias",
        "cpb_mlp.2.weight": "fc2.weight",
        "mlp.fc1.weight": "fc1.weight",
        "mlp.fc1.bias": "fc1.bias",
        "mlp.fc2.weight": "fc2.weight",
        "mlp.fc2.bias": "fc2.bias",
        "logit_scale": "logit_scale",
    }
    return _renamed(state, {prefix + old: new for old, new in names.items()}, "fc1.weight", "cpb_mlp or mlp")


def swin_block(state: Mapping[str, Tensor], window: Sequence[int]) -> dict[str, Tensor]:
    """State dict of :class:`mmpos.models.swin.SwinBlock` from a ``SwinTransformerBlock`` of Swin or SwinV2."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        if name == "attn.relative_position_bias_table":
            own = swin_bias_table(value, window)
            out |= {f"attn.encoding.layers.0.swin_rpb.{key}": tensor for key, tensor in own.items()}
        elif name.startswith("attn.cpb_mlp.") or name == "attn.logit_scale":
            continue
        elif name.endswith(("relative_position_index", "relative_coords_table", "attn_mask")):
            continue  # derived
        else:
            out[name] = value
    if any(name.startswith("attn.cpb_mlp.") for name in state):
        own = swin_cpb_network(state, "attn.")
        out |= {f"attn.encoding.layers.0.swin_cpb.{key}": tensor for key, tensor in own.items()}
    return out


def cswin_block(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of :class:`mmpos.models.cswin.CSWinBlock` from a ``CSWinBlock`` of the reference."""
    out = {}
    for name, value in state.items():
        parts = name.split(".")
        if parts[0] == "attns":  # attns.<branch>.get_v.<weight|bias>
            name = f"attn.branches.{parts[1]}.encoding.layers.0.lepe.{parts[3]}"
        elif parts[0] in ("qkv", "proj"):
            name = f"attn.{name}"
        out[name] = value
    return out


def lepe_weights(state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """State dict of ``lepe`` from ``get_v.weight`` and ``get_v.bias`` of CSWin."""
    return _renamed(state, {f"{prefix}get_v.weight": "weight", f"{prefix}get_v.bias": "bias"}, "weight", "get_v")


def cpe_weights(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """State dict of ``cpe`` from one ``PosCNN`` / ``PosConv`` (``proj.0``) per placement (Twins, timm)."""
    out: dict[str, Tensor] = {}
    for place, state in enumerate(states):
        names = {"proj.0.weight": f"weights.{place}", "proj.0.bias": f"biases.{place}"}
        out |= _renamed(state, names, f"weights.{place}", "proj.0")
    return out


def cvt_attention(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of :class:`mmpos.models.cvt.CvtAttention` from ``Attention`` of CvT."""
    out = {}
    for name, value in state.items():
        head, _, rest = name.partition(".")
        if head.startswith("conv_proj_"):
            name = f"conv_{head[-1]}.{rest}"
        elif head.startswith("proj_"):
            name = f"{head[-1]}.{rest}"
        out[name] = value
    return out


def decomposed_tables(state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """State dict of ``decomposed_rpe`` from ``rel_pos_h`` and ``rel_pos_w`` (ViTDet, SAM, MViTv2)."""
    names = {f"{prefix}rel_pos_h": "tables.0", f"{prefix}rel_pos_w": "tables.1"}
    return _renamed(state, names, "tables.0", "rel_pos_h")


def _renamed(state: Mapping[str, Tensor], names: Mapping[str, str], needed: str, looked_for: str) -> dict[str, Tensor]:
    out = {new: state[old] for old, new in names.items() if old in state}
    if needed not in out:
        raise ValueError(f"state: expected {looked_for} among its names, got {sorted(state)[:6]}; is the prefix right?")
    return out
