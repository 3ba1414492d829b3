"""One table of all published rules in this package: the named schemes, and those that are functions or modules of their
own because they change more than the ids of a block or apply on top of any scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmpos.multimodal.schemes import SCHEMES

__all__ = ["Rule", "published_rules"]


@dataclass(frozen=True)
class Rule:
    """A published rule and its four choices; ``any`` stands for those of the scheme it is applied to.

    Args:
        name: name of the rule.
        block: block layout.
        text: text rule.
        cursor: cursor rule.
        allocation: frequency allocation.
        made_by: what makes it, below ``mmpos.multimodal``.
        source: paper and arXiv id.
    """

    name: str
    block: str
    text: str
    cursor: str
    allocation: str
    made_by: str
    source: str


_STREAMS = ("raster", "all", "one per stream", "single", "streaming.stream_ids", "arXiv 2601.06843")
_FUNCTIONS: Sequence[Rule] = (
    Rule(
        "partial_rotary",
        *("any", "any", "any", "leading pairs"),
        "rotary.rotary_table",
        "GLM-4.1V, arXiv 2507.01006",
    ),
    Rule("grape", *("grid", "all", "spatial", "learned planes"), "grape.Grape", "GRAPE, openreview itoNJ3gJl2"),
    Rule(
        "frame_interleave",
        *("groups share ids", "all", "max", "single"),
        "interleave.interleave_frames",
        "LVChat, arXiv 2402.12079",
    ),
    Rule("sofa", *("any", "any", "any", "any"), "sofa.sofa_mask", "SoFA, arXiv 2503.13792: pattern only"),
    Rule("stream_sequential", *_STREAMS),
    Rule("stream_overlapped", *_STREAMS),
    Rule("stream_group_decoupled", *_STREAMS),
    Rule("stream_gap_isolated", *_STREAMS),
    Rule(
        "regional_rope",
        *("scaled into a box", "any", "any", "any"),
        "reindex.regional_positions",
        "RegionalRoPE, arXiv 2512.01686",
    ),
    Rule(
        "rerope_mint",
        *("scaled into an event", "amid its event", "equal events", "single"),
        "reindex.event_positions",
        "ReRoPE of MinT, arXiv 2412.05263",
    ),
    Rule(
        "ruler_markers",
        *("any", "id of a patch", "not advanced", "any"),
        "reindex.insert_markers",
        "RULER, arXiv 2510.03230",
    ),
)


def published_rules() -> list[Rule]:
    """Every rule, sorted by name.

    Example:
        >>> [rule.made_by for rule in published_rules() if rule.name in ("mrope", "ruler_markers")]
        ['schemes.scheme', 'reindex.insert_markers']
    """
    named = [
        Rule(
            row.name,
            row.block if row.layers == "same" else f"{row.block}, layers {row.layers}",
            row.text,
            f"{row.cursor}, space reset" if row.reset else row.cursor,
            row.allocation,
            "schemes.scheme",
            row.source,
        )
        for row in SCHEMES.values()
    ]
    return sorted([*named, *_FUNCTIONS], key=lambda rule: rule.name)
