"""Reading-order codes, layout biases, TAPAS embeddings and TUTA trees: four methods, told apart by the spec."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos.tables.layout_bias import LayoutBias, t5_bucket
from mmpos.tables.reading_order import code_sinusoid, reading_order_codes, signed_codes
from mmpos.tables.row_column import (
    TapasEmbedding,
    TutaPositions,
    masked_tree_distance,
    position_in_cell,
    tree_distance,
    tree_index,
    visible_in_tree,
)
from tests.golden.case import Case, Unknown

__all__ = ["run", "tolerance"]


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    if not reference.is_floating_point():
        return 0.0
    return {"sinusoid": 1e-12, "position_states": 1e-6}.get(name, 1e-5)


def run(case: Case) -> dict[str, Tensor]:
    method = str(case.spec.get("method", "")).split(" ")[0]
    runners = {
        "reading_order": codes,
        "layout_bias": layout,
        "table_row_col_embedding": tapas,
        "tuta_tree": tuta,
    }
    if method not in runners:
        raise Unknown(f"method {method!r}")
    return runners[method](case)


def codes(case: Case) -> dict[str, Tensor]:
    case.describe("n", "k")  # how the stored graph was drawn
    include_self, adjacency = case.option("include_self"), case.input("adjacency")
    if include_self not in (True, False) or bool((adjacency.diagonal() != include_self).any()):
        raise Unknown(f"config.include_self={include_self} with another graph")
    found = reading_order_codes(adjacency, case.input("reading_rank"))
    outputs = {
        "codes": found,
        "sinusoid": code_sinusoid(found, case.option("dim"), case.option("base"), torch.float64),
    }
    if case.wants("signed_codes"):
        if not include_self:
            raise Unknown("signed codes without the target among its neighbours")
        outputs["signed_codes"] = signed_codes(found)
    return outputs


def layout(case: Case) -> dict[str, Tensor]:
    heads, width, bins, box_bins = (
        case.option(name) for name in ("heads", "head_dim", "rel_pos_bins", "rel_2d_pos_bins")
    )
    limits = {"max_distance": case.option("max_rel_pos"), "max_box_distance": case.option("max_rel_2d_pos")}
    boxes, positions = case.input("bbox"), case.input("position_ids")
    outputs = {}
    if case.has("in.bucket_probe"):
        probe = case.input("bucket_probe")
        outputs["bucket_1d"] = t5_bucket(probe, bins, limits["max_distance"])
        outputs["bucket_2d"] = t5_bucket(probe, box_bins, limits["max_box_distance"])
    state = {ours: case.param(theirs) for ours, theirs in (("text", "rel_1d"), ("left", "rel_x"), ("bottom", "rel_y"))}
    x = case.input("hidden_states")
    q, k, v = (
        F.linear(x, case.param(f"{n}_weight"), case.param(f"{n}_bias") if case.has(f"param.{n}_bias") else None)
        .unflatten(-1, (heads, width))
        .transpose(1, 2)
        for n in "qkv"
    )
    for version, head_dim in (("v2", None), ("v3", width)):
        module = LayoutBias(heads, head_dim, bins=bins, box_bins=box_bins, **limits)
        module.load_state_dict(state)
        bias = module(positions, boxes)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        outputs |= {f"bias_{version}": bias, f"attn_{version}": out.transpose(1, 2).flatten(2)}
    return outputs


def tapas(case: Case) -> dict[str, Tensor]:
    sizes, longest = case.option("type_vocab_sizes"), case.option("max_position_embeddings")
    restart = case.expect("reset_position_index_per_cell", True, False)
    restart = True if restart is None else restart
    ids, types = case.input("input_ids"), case.input("token_type_ids")
    words = case.param("word_embeddings.weight")
    module = TapasEmbedding(
        words.shape[1], sizes, max_positions=longest, restart=restart, eps=case.option("layer_norm_eps")
    )
    state = {f"types.{i}.weight": case.param(f"token_type_embeddings_{i}.weight") for i in range(len(sizes))}
    state |= {"position.weight": case.param("position_embeddings.weight")}
    state |= {f"norm.{part}": case.param(f"LayerNorm.{part}") for part in ("weight", "bias")}
    module.load_state_dict(state)
    if restart:
        index = position_in_cell(types[..., 2], types[..., 1], longest)
    else:
        index = torch.arange(ids.shape[1]).expand(ids.shape)
    return {"position_index": index, "embeddings": module(F.embedding(ids, words), types)}


def tuta(case: Case) -> dict[str, Tensor]:
    degrees = case.option("node_degree")
    if case.option("tree_depth") != len(degrees):
        raise Unknown("config.tree_depth other than the number of node_degree")
    combine = case.expect("attn_method", "add", "max") or "add"
    paths = {side: tree_index(case.input(f"{side}_path"), degrees) for side in ("left", "top")}
    for side, path in paths.items():
        if not torch.equal(path, case.input(f"{side}_index")):
            raise Unknown(f"in.{side}_index that is not made from in.{side}_path")
    left, top = paths["left"], paths["top"]
    distance = tree_distance(left, top, sum(degrees), combine)
    masked = masked_tree_distance(distance, case.input("indicator"))
    outputs = {"tree_distance": distance, "masked_distance": masked}
    step = case.option("attention_step", 0)
    for name in case.outputs():
        found = re.fullmatch(r"visible_layer(\d+)_d(\d+)", name)
        if found:
            outputs[name] = visible_in_tree(masked, int(found[1]), reach=int(found[2]), step=step)
    module = TutaPositions(
        case.option("hidden"),
        degrees,
        rows=case.option("row_size"),
        columns=case.option("column_size"),
        orders=case.param("order_weight.weight").shape[0],
    )
    names = {
        "order": "order_weight",
        "row": "row_weight",
        "column": "column_weight",
        "left": "left_tree_weight",
        "top": "top_tree_weight",
    }
    module.load_state_dict({f"{ours}.weight": case.param(f"{theirs}.weight") for ours, theirs in names.items()})
    outputs["position_states"] = module(case.input("order"), case.input("row"), case.input("col"), left, top)
    return outputs
