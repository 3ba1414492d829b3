"""Names, options and composition."""

from __future__ import annotations

import pytest
import torch

from mmpos import Facts, PositionEncoding, Positions, create_encoding, list_encodings, register
from mmpos.encodings import encoding_class, encoding_options
from mmpos.encodings.registry import _REGISTRY


def test_names_are_sorted_and_lead_back() -> None:
    names = list_encodings()
    assert names == sorted(set(names))
    assert {"none", "rope_axial", "rope_mixed"} <= set(names)
    assert all(encoding_class(name).name == name for name in names)


@pytest.mark.parametrize(
    ("wrong", "near"), [("rope_mix", "rope_mixed"), ("ropeaxial", "rope_axial"), ("nonne", "none")]
)
def test_unknown_name_suggests_near_ones(wrong: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"no encoding is called '{wrong}'.*did you mean.*'{near}'"):
        create_encoding(wrong, 16, 2)


def test_options_are_those_of_the_class_and_its_bases() -> None:
    options = encoding_options("rope_axial")
    assert options["theta"] == 100.0
    assert options["layout"] == "interleaved"
    assert options["resolution"] is None
    assert not {"dim", "num_heads", "self", "rotary", "common"} & set(options)


def test_composition_keeps_order_and_ownership() -> None:
    stack = create_encoding(["rope_axial", ("rope_mixed", {"theta": 20.0}), "none"], 32, 2, depth=3)
    assert stack.title == "rope_axial+rope_mixed+none"
    assert [e.name for e in stack.encodings_of(2)] == ["rope_axial", "rope_mixed", "none"]
    assert set(stack.shared) == {"rope_axial", "none"}
    assert stack.layers[1]["rope_mixed"].theta == 20.0
    states = stack.prepare(Positions.grid(2, 3))
    assert len(states) == 3
    assert states[0].prepared[0] is states[2].prepared[0]  # shared: prepared once
    assert not torch.equal(states[0].prepared[1].cos, states[2].prepared[1].cos)


def test_per_layer_can_be_chosen() -> None:
    shared = create_encoding("rope_mixed", 32, 2, depth=3, per_layer=False)
    assert [key for key, _ in shared.named_parameters()] == ["shared.rope_mixed.freqs"]
    owned = create_encoding("rope_axial", 32, 2, depth=3, per_layer=True)
    assert len(owned.layers[2]) == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"name": []}, "at least one encoding"),
        ({"name": ["none", "none"]}, "different encodings"),
        ({"name": ["rope_axial", {"theta": 3.0}]}, r"pairs \(name, options\)"),
        ({"name": ["rope_axial", "none"], "theta": 3.0}, "give options as pairs"),
        ({"name": "none", "depth": 0}, "at least 1 layer"),
        ({"name": "none", "dim": 15}, "multiple of num_heads"),
        ({"name": "none", "num_heads": 0}, "positive"),
        ({"name": "none", "train_grid": 14}, "train_grid"),
        ({"name": "none", "train_grid": (14, 0)}, "train_grid"),
        ({"name": "none", "train_grid": (14, 7.5)}, "train_grid.*7.5"),
        ({"name": "none", "train_grid": (2, 3), "axes": 3}, "3 sizes"),
        ({"name": "rope_axial", "thetta": 3.0}, "no option 'thetta'; its options are.*theta"),
        ({"name": "rope_axial", "resolution": "bicubic"}, "resolution.*index"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        create_encoding(**{"dim": 16, "num_heads": 2, **arguments})


def test_a_name_belongs_to_one_module() -> None:
    class Thief(PositionEncoding):
        facts = Facts(title="thief", source="test", plugs_into=())

    with pytest.raises(ValueError, match="already registered by mmpos.encodings.none"):
        register("none")(Thief)
    assert encoding_class("none") is not Thief


def test_facts_are_required() -> None:
    class Silent(PositionEncoding):
        pass

    with pytest.raises(ValueError, match="must state its facts"):
        register("silent")(Silent)
    assert "silent" not in _REGISTRY


def test_resolution_of_a_composition() -> None:
    stack = create_encoding(["none", "rope_mixed"], 32, 2, depth=2, train_grid=(2, 3))
    assert "ntk" in stack.resolution_rules()
    stack.set_resolution("ntk")
    assert [e.resolution for e in stack.encodings_of(1)] == ["index", "ntk"]
    with pytest.raises(ValueError, match="none\\+rope_mixed supports.*ntk"):
        stack.set_resolution("bicubic")


def test_names_without_weight_decay_are_found_from_the_stack() -> None:
    stack = create_encoding(["rope_mixed", "rope_axial"], 32, 2, depth=2)
    assert stack.no_weight_decay() == {"layers.0.rope_mixed.freqs", "layers.1.rope_mixed.freqs"}
    assert stack.no_weight_decay() == {key for key, _ in stack.named_parameters()}
