"""Swin relative position bias: timm's ``RelPosBias``, its resizing rules, and a block of Swin."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos import Positions, create_encoding
from mmpos.checkpoints import swin_bias_table, swin_block
from mmpos.encodings.swin_rpb import resize_offset_table
from mmpos.functional.windows import fit_window, shift_mask
from mmpos.models.swin import SwinBlock
from tests.golden.case import Case, Unknown

RULES = {"bicubic": "bicubic", "geometric": "geometric", "levit_antialias": "bicubic_antialias"}


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    if name.startswith("geometric"):
        return 1e-4  # q comes from a bisection
    return 1e-10 if reference.dtype == torch.float64 else 2e-5 if reference.is_floating_point() else 0.0


def run(case: Case) -> dict[str, Tensor]:
    if case.has("in.x"):
        return block(case, version=1)
    if case.has_option("src_window"):
        return _resize(case)
    window, heads, prefix = case.option("window"), case.option("heads"), case.option("prefix_tokens", 0)
    stack = create_encoding("swin_rpb", 8 * heads, heads, train_grid=window, num_prefix=prefix)
    encoding = stack.layers[0]["swin_rpb"]
    encoding.load_state_dict(swin_bias_table(case.param("relative_position_bias_table"), window))
    state = stack.prepare(Positions.grid(*window, num_prefix=prefix))[0]
    q = torch.zeros(1, heads, 1, 1)
    index = state.prepared[0][0].index[0].long()
    if prefix:  # rows of prefix tokens come first here and last there
        offsets = encoding.table[0].numel()
        index = torch.where(index < 3, index + offsets, index - 3)
    return {"bias": encoding.logit_bias(q, q, state.prepared[0]), "index": index}


def _resize(case: Case) -> dict[str, Tensor]:
    source, extra = case.option("src_window"), case.option("extra_rows", 0)
    window = (source, source) if isinstance(source, int) else tuple(source)
    case.describe("heads", "dst_windows")
    state = swin_bias_table(case.param("table"), window)
    if extra != (3 if "prefix_table" in state else 0):
        raise Unknown(f"config.extra_rows={extra}")
    out = {}
    for name in case.outputs():
        rule, _, size = name.partition(".")
        if rule not in RULES:
            raise Unknown(f"out.{name}")
        sizes = tuple(int(side) for side in size.split("x"))
        table = resize_offset_table(state["table"], sizes, RULES[rule]).flatten(1)
        if extra:
            table = torch.cat([table, state["prefix_table"]], 1)
        out[name] = table.T
    return out


def block(case: Case, version: int) -> dict[str, Tensor]:
    """A whole block of Swin (1) or SwinV2 (2)."""
    heads, dim, grid = case.option("heads"), case.option("dim"), tuple(case.option("resolution"))
    pretrained = case.option("pretrained_window", 0)
    case.expect("norm", "pre-norm" if version == 1 else "res-post-norm")
    case.expect("ln_eps", 1e-5)
    window, shift = (
        (value, value) if isinstance(value, int) else tuple(value)
        for value in (case.option("window"), case.option("shift"))
    )
    fitted, moved = fit_window(grid, window, shift)
    encoding = None
    if version == 2:
        reference = (pretrained, pretrained) if isinstance(pretrained, int) else tuple(pretrained)
        rule = "re-evaluated" if any(reference) else "normalised"
        train = reference if any(reference) else fitted
        encoding = create_encoding("swin_cpb", dim, heads, train_grid=train, resolution=rule, cosine=True)
    elif pretrained not in (0, [0, 0]):
        raise Unknown(f"config.pretrained_window={pretrained}")
    # the table of the reference is made for the window that fits the grid; shift and window are fitted once more by
    # the block
    model = SwinBlock(
        dim,
        heads,
        fitted,
        moved,
        version=version,
        mlp_ratio=case.option("mlp_ratio"),
        encoding=encoding,
        window_rule="per_axis",
    )
    model.load_state_dict(swin_block(case.params(), fitted))
    out = {"x": model.double()(case.input("x", torch.float64), grid)}
    if case.wants("attn_mask"):
        out["attn_mask"] = shift_mask(grid, fitted, moved)
    return out
