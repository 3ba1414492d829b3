"""Tables and documents: cells, reading orders, and the encodings that read them."""

from mmpos.tables.cells import Table, TableTokens, table_tokens
from mmpos.tables.layout_bias import BrosBias, LayoutBias, UdopBias, bros_bias, layout_bias, t5_bucket
from mmpos.tables.layout_tokens import layout_token_ids
from mmpos.tables.order_cache import OrderCache
from mmpos.tables.orders import OrderPlan, order_mask, order_mask_mod, plan_orders
from mmpos.tables.reading_order import (
    ReadingOrderBias,
    code_sinusoid,
    nearest_neighbours,
    reading_order_codes,
    signed_codes,
)
from mmpos.tables.router import OrderRouter, RoutingEntropy, mix_branches, routing_entropy
from mmpos.tables.row_column import (
    TapasEmbedding,
    TutaPositions,
    masked_tree_distance,
    position_in_cell,
    tree_distance,
    tree_index,
    visible_in_tree,
)
from mmpos.tables.table_axes import table_axes, table_rotary
from mmpos.tables.tpe_2d import Tpe2dAttention, branch_attention, rotate_branches

__all__ = [
    "BrosBias",
    "LayoutBias",
    "OrderCache",
    "OrderPlan",
    "OrderRouter",
    "ReadingOrderBias",
    "RoutingEntropy",
    "Table",
    "TableTokens",
    "TapasEmbedding",
    "Tpe2dAttention",
    "TutaPositions",
    "UdopBias",
    "branch_attention",
    "bros_bias",
    "code_sinusoid",
    "layout_bias",
    "layout_token_ids",
    "masked_tree_distance",
    "mix_branches",
    "nearest_neighbours",
    "order_mask",
    "order_mask_mod",
    "plan_orders",
    "position_in_cell",
    "reading_order_codes",
    "rotate_branches",
    "routing_entropy",
    "signed_codes",
    "t5_bucket",
    "table_axes",
    "table_rotary",
    "table_tokens",
    "tree_distance",
    "tree_index",
    "visible_in_tree",
]
