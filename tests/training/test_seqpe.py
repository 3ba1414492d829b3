"""The two losses of SeqPE in training: what they reach, what they weigh, and that a step can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmpos.evaluation.weights import newest_checkpoint
from mmpos.training.build import build_data, build_model, check_config
from mmpos.training.objectives import build_module
from mmpos.training.run import train
from mmpos.training.seqpe import SeqPEClassifier
from tests.training.conftest import weights
from tests.training.test_resume import Killed

Make = Callable[..., dict[str, Any]]
SEQPE = ("encoding=seqpe", "encoding.options.width=24", "objective.name=seqpe")


def module(small: Make, *overrides: str) -> tuple[SeqPEClassifier, tuple[torch.Tensor, torch.Tensor], list[Any]]:
    """A module outside a trainer, a batch, and what it logs."""
    config = small(*SEQPE, *overrides)
    check_config(config)
    torch.manual_seed(0)
    data = build_data(config)
    built = build_module(config, build_model(config, data), data)
    assert isinstance(built, SeqPEClassifier)
    logged: list[Any] = []
    built._trainer = type("Trainer", (), {"world_size": 1})()
    built.log = lambda name, value, **_: logged.append((name, float(torch.as_tensor(value).detach())))  # type: ignore[method-assign,assignment]
    return built.eval(), next(iter(data.train_dataloader())), logged


def test_each_loss_reaches_the_digit_encoder_and_nothing_else(small: Make) -> None:
    built, _, _ = module(small)
    encoder = dict(built.encoding.encoder.named_parameters())
    for part in (built.order_loss, built.geometry_loss):
        built.zero_grad()
        part(torch.device("cpu")).backward()
        reached = {name for name, p in built.model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        assert reached
        assert all(name.startswith("position_encoding.shared.seqpe.encoder.") for name in reached)
        for name in ("digit", "slot", "axis", "collector", "out.weight"):
            gradient = encoder[name].grad
            assert gradient is not None, name
            assert gradient.abs().max() > 0, name


def test_the_loss_of_a_step_is_the_weighted_sum(small: Make) -> None:
    total = {}
    for contrastive, transfer in ((0.0, 0.0), (0.5, 0.0), (0.0, 3.0), (0.5, 3.0)):
        built, batch, logged = module(
            small,
            f"+objective.options.contrastive={contrastive}",
            f"+objective.options.transfer={transfer}",
            "+objective.options.shift=0.0",
        )
        # the parts draw from the same generator in another order: fix what each of them sees
        built.order_loss = lambda device: torch.tensor(2.0)  # type: ignore[method-assign]
        built.geometry_loss = lambda device: torch.tensor(0.25)  # type: ignore[method-assign]
        torch.manual_seed(1)
        total[contrastive, transfer] = built.training_step(batch, 0).item()
        names = [name for name, _ in logged]
        assert ("train/contrastive" in names, "train/transfer" in names) == (contrastive > 0, transfer > 0)
    plain = total[0.0, 0.0]
    assert total[0.5, 0.0] == pytest.approx(plain + 1.0)
    assert total[0.0, 3.0] == pytest.approx(plain + 0.75)
    assert total[0.5, 3.0] == pytest.approx(plain + 1.75)


def test_moved_steps_see_other_coordinates_and_skip_the_transfer_loss(small: Make) -> None:
    built, batch, logged = module(small, "+objective.options.shift=1.0")
    seen = []
    original = built.encoding.vectors
    built.encoding.vectors = lambda coords: seen.append(coords) or original(coords)  # type: ignore[method-assign]
    built.training_step(batch, 0)
    grid = seen[0][0]
    assert grid.shape == (16, 2)
    corner = grid[0]
    assert corner.max() > 0
    assert torch.equal(grid - corner, original_grid())
    assert grid.max() <= 99
    assert [name for name, _ in logged] == ["train/contrastive", "train/loss"]


def test_practice_stays_within_reach(small: Make) -> None:
    built, _, _ = module(small, "+objective.options.reach=6")
    seen = []
    original = built.encoding.vectors
    built.encoding.vectors = lambda coords: seen.append(coords) or original(coords)  # type: ignore[method-assign]
    for _ in range(30):
        built.order_loss(torch.device("cpu"))
        built.geometry_loss(torch.device("cpu"))
    assert max(int(coords.max()) for coords in seen) == 5
    assert max(float(built.moved_grid(torch.device("cpu")).coords.max()) for _ in range(30)) == 5
    assert built.window == 4


def original_grid() -> torch.Tensor:
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    return torch.stack([rows, columns], -1).reshape(-1, 2)


def test_the_order_loss_of_given_pivots_can_be_learned(small: Make) -> None:
    built, _, _ = module(small, "+objective.options.candidates=8", "+objective.options.pivots=8")
    optimizer = torch.optim.Adam(built.encoding.parameters(), lr=1e-2)
    values = []
    for _ in range(100):
        torch.manual_seed(3)  # the same pivots and candidates in every step
        loss = built.order_loss(torch.device("cpu"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert values[-1] < 0.5 * values[0]


def test_a_resumed_run_ends_like_an_uninterrupted_one(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(
        *SEQPE, "callbacks.checkpoint_every_n_steps=2", "data.train_count=24", "+objective.options.shift=0.5"
    )
    train(config, tmp_path / "whole")
    original = SeqPEClassifier.training_step

    def stop(self: SeqPEClassifier, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.fit_loop.total_batch_idx >= 4:
            raise Killed
        return original(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(SeqPEClassifier, "training_step", stop)
        with pytest.raises(Killed):
            train(config, tmp_path / "cut")
    torch.rand(7)
    train(config, tmp_path / "cut", ckpt_path=newest_checkpoint(tmp_path / "cut" / "checkpoints"))
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert whole.keys() == build_model(config, build_data(config)).state_dict().keys()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("encoding=sincos", "objective.name=seqpe"), "got sincos; use encoding=seqpe"),
        ((*SEQPE, "+objective.options.contrastiv=0.2"), "contrastiv"),
        ((*SEQPE, "+objective.options.transfer=-1"), "0 or more"),
        ((*SEQPE, "+objective.options.cells=1"), "at least 2"),
        ((*SEQPE, "+objective.options.reach=3"), "expected 4 .* to 100"),
        ((*SEQPE, "+objective.options.reach=101"), "got 101"),
    ],
)
def test_wrong_options_are_errors(small: Make, overrides: tuple[str, ...], words: str) -> None:
    config = small(*overrides)
    data = build_data(config)
    with pytest.raises(ValueError, match=words):
        build_module(config, build_model(config, data), data)
