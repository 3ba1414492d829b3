"""Parameter groups, schedule and options of the optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmpos.evaluation.weights import plain_name
from mmpos.models import create_vit
from mmpos.training.optim import (
    create_optimizer,
    learning_rate_factor,
    no_weight_decay_names,
    parameter_groups,
)

ADAMW = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05}


def small_vit(encoding: str = "rope_mixed") -> nn.Module:
    return create_vit(encoding=encoding, image_size=(16, 24), depth=2, embed_dim=24)


def test_positions_vectors_and_nothing_else_are_spared_from_decay() -> None:
    model = small_vit()
    spared, decayed = parameter_groups(model, 0.05)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert spared["weight_decay"] == 0.0
    assert decayed["weight_decay"] == 0.05
    decayed_names = {names[id(parameter)] for parameter in decayed["params"]}
    spared_names = {names[id(parameter)] for parameter in spared["params"]}
    assert decayed_names | spared_names == set(names.values())
    assert all(name.endswith(".weight") and names for name in decayed_names)
    assert {
        "position_encoding.layers.0.rope_mixed.freqs",
        "position_encoding.layers.1.rope_mixed.freqs",
    } <= spared_names
    assert "blocks.1.mlp.fc1.weight" in decayed_names
    assert "norm.weight" in spared_names


@pytest.mark.parametrize("wrap", [lambda m: nn.ModuleDict({"module": m}), lambda m: nn.ModuleDict({"_orig_mod": m})])
def test_positions_are_found_through_wrappers(wrap: object) -> None:
    assert callable(wrap)
    wrapped = wrap(small_vit())
    assert "position_encoding.layers.1.rope_mixed.freqs" in no_weight_decay_names(wrapped)
    spared, _ = parameter_groups(wrapped, 0.1)
    freqs = [p for name, p in wrapped.named_parameters() if name.endswith("freqs")]
    assert len(freqs) == 2
    assert {id(p) for p in freqs} <= {id(p) for p in spared["params"]}


def test_plain_name_takes_every_wrapper_off() -> None:
    assert plain_name("module._orig_mod.blocks.0._checkpoint_wrapped_module.norm.weight") == "blocks.0.norm.weight"
    assert plain_name("submodule.weight") == "submodule.weight"


def test_schedule_rises_then_falls() -> None:
    factor = learning_rate_factor(100, {**ADAMW, "warmup": 0.2, "warmup_lr": 1e-4, "min_lr": 1e-5})
    values = [factor(step) for step in range(100)]
    assert values[0] == pytest.approx(0.1 + 0.9 / 20)
    assert max(values) == values[19] == values[20] == 1.0
    assert all(a < b for a, b in zip(values[:19], values[1:20], strict=True))
    assert all(a > b for a, b in zip(values[20:], values[21:], strict=False))
    assert factor(60) == pytest.approx(0.01 + 0.99 * 0.5)
    assert factor(100) == pytest.approx(0.01)
    constant = learning_rate_factor(100, {**ADAMW, "warmup": 5, "schedule": "constant"})
    assert (constant(0), constant(4), constant(99)) == (pytest.approx(0.2), 1.0, 1.0)


def test_lamb_of_the_imagenet_recipe_exists() -> None:
    optimizer = create_optimizer(small_vit(), {"name": "lamb", "lr": 4e-3, "weight_decay": 0.03, "betas": [0.9, 0.999]})
    assert type(optimizer).__name__ == "Lamb"
    assert optimizer.defaults["lr"] == 4e-3
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.03]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**ADAMW, "name": "adamv"}, "optimizer.name: expected a timm optimizer, got 'adamv'"),
        ({**ADAMW, "momentun": 0.9}, "optimizer: unknown momentun; known are betas"),
        ({**ADAMW, "options": {"momentun": 0.9}}, "optimizer: adamw does not take these options"),
        ({**ADAMW, "lr": 0.0}, "expected lr > 0"),
        ({**ADAMW, "schedule": "cosin"}, "optimizer.schedule: expected 'cosine' or 'constant', got 'cosin'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_optimizer(nn.Linear(2, 2), options)


def test_one_step_decays_only_what_may_decay() -> None:
    model = small_vit()
    optimizer = create_optimizer(model, {**ADAMW, "lr": 0.1, "weight_decay": 0.5})
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = dict(model.named_parameters())
    assert torch.equal(
        after["position_encoding.layers.0.rope_mixed.freqs"], before["position_encoding.layers.0.rope_mixed.freqs"]
    )
    assert torch.allclose(after["head.weight"], before["head.weight"] * (1 - 0.1 * 0.5))
