"""mmpos: position encodings for vision and vision-language transformers."""

from mmpos.attention import attend
from mmpos.encodings import (
    EncodingStack,
    Facts,
    LayerState,
    PositionEncoding,
    create_encoding,
    list_encodings,
    register,
)
from mmpos.positions import Positions

__version__ = "0.1.0"

__all__ = [
    "EncodingStack",
    "Facts",
    "LayerState",
    "PositionEncoding",
    "Positions",
    "__version__",
    "attend",
    "create_encoding",
    "list_encodings",
    "register",
]
