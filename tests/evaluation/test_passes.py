"""Forward passes and their times, on a clock that only the models move."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mmpos.evaluation import passes


class Clock:
    """Seconds that pass while a model runs."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def model(self, seconds: float) -> nn.Module:
        clock = self

        class Slow(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                clock.seconds += seconds * len(x)
                return 2 * x

        return Slow()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(passes, "now", lambda device: clock.seconds)
    return clock


def test_ratio_is_the_first_model_over_the_second(clock: Clock) -> None:
    cpu = torch.device("cpu")
    ratio, rounds = passes.time_ratio(clock.model(0.03), clock.model(0.01), torch.zeros(1, 2), cpu)
    assert ratio == pytest.approx(3)
    assert rounds == 25
    assert passes.time_ratio(clock.model(1.0), clock.model(2.0), torch.zeros(1, 2), cpu) == (pytest.approx(0.5), 5)


@pytest.mark.parametrize("tokens", [1, 3000, 10**6])
def test_all_samples_pass_in_order_whatever_goes_through_at_once(clock: Clock, tokens: int) -> None:
    x, y = torch.arange(14.0).reshape(7, 2), torch.arange(7)
    loader = [(x[:5], y[:5]), (x[5:], y[5:])]
    logits, labels, seconds = passes.logits_of(clock.model(0.5), loader, torch.device("cpu"), None, tokens)
    assert torch.equal(logits, 2 * x.double())
    assert torch.equal(labels, y)
    assert seconds == pytest.approx(3.5)
