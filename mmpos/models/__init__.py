"""Models the recipes train."""

from mmpos.models.vit import create_vit, initialise

__all__ = ["create_vit", "initialise"]
