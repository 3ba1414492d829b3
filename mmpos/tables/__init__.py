"""Tables and documents: cells, reading orders, and the encodings that read them."""

from mmpos.tables.cells import Table, TableTokens, table_tokens
from mmpos.tables.order_cache import OrderCache
from mmpos.tables.orders import OrderPlan, order_mask, order_mask_mod, plan_orders
from mmpos.tables.router import OrderRouter, RoutingEntropy, mix_branches, routing_entropy
from mmpos.tables.tpe_2d import Tpe2dAttention, branch_attention, rotate_branches

__all__ = [
    "OrderCache",
    "OrderPlan",
    "OrderRouter",
    "RoutingEntropy",
    "Table",
    "TableTokens",
    "Tpe2dAttention",
    "branch_attention",
    "mix_branches",
    "order_mask",
    "order_mask_mod",
    "plan_orders",
    "rotate_branches",
    "routing_entropy",
    "table_tokens",
]
