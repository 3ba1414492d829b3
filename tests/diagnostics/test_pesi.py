"""PESI metrics against a plain computation, their properties, and kernels of encodings."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmpos import Positions, create_encoding, list_encodings
from mmpos.diagnostics import attention_kernel, cosine_kernel, pesi, pesi_metrics
from mmpos.testing import seeded


def plain_ranks(values: list[float]) -> list[float]:
    order = sorted(values)
    return [sum(i for i, o in enumerate(order) if o == v) / order.count(v) for v in values]


def plain_rho(x: list[float], y: list[float]) -> float:
    n = len(x)
    if n < 2:
        return 0.0
    gap = sum((a - b) ** 2 for a, b in zip(plain_ranks(x), plain_ranks(y), strict=True))
    return 1 - 6 * gap / (n * (n * n - 1))


def plain_metrics(s: Tensor, grid: tuple[int, int], buckets: int, ring: str, include: bool, empty: str) -> list[float]:
    """The definitions, one centre and one cell at a time."""
    height, width = grid
    cells = [(r, c) for r in range(height) for c in range(width)]
    totals = [0.0, 0.0, 0.0]
    for i, (r0, c0) in enumerate(cells):
        rings: dict[float, list[float]] = {}
        ways: dict[int, list[tuple[float, float]]] = {}
        for j, (r, c) in enumerate(cells):
            if i == j and not include:
                continue
            distance = math.hypot(r - r0, c - c0)
            rings.setdefault(round(distance) if ring == "round" else distance, []).append(float(s[i, j]))
            way = math.floor(math.atan2(c - c0, r - r0) / (2 * math.pi / buckets)) % buckets
            ways.setdefault(way, []).append((distance, float(s[i, j])))
        radii = sorted(rings)
        means = [sum(rings[r]) / len(rings[r]) for r in radii]
        totals[0] += 1 - plain_rho(radii, means)
        rhos = [plain_rho(*map(list, zip(*w, strict=True))) for w in ways.values() if len(w) > 1]
        totals[1] += 1 - sum(rhos) / (buckets if empty == "zero" else max(len(rhos), 1))
        spread = [
            math.sqrt(sum((v - m) ** 2 for v in rings[r]) / len(rings[r])) / m
            for r, m in zip(radii, means, strict=True)
        ]
        totals[2] += sum(spread) / len(spread)
    return [t / len(cells) for t in totals]


@pytest.mark.parametrize("ring", ["round", "exact"])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("empty", ["zero", "skip"])
@pytest.mark.parametrize("buckets", [1, 7])
def test_equals_the_plain_computation(ring: str, include: bool, empty: str, buckets: int) -> None:
    grid = (3, 5)
    similarity = (seeded(15, 15, dtype=torch.float64) * 4).round() / 4 + 5  # quarters: many ties
    found = pesi_metrics(similarity, grid, buckets=buckets, ring=ring, include_self=include, empty_bucket=empty)
    expected = plain_metrics(similarity, grid, buckets, ring, include, empty)
    assert [found.undirected, found.directed, found.asymmetry] == pytest.approx(expected, abs=1e-12)
    assert found.directed_map.shape == grid
    assert float(found.directed_map.mean()) == pytest.approx(found.directed)


def test_numbers_of_the_paper() -> None:
    """Rows of Table 5 to the digits printed there; the row of LOOPE is that of the plain Gilbert curve."""
    raster = pesi("loope", context="none", curve="raster")
    assert str(raster) == "M_U 1.9567  M_D 1.4905  A_SU 0.1243"
    assert str(pesi("loope", context="none")) == "M_U 1.9674  M_D 1.2900  A_SU 0.0939"
    assert str(pesi("sincos")) == "M_U 1.9991  M_D 1.5318  A_SU 0.0281"
    from mmpos import evaluation  # the public name

    assert evaluation.pesi is pesi


@pytest.mark.parametrize("name", list_encodings())
def test_every_encoding_is_measured_or_says_why_not(name: str) -> None:
    torch.manual_seed(0)
    if name in ("none", "cpe", "lepe"):
        with pytest.raises(ValueError, match=f"encoding: {name} neither adds vectors to the tokens nor changes"):
            pesi(name, (3, 5), dim=48, num_heads=2)
        return
    found = pesi(name, (3, 5), dim=96, num_heads=2)
    assert 0 <= found.undirected <= 2
    assert 0 <= found.directed <= 2
    assert math.isfinite(found.asymmetry)
    # the kernel differs from place to place, except where tables start at zero
    assert (abs(found.asymmetry) < 1e-9) == (name in ("decomposed_rpe", "irpe"))


def test_each_layer_has_its_own_kernel() -> None:
    torch.manual_seed(0)
    stack = create_encoding("rope_mixed", 32, 2, depth=3)
    found = [pesi(stack, (3, 5), layer=layer).asymmetry for layer in range(3)]
    assert len(set(found)) == 3
    with pytest.raises(ValueError, match="layer: expected 0 to 2, got 3"):
        pesi(stack, (3, 5), layer=3)


def test_other_rules_give_the_other_numbers() -> None:
    exact = pesi("loope", context="none", curve="raster", ring="exact")
    skipped = pesi("loope", context="none", curve="raster", empty_bucket="skip")
    assert exact.undirected == pytest.approx(1.80, abs=0.006)
    assert skipped.directed == pytest.approx(1.92, abs=0.006)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000))
def test_blind_to_turns_of_the_embedding_space_and_to_lengths(seed: int) -> None:
    table = seeded(4, 6, 8, seed=seed, dtype=torch.float64) + 0.5
    turn = torch.linalg.qr(seeded(8, 8, seed=seed + 1, dtype=torch.float64))[0]
    length = seeded(4, 6, 1, seed=seed + 2, dtype=torch.float64).exp()
    first, second = (pesi_metrics(cosine_kernel(t), (4, 6), buckets=8) for t in (table, table @ turn * length))
    for a, b in ((first.undirected, second.undirected), (first.directed, second.directed)):
        assert a == pytest.approx(b, abs=1e-9)
    assert first.asymmetry == pytest.approx(second.asymmetry, rel=1e-6)


def test_a_round_falling_kernel_is_perfect_and_a_rising_one_is_not() -> None:
    cells = Positions.grid(5, 7, dtype=torch.float64).coords[0]
    distance = torch.cdist(cells, cells).round()
    falling = pesi_metrics(torch.exp(-distance / 3), (5, 7))
    assert falling.undirected == 2
    assert falling.asymmetry == pytest.approx(0, abs=1e-12)
    assert pesi_metrics(torch.exp(distance / 3), (5, 7)).undirected == 0
    exact = torch.exp(-torch.cdist(cells, cells) / 3)
    assert pesi_metrics(exact, (5, 7), buckets=60, empty_bucket="skip").directed == pytest.approx(2)


def test_machine_noise_does_not_decide_ties() -> None:
    """Along a raster, cells as far ahead as behind are equally similar; with few directions both fall into one."""
    encoding = create_encoding("loope", 64, 2, context="none", curve="raster").shared["loope"]
    table = encoding.embed(Positions.grid(6, 9, dtype=torch.float64))[0].reshape(6, 9, 64)
    similarity, noise = cosine_kernel(table), seeded(54, 54, dtype=torch.float64) * 1e-15
    clean, noisy = (pesi_metrics(s, (6, 9), buckets=1).directed for s in (similarity, similarity + noise))
    assert clean == noisy
    clean, noisy = (pesi_metrics(s, (6, 9), buckets=1, tie=0.0).directed for s in (similarity, similarity + noise))
    assert clean != noisy


def test_kernel_of_a_rotation_is_the_mean_cosine_of_its_angles() -> None:
    stack = create_encoding("rope_axial", 64, 2)
    positions = Positions.grid(3, 4, num_prefix=1, dtype=torch.float64)
    kernel = attention_kernel(stack, positions, samples=2000)
    cos, sin = (t[0, 0, 1:] for t in stack.prepare(positions)[0].prepared[0].real())
    expected = (cos[:, None] * cos + sin[:, None] * sin).mean(-1)
    assert (kernel - expected).abs().max() < 0.02
    assert torch.allclose(kernel.diagonal(), torch.ones(12).double())
    raw = attention_kernel(stack, positions, samples=500, kernel="logits")
    assert raw.diagonal().mean().item() == pytest.approx(32**0.5, rel=0.05)


def test_kernel_of_a_bias_is_its_exponential() -> None:
    torch.manual_seed(0)
    stack = create_encoding("pape_ri", 16, 2)
    positions = Positions.grid(3, 4, dtype=torch.float64)
    kernel = attention_kernel(stack, positions, samples=8)
    assert torch.allclose(kernel.diagonal(), torch.ones(12).double())
    assert (kernel[0, 1:] < 1).all()
    distance = (positions.coords[0, 0] - positions.coords[0]).square().sum(-1)
    # one rate for all distances: the mean over contents and heads is taken in the logits
    torch.testing.assert_close(kernel[0].log() / distance.clamp_min(1), kernel[0, 1].log() * (distance > 0).double())
    assert pesi(stack, (3, 4)).undirected == 2


def test_trained_stacks_prefixes_and_images() -> None:
    stack = create_encoding("learned", 16, 2, train_grid=(3, 4), num_prefix=1)
    with torch.no_grad():
        stack.shared["learned"].table[1:] = create_encoding("sincos", 16, 2).add_to_tokens(
            torch.zeros(1, 12, 16), Positions.grid(3, 4)
        )[0]
    found, expected = pesi(stack, (3, 4)), pesi("sincos", (3, 4), dim=16, num_heads=2)
    assert found.undirected == pytest.approx(expected.undirected, abs=1e-6)
    assert found.asymmetry == pytest.approx(expected.asymmetry, abs=1e-6)
    assert stack.training
    image = torch.rand(1, 3, 12, 16)
    moved = pesi("loope", (3, 4), dim=16, num_heads=2, patch_size=4, image=image)
    assert moved.undirected != pesi("loope", (3, 4), dim=16, num_heads=2, context="none").undirected


def test_bad_arguments() -> None:
    s = torch.eye(6)
    for options, text in (
        ({"grid": (2, 4)}, "similarity"),
        ({"ring": "square"}, "ring"),
        ({"empty_bucket": "one"}, "empty_bucket"),
        ({"buckets": 0}, "buckets"),
    ):
        with pytest.raises(ValueError, match=text):
            pesi_metrics(s, **{"grid": (2, 3), **options})
    with pytest.raises(ValueError, match="at least two"):
        pesi_metrics(torch.ones(1, 1), (1, 1))
    with pytest.raises(ValueError, match="none neither adds"):
        pesi("none", (2, 3), dim=8, num_heads=2)
    with pytest.raises(ValueError, match="exists already"):
        pesi(create_encoding("sincos", 8, 2), (2, 3), base=100.0)
    with pytest.raises(ValueError, match="kernel"):
        attention_kernel(create_encoding("rope_axial", 8, 2), Positions.grid(2, 3), kernel="exp")
