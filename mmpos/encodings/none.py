"""No position encoding.

The control of every comparison. Attention without it cannot tell one order of tokens from another.
"""

from __future__ import annotations

from mmpos.encodings.base import Facts, PositionEncoding
from mmpos.encodings.registry import register


@register("none")
class NoEncoding(PositionEncoding):
    """Does nothing: the output of the model follows any permutation of the patches."""

    facts = Facts(title="none", source="control", plugs_into=(), resolution_rules=("index",), relative=True)

    @property
    def circular(self) -> bool:
        return True
