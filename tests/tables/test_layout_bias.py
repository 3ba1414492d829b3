"""Layout biases."""

from __future__ import annotations

import math

import pytest
import torch

from mmpos.functional.sincos import sincos
from mmpos.tables import BrosBias, LayoutBias, UdopBias, bros_bias, t5_bucket
from mmpos.testing import assert_close, seeded


def boxes(seed: int = 0, count: int = 7) -> torch.Tensor:
    return torch.randint(0, 900, (2, count, 4), generator=torch.Generator().manual_seed(seed))


def positions(count: int = 7) -> torch.Tensor:
    return torch.arange(count).expand(2, count)


def test_buckets_are_those_of_the_formula() -> None:
    for buckets, longest in ((32, 128), (64, 256), (8, 20)):
        quarter = buckets // 4
        for offset in range(-300, 301):
            size = abs(offset)
            if size < quarter:
                expected = size
            else:
                step = math.log(size / quarter) / math.log(longest / quarter) * quarter
                if abs(step - round(step)) < 1e-5:  # float32 may fall on either side
                    continue
                expected = min(quarter + int(step), 2 * quarter - 1)
            assert int(t5_bucket(torch.tensor(offset), buckets, longest)) == expected + (buckets // 2) * (offset > 0)


def test_bucket_errors() -> None:
    with pytest.raises(ValueError, match="offset: expected integers"):
        t5_bucket(torch.zeros(2), 32, 128)
    with pytest.raises(ValueError, match="num_buckets"):
        t5_bucket(torch.zeros(2).long(), 30, 128)
    with pytest.raises(ValueError, match="max_distance"):
        t5_bucket(torch.zeros(2).long(), 32, 8)


def test_differences_only() -> None:
    module = LayoutBias(3)
    assert torch.equal(module(positions() + 40, boxes() + 60), module(positions(), boxes()))


@pytest.mark.parametrize(("edge", "table"), [(0, "left"), (1, None), (2, None), (3, "bottom")])
def test_which_edge_each_table_reads(edge: int, table: str | None) -> None:
    moved = boxes()
    moved[:, 2, edge] += 90
    for name in ("left", "bottom"):
        module = LayoutBias(3)
        with torch.no_grad():
            for other in {"text", "left", "bottom"} - {name}:
                getattr(module, other).zero_()
        same = torch.equal(module(positions(), moved), module(positions(), boxes()))
        assert same == (name != table)


def test_scale_of_v3_and_zero_tables() -> None:
    two, three = LayoutBias(3), LayoutBias(3, head_dim=16)
    three.load_state_dict(two.state_dict())
    assert_close(three(positions(), boxes()) * 4, two(positions(), boxes()))
    for parameter in two.parameters():
        torch.nn.init.zeros_(parameter)
    assert float(two(positions(), boxes()).detach().abs().max()) == 0


def test_tables_train() -> None:
    module = LayoutBias(3, head_dim=16)
    module(positions(), boxes()).square().sum().backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in module.parameters())  # type: ignore[union-attr]


def test_udop_reads_centres() -> None:
    module = UdopBias(2)
    page = boxes() / 1000
    assert module(positions(), page).shape == (2, 2, 7, 7)
    grown = page + torch.tensor([-0.05, -0.05, 0.05, 0.05])
    differ = module(positions(), grown) - module(positions(), page)
    assert float((differ.abs() > 1e-6).float().mean()) < 0.05  # rounding of a centre on the edge of a bucket
    moved = page.clone()
    moved[:, 2, 3] += 0.2
    assert not torch.allclose(module(positions(), moved), module(positions(), page), atol=1e-3)
    with pytest.raises(ValueError, match="boxes: expected parts"):
        module(positions(), boxes())


def test_bros_is_the_term_of_all_pairs() -> None:
    q = seeded(2, 3, 7, 10, dtype=torch.float64)
    corners = boxes()[..., [0, 1, 2]].double() / 50
    weight = seeded(10, 3 * 4, seed=1, dtype=torch.float64)
    pairs = sincos(corners[:, None] - corners[:, :, None], 12)
    expected = torch.einsum("bhid,df,bijf->bhij", q, weight, pairs)
    assert_close(bros_bias(q, corners, weight), expected, terms=2**12)
    module = BrosBias(10).double()
    page = boxes().double() / 1000
    assert_close(module(q, page + 0.3), module(q, page), terms=2**16)
    with pytest.raises(ValueError, match="projection"):
        bros_bias(q, corners, weight[:, :9])


def test_box_errors() -> None:
    with pytest.raises(ValueError, match="positions, boxes"):
        LayoutBias(2)(positions(), boxes()[..., :2])
