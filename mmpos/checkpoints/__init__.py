"""Weights of reference repositories to our modules: one function per family, the same that the golden tests use."""

from mmpos.checkpoints.rope_vit import rope_mixed_freqs

__all__ = ["rope_mixed_freqs"]
