"""Weights of reference repositories to our modules: one function per family, the same that the golden tests use."""

from mmpos.checkpoints.ape import axis_tables, learned_table
from mmpos.checkpoints.comrope import comrope_layer, comrope_layers
from mmpos.checkpoints.dinov3 import dinov3_options
from mmpos.checkpoints.fourier import fourier_layers
from mmpos.checkpoints.geographic import geoclip_frequencies, siren_layers
from mmpos.checkpoints.hiera import abs_win_tables
from mmpos.checkpoints.irpe import irpe_tables
from mmpos.checkpoints.liere import liere_layers
from mmpos.checkpoints.loope import loope_layers
from mmpos.checkpoints.micro_vit import micro_vit_arguments, micro_vit_state_dict
from mmpos.checkpoints.pape import pape_layer, pape_layers, pape_ri_layer
from mmpos.checkpoints.rope_vit import rope_mixed_freqs, rope_vit_state_dict
from mmpos.checkpoints.seqpe import seqpe_encoder
from mmpos.checkpoints.string import string_cayley_layer, string_circulant_layer
from mmpos.checkpoints.swin import (
    cpe_weights,
    cswin_block,
    cvt_attention,
    decomposed_tables,
    lepe_weights,
    swin_bias_table,
    swin_block,
    swin_cpb_network,
)

__all__ = [
    "abs_win_tables",
    "axis_tables",
    "comrope_layer",
    "comrope_layers",
    "cpe_weights",
    "cswin_block",
    "cvt_attention",
    "decomposed_tables",
    "dinov3_options",
    "fourier_layers",
    "geoclip_frequencies",
    "irpe_tables",
    "learned_table",
    "lepe_weights",
    "liere_layers",
    "loope_layers",
    "micro_vit_arguments",
    "micro_vit_state_dict",
    "pape_layer",
    "pape_layers",
    "pape_ri_layer",
    "rope_mixed_freqs",
    "rope_vit_state_dict",
    "seqpe_encoder",
    "siren_layers",
    "string_cayley_layer",
    "string_circulant_layer",
    "swin_bias_table",
    "swin_block",
    "swin_cpb_network",
]
