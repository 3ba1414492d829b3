"""Models the recipes train."""

from mmpos.models.video import create_video_vit
from mmpos.models.vit import create_vit, initialise

__all__ = ["create_video_vit", "create_vit", "initialise"]
