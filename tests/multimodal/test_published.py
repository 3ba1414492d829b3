"""The table of published rules: complete, and every entry leads to documented code of that paper."""

from __future__ import annotations

import importlib
import re

import pytest

from mmpos.multimodal import SCHEMES, Rule, published_rules
from mmpos.multimodal.blocks import BLOCK_LAYOUTS
from mmpos.multimodal.cursor import CURSOR_RULES
from mmpos.multimodal.schemes import ALLOCATIONS
from mmpos.multimodal.streaming import STREAM_RULES

RULES = {rule.name: rule for rule in published_rules()}


def test_the_table_holds_every_scheme_and_every_rule_beside_them() -> None:
    assert len(RULES) == len(published_rules())
    assert set(SCHEMES) < set(RULES)
    assert {rule.name for rule in RULES.values() if rule.made_by == "streaming.stream_ids"} == {
        f"stream_{rule}" for rule in STREAM_RULES
    }
    assert set(RULES) - set(SCHEMES) >= {
        *("partial_rotary", "grape", "frame_interleave", "sofa", "regional_rope", "rerope_mint", "ruler_markers"),
    }
    assert RULES["mrope_interleave_reset"].cursor == "extent, space reset"
    assert RULES["circlerope_age"].block == "circle, layers alternate"


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_every_rule_leads_to_code_that_names_its_paper(rule: Rule) -> None:
    """The arXiv id of the source stands in the documentation of what the rule is made of."""
    module, name = rule.made_by.split(".")
    made_by = importlib.import_module(f"mmpos.multimodal.{module}")
    documented = [made_by.__doc__, getattr(made_by, name).__doc__]
    if rule.name in SCHEMES:
        row = SCHEMES[rule.name]
        documented += [part.__doc__ for part in (BLOCK_LAYOUTS[row.block], CURSOR_RULES[row.cursor])]
        documented.append(ALLOCATIONS[row.allocation].__doc__)
    paper = re.search(r"arXiv (\d{4}\.\d{5})|openreview (\w+)", rule.source)
    assert paper is not None, rule.source
    wanted = paper[1] or paper[2]
    assert any(wanted in re.sub(r"\s+", " ", text or "") for text in documented), (rule.name, wanted)
    assert all((getattr(rule, field) or "").strip() for field in ("block", "text", "cursor", "allocation"))
