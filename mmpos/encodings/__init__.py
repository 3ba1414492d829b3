"""Position encodings, one file per method. Importing the package registers them all."""

from mmpos.encodings.base import Facts, PositionEncoding
from mmpos.encodings.registry import (
    EncodingStack,
    LayerState,
    create_encoding,
    encoding_class,
    encoding_options,
    list_encodings,
    load_all,
    register,
)

load_all()

__all__ = [
    "EncodingStack",
    "Facts",
    "LayerState",
    "PositionEncoding",
    "create_encoding",
    "encoding_class",
    "encoding_options",
    "list_encodings",
    "register",
]
