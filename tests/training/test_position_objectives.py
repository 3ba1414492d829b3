"""DropPos, MP3 and FlexPredict in training: on every encoding, with names that fit the next stage, exactly resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmpos import list_encodings
from mmpos.config import compose
from mmpos.evaluation.results import read_results
from mmpos.evaluation.weights import newest_checkpoint, read_checkpoint
from mmpos.models import create_vit
from mmpos.objectives import predicted_blocks
from mmpos.training.build import build_data, build_model, check_config
from mmpos.training.objectives import build_module
from mmpos.training.position_objectives import (
    DropPosModule,
    DropPosOptions,
    FlexPredictModule,
    FlexPredictOptions,
    Mp3Module,
    Mp3Options,
    PositionModule,
)
from mmpos.training.run import train
from mmpos.training.stages import train_stages
from tests.training.conftest import losses, weights
from tests.training.test_resume import Killed

Make = Callable[..., dict[str, Any]]
NAMES = ("droppos", "mp3", "flexpredict")
SMALL_OPTIONS = {
    "droppos": ("+objective.options.width=24", "+objective.options.heads=3"),
    "mp3": (),
    "flexpredict": ("+objective.options.width=24", "+objective.options.heads=3", "+objective.options.depth=1"),
}
GRID = (4, 6)
#: earth coordinates, and an option that does not fit 24 channels in three heads
NOT_IMAGES = {"geoclip", "spherical", "rope_3d", "comrope_ap"}
IMAGE_ENCODINGS = [name for name in list_encodings() if name not in NOT_IMAGES]


def vit_of(encoding: str) -> Any:
    torch.manual_seed(0)
    return create_vit(
        encoding=encoding, image_size=(16, 24), in_chans=1, depth=2, embed_dim=24, class_token=True, num_classes=4
    )


def module_of(name: str, encoding: str, **options: Any) -> PositionModule:
    optimizer = {"name": "adamw", "lr": 1e-3}
    if name == "droppos":
        options = {"width": 24, "heads": 3, **options}
        return DropPosModule(vit_of(encoding), GRID, DropPosOptions(**options), optimizer=optimizer)
    if name == "mp3":
        return Mp3Module(vit_of(encoding), GRID, Mp3Options(**options), optimizer=optimizer)
    options = {"width": 24, "heads": 3, "depth": 1, **options}
    return FlexPredictModule(vit_of(encoding), GRID, FlexPredictOptions(**options), optimizer=optimizer)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("encoding", IMAGE_ENCODINGS)
def test_every_encoding_gets_a_gradient_or_is_held(name: str, encoding: str) -> None:
    if (name, encoding) == ("droppos", "none"):
        pytest.skip("nothing to hide; refused by the builder, tested below")
    options = {"mode": "shuffle"} if (name, encoding) == ("droppos", "seqpe") else {}
    module = module_of(name, encoding, **options)
    if name == "droppos":
        module.progress = lambda: 0.5  # type: ignore[method-assign]
    torch.manual_seed(1)
    module.train()
    answer = module.ask(torch.randn(3, 1, 16, 24))
    answer.loss.backward()
    assert 0 <= float(answer.accuracy) <= 1
    for part in ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.1.mlp.fc2.weight"):
        gradient = module.model.get_parameter(part).grad
        assert gradient is not None, part
        assert gradient.abs().max() > 0, part
    assert all(p.grad is not None for p in module.objective.parameters() if p.requires_grad)
    held = {key for key, p in module.model.named_parameters() if not p.requires_grad}
    assert {"head.weight", "head.bias"} <= held
    of_the_encoding = {key for key, _ in module.model.named_parameters() if key.startswith("position_encoding.")}
    if name == "mp3":
        assert of_the_encoding <= held


@pytest.mark.parametrize("encoding", [name for name in IMAGE_ENCODINGS if name not in ("none", "seqpe")])
def test_hidden_tokens_know_nothing_of_their_place(encoding: str) -> None:
    module = module_of("droppos", encoding).eval()
    assert isinstance(module, DropPosModule)
    image = torch.randn(1, 1, 16, 24)
    tokens, positions = module.trunk.embed(image)
    visible = torch.tensor([[3, 9, 14, 20, 22, 5]])
    hidden = torch.tensor([[True, False, True, True, False, True]])
    exchanged = tokens.clone()
    exchanged[:, 1 + 3], exchanged[:, 1 + 20] = tokens[:, 1 + 20], tokens[:, 1 + 3]
    given = {"image": image, "visible": visible, "hidden": hidden}
    with torch.no_grad():
        before = module.objective(module.trunk, tokens, positions, **given).logits
        after = module.objective(module.trunk, exchanged, positions, **given).logits
    torch.testing.assert_close(after[:, [3, 1, 2, 0, 4, 5]], before, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(after[:, 0], before[:, 0], atol=1e-3)


@pytest.mark.parametrize("encoding", ["sincos", "rope_mixed", "cpe", "irpe", "seqpe", "lookhere"])
def test_mp3_runs_without_the_places_of_the_model(encoding: str) -> None:
    module = module_of("mp3", encoding, share=1.0).eval()
    tokens, positions = module.trunk.embed(torch.randn(2, 1, 16, 24))
    order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(24)])
    with torch.no_grad():
        straight = module.trunk(tokens, positions)
        permuted = module.trunk(tokens[:, order], positions)
    torch.testing.assert_close(permuted, straight[:, order], rtol=1e-4, atol=1e-5)


def test_own_encodings_of_a_model_are_refused() -> None:
    import timm

    from mmpos.adapters.timm import attach
    from mmpos.adapters.trunk import VitTrunk

    vit = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=(32, 48), dynamic_img_size=True)
    with pytest.raises(ValueError, match="pos_embed='remove'"):
        VitTrunk(attach(vit, "rope_axial", pos_embed="keep"))


def test_droppos_counts_hidden_tokens_and_smooths_on_the_real_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmpos.training import position_objectives

    module = module_of("droppos", "sincos", sigma=2.0, attentive=False)
    module.progress = lambda: 0.25  # type: ignore[method-assign]
    seen = []
    original = position_objectives.position_loss

    def spy(logits: torch.Tensor, cells: torch.Tensor, weight: torch.Tensor, targets: Any) -> torch.Tensor:
        seen.append((weight, targets))
        return original(logits, cells, weight, targets)

    monkeypatch.setattr(position_objectives, "position_loss", spy)
    answer = module.train().ask(torch.randn(2, 1, 16, 24))
    weight, targets = seen[0]
    assert answer.count == weight.sum() == 2 * 4  # 6 of 24 patches are visible, 4 of them without a place
    # sigma fell to 1.5; the cell below cell 8 is 14 on a grid of 4 x 6
    assert float(targets[8, 14] / targets[8, 8]) == pytest.approx(torch.tensor(-1 / 2.25).exp().item(), rel=1e-5)
    module.eval().ask(torch.randn(2, 1, 16, 24))
    assert seen[1][1] is None


def test_droppos_weighs_patches_by_their_likeness_to_the_whole() -> None:
    module = module_of("droppos", "sincos").eval()
    assert isinstance(module, DropPosModule)
    image = torch.randn(2, 1, 16, 24)
    tokens, positions = module.trunk.embed(image)
    cells = torch.tensor([[1, 5, 9], [23, 2, 0]])
    weight = module.attention(image, tokens, positions, cells)
    features = module.model.forward_features(image)
    like = torch.cosine_similarity(features[:, 1:], features[:, :1], dim=-1).div(0.1).softmax(-1).gather(1, cells)
    torch.testing.assert_close(weight, (like / like.sum(1, keepdim=True)).detach())


def test_the_slow_copy_follows_the_encoder_and_gets_no_gradient(small: Make, tmp_path: Path) -> None:
    config = small("objective.name=flexpredict", *SMALL_OPTIONS["flexpredict"], "trainer.max_epochs=1")
    config["objective"]["options"]["momentum"] = 0.5
    config["data"]["train_count"] = 16  # two steps: keep 0.5, then 1
    train(config, tmp_path)
    state = read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["state_dict"]
    name = "blocks.0.attn.qkv.weight"
    torch.manual_seed(0)
    assert not torch.equal(state[f"slow.{name}"], state[f"model.{name}"])
    data = build_data(config)
    import lightning.pytorch as pl

    pl.seed_everything(config["seed"], workers=True, verbose=False)
    start = build_model(config, data).state_dict()[name]
    moved = (state[f"slow.{name}"] - start).norm() / (state[f"model.{name}"] - start).norm()
    assert 0 < float(moved) < 1


@pytest.mark.parametrize("name", NAMES)
def test_resumed_run_ends_like_an_uninterrupted_one(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    every = ("callbacks.checkpoint_every_n_steps=2", "data.train_count=24", "encoding=learned")
    config = small(f"objective.name={name}", *SMALL_OPTIONS[name], *every)
    whole = train(config, tmp_path / "whole")
    original = PositionModule.training_step

    def stop(self: PositionModule, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.fit_loop.total_batch_idx >= 5:
            raise Killed
        return original(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(PositionModule, "training_step", stop)
        with pytest.raises(Killed):
            train(config, tmp_path / "cut")
    torch.rand(17)
    resumed = train(config, tmp_path / "cut", ckpt_path=newest_checkpoint(tmp_path / "cut" / "checkpoints"))
    expected, got = (
        read_checkpoint(tmp_path / run / "checkpoints" / "last.ckpt")["state_dict"] for run in ("whole", "cut")
    )
    assert expected.keys() == got.keys()
    assert any(key.startswith("objective.") for key in expected)
    for key in expected:
        assert torch.equal(expected[key], got[key]), key
    assert resumed == whole
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.parametrize("name", NAMES)
def test_the_encoder_goes_on_to_the_next_stage(small: Make, tmp_path: Path, name: str) -> None:
    config = small("evaluation=resolution", "sizes=[16]", "evaluation.overhead=false", "encoding=rope_mixed")
    options = {text.split("=")[0].rpartition(".")[2]: int(text.split("=")[1]) for text in SMALL_OPTIONS[name]}
    handed = {"checkpoint": "stage:pretrain", "fresh": ["head.*"]}
    one = {"trainer": {"max_epochs": 1}}
    config["stages"] = {
        "pretrain": {**one, "objective": {"name": name, "options": options}, "evaluation": {"name": "none"}},
        "scratch": one,
        "probe": {**one, "model": {**handed, "frozen": ["*", "!head.*"]}},
        "finetune": {**one, "model": handed},
    }
    train_stages(config, tmp_path)
    start, probe, tuned = (weights(tmp_path / stage) for stage in ("pretrain", "probe", "finetune"))
    assert start.keys() == probe.keys() == tuned.keys()
    assert sorted(key for key in start if not torch.equal(start[key], probe[key])) == ["head.bias", "head.weight"]
    assert not torch.equal(start["blocks.0.attn.qkv.weight"], tuned["blocks.0.attn.qkv.weight"])
    metrics = {row.metric for row in read_results(tmp_path / "results.csv")}
    assert {"accuracy", "scratch_accuracy", "probe_accuracy"} <= metrics
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["stages"] == ["pretrain", "scratch", "probe", "finetune"]
    assert 0 <= json.loads((tmp_path / "pretrain" / "summary.json").read_text())["val/accuracy"] <= 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("objective.name=droppos", "encoding=none"), "objective.name=mp3"),
        (
            ("objective.name=droppos", "encoding=seqpe", "encoding.options.width=24"),
            "cannot run on encoding seqpe.*mode",
        ),
        (("objective.name=droppos", "+objective.options.kep=0.5"), "kep"),
        (("objective.name=mp3", "objective.label_smoothing=0.1"), "does not read label_smoothing"),
        (("objective.name=mp3", "+objective.options.share=0"), "share"),
        (("objective.name=flexpredict", "+objective.options.momentum=2", *SMALL_OPTIONS["flexpredict"]), "momentum"),
        (
            (
                "objective.name=flexpredict",
                "+objective.options.share=[1.0,1.0]",
                "+objective.options.aspect=[1,1]",
                *SMALL_OPTIONS["flexpredict"],
            ),
            "predict smaller blocks",
        ),
        (("objective.name=dropos",), "objective.name"),
    ],
)
def test_wrong_settings_are_errors(small: Make, overrides: tuple[str, ...], words: str) -> None:
    config = small(*overrides)

    def build() -> None:
        check_config(config)
        data = build_data(config)
        build_module(config, build_model(config, data), data)

    with pytest.raises(ValueError, match=words):
        build()


def test_point_clouds_are_refused(small: Make) -> None:
    config = small("objective.name=mp3")
    data = build_data(config)
    with pytest.raises(ValueError, match="a ViT over images or videos"):
        build_module(config, torch.nn.Linear(2, 2), data)


def test_blocks_and_context_are_apart_and_of_one_size() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = set()
    for _ in range(20):
        seen, asked = predicted_blocks((7, 9), 3, blocks=4, generator=generator)
        sizes.add(asked.shape[2])
        for context, blocks in zip(seen, asked, strict=True):
            assert not set(context.tolist()) & set(blocks.flatten().tolist())
            assert len(set(context.tolist())) == len(context)
            for block in blocks:
                rows, columns = (block // 9).unique(), (block % 9).unique()
                assert len(rows) * len(columns) == len(block)
                assert rows.tolist() == list(range(int(rows[0]), int(rows[-1]) + 1))
                assert columns.tolist() == list(range(int(columns[0]), int(columns[-1]) + 1))
    assert len(sizes) > 1
    assert all(0.1 * 63 <= size <= 0.27 * 63 for size in sizes)


def test_blocks_of_videos_reach_over_all_frames() -> None:
    _, asked = predicted_blocks((3, 4, 5), 2, blocks=2, generator=torch.Generator().manual_seed(0))
    frames = asked.unflatten(-1, (3, -1))
    assert torch.equal(frames[..., 1, :], frames[..., 0, :] + 20)
    assert torch.equal(frames[..., 2, :], frames[..., 0, :] + 40)


def test_blocks_that_cover_a_tiny_grid_leave_a_context() -> None:
    for seed in range(20):
        seen, asked = predicted_blocks((2, 2), 5, generator=torch.Generator().manual_seed(seed))
        assert seen.shape[1] >= 1
        assert not (seen[:, :, None] == asked[:, :1]).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "model",
    [
        ("data=moving_mnist5k", "model=video_micro", "encoding=rope_3d", "model.options.depth=1"),
        (
            "data=fake",
            "data.image_size=48",
            "model=timm",
            "model.name=eva02_tiny_patch14_224",
            "model.patch_size=16",
            "encoding=irpe",
            "+model.options.depth=1",
        ),
    ],
)
def test_videos_and_models_of_timm(name: str, model: tuple[str, ...]) -> None:
    options = {"droppos": 36, "flexpredict": 36}
    width = (f"+objective.options.width={options[name]}", "+objective.options.heads=3") if name in options else ()
    config = compose([*model, f"objective.name={name}", *width])
    data = build_data(config)
    module = build_module(config, build_model(config, data), data)
    assert isinstance(module, PositionModule)
    module.progress = lambda: 0.5  # type: ignore[method-assign]
    images, _ = next(iter(data.train_dataloader()))
    answer = module.train().ask(images[:2])
    answer.loss.backward()
    used = [p for key, p in module.model.named_parameters() if p.requires_grad and "patch_embed" in key]
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in used)
    if name == "mp3":
        assert answer.count == 2 * torch.tensor(module.objective.grid).prod()
