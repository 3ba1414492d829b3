"""Models the recipes train."""

from mmpos.models.points import create_point_transformer
from mmpos.models.video import create_video_vit
from mmpos.models.vit import create_vit, initialise

__all__ = ["create_point_transformer", "create_video_vit", "create_vit", "initialise"]
