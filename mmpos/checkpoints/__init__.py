"""Weights of reference repositories to our modules: one function per family, the same that the golden tests use."""

from mmpos.checkpoints.ape import axis_tables, learned_table
from mmpos.checkpoints.irpe import irpe_tables
from mmpos.checkpoints.loope import loope_layers
from mmpos.checkpoints.pape import pape_layer, pape_layers, pape_ri_layer
from mmpos.checkpoints.rope_vit import rope_mixed_freqs

__all__ = [
    "axis_tables",
    "irpe_tables",
    "learned_table",
    "loope_layers",
    "pape_layer",
    "pape_layers",
    "pape_ri_layer",
    "rope_mixed_freqs",
]
