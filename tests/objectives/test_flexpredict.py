"""FlexPredict: noisy places with the covariance of the shared matrix."""

from __future__ import annotations

import pytest
import torch

from mmpos.objectives import StochasticPositions
from mmpos.testing import seeded


def test_without_noise_it_is_deterministic() -> None:
    psi = seeded(2, 5, 6)
    assert torch.equal(StochasticPositions(8, 6, sigma=0.0).train().queries(psi), psi)
    assert torch.equal(StochasticPositions(8, 6, sigma=2.0).eval().queries(psi), psi)


def test_sample_covariance_is_sigma_times_the_square_of_the_matrix() -> None:
    torch.manual_seed(0)
    stop = StochasticPositions(8, 6, sigma=0.7)
    psi = seeded(1, 1, 6).expand(200_000, 1, 6)
    drawn = stop.queries(psi, generator=torch.Generator().manual_seed(0))[:, 0].detach()
    torch.testing.assert_close(drawn.mean(0), psi[0, 0], rtol=0, atol=0.01)
    expected = 0.7 * stop.weight @ stop.weight.T
    assert (drawn.T.cov() - expected).abs().max() < 0.02 * expected.abs().max()


def test_given_noise_only_on_masked_tokens_and_tied_to_the_context() -> None:
    stop = StochasticPositions(8, 6, sigma=0.25).eval()
    psi, noise, features = seeded(2, 5, 6), seeded(2, 5, 8, seed=1), seeded(2, 3, 8, seed=2)
    masked = torch.tensor([[True, False, True, False, False], [False] * 5])
    out = stop.queries(psi, noise, masked=masked)
    torch.testing.assert_close(out[masked], (psi + 0.5 * noise @ stop.weight.T)[masked])
    assert torch.equal(out[~masked], psi[~masked])
    torch.testing.assert_close(stop.context(features), features @ stop.weight.T + stop.project.bias)
    out.sum().backward()
    through_noise = stop.weight.grad.clone()
    stop.context(features).sum().backward()
    assert through_noise.abs().max() > 0
    assert (stop.weight.grad - through_noise).abs().max() > 0


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="sigma"):
        StochasticPositions(8, sigma=-1.0)
    with pytest.raises(ValueError, match="noise"):
        StochasticPositions(8, 6).queries(seeded(1, 2, 6), seeded(1, 2, 6))
