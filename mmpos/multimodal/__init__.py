"""Position ids and rotary tables of vision-language decoders: segments in, :class:`PositionLayout` out."""

from mmpos.multimodal.allocation import Allocation
from mmpos.multimodal.layout import PositionLayout
from mmpos.multimodal.published import Rule, published_rules
from mmpos.multimodal.rotary import channel_tables, rotary_angles, rotary_table, rotate_grouped
from mmpos.multimodal.schemes import SCHEMES, Scheme, list_schemes, scheme
from mmpos.multimodal.segments import Image, Segment, Text, Tiles, Video

__all__ = [
    "SCHEMES",
    "Allocation",
    "Image",
    "PositionLayout",
    "Rule",
    "Scheme",
    "Segment",
    "Text",
    "Tiles",
    "Video",
    "channel_tables",
    "list_schemes",
    "published_rules",
    "rotary_angles",
    "rotary_table",
    "rotate_grouped",
    "scheme",
]
