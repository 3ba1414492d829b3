"""Ground distance, spectral groups and time stamps."""

from __future__ import annotations

import pytest
import torch

from mmpos import Positions, create_encoding
from mmpos.encodings.gsd import resized_gsd, timestamp_positions
from mmpos.functional.sincos import SINCOS_PRESETS, sincos


def build(dim: int = 16, **options: object):
    stack = create_encoding("gsd", dim, 2, **options)
    return stack, stack.shared["gsd"]


def test_a_scale_per_image_on_a_rectangle() -> None:
    _, encoding = build(reference=2.0)
    positions = Positions.grid(3, 5, dtype=torch.float64)
    out = encoding.embed(positions, torch.tensor([2.0, 1.0, 5.0]))
    column = torch.arange(5).double()
    frequencies = 10000.0 ** (-torch.arange(4).double() / 4)
    # first half column, second half row, each [sin, cos]
    for image, ratio in enumerate((1.0, 0.5, 2.5)):
        row_one = out[image, 5:10]
        torch.testing.assert_close(row_one[:, :4], (column[:, None] * ratio * frequencies).sin())
        torch.testing.assert_close(row_one[:, 12:], (ratio * frequencies).cos().expand(5, -1))
    torch.testing.assert_close(encoding.embed(positions), out[:1])


def test_scaling_the_places_is_the_same() -> None:
    stack, encoding = build()
    positions, gsd = Positions.grid(3, 5, num_prefix=1), torch.tensor([0.3, 2.5])
    x = torch.ones(2, 16, 16)
    moved = positions.with_coords(positions.coords * gsd[:, None, None])
    out = stack.add_to_tokens(x, moved)
    torch.testing.assert_close(out, encoding.add_to_tokens(x, positions, gsd))
    assert torch.equal(out[:, 0], x[:, 0])


def test_a_resized_image_covers_the_same_ground() -> None:
    _, encoding = build()
    assert resized_gsd(0.5, 448, 224) == 1.0
    whole = encoding.embed(Positions.grid(4, 8, dtype=torch.float64), resized_gsd(0.7, 64, 64))
    half = encoding.embed(Positions.grid(2, 4, dtype=torch.float64), resized_gsd(0.7, 64, 32))
    torch.testing.assert_close(whole[0].unflatten(0, (4, 8))[::2, ::2].flatten(0, 1), half[0])


def test_spectral_groups_are_joined_channel_by_channel() -> None:
    _, encoding = build(24, axes=3, extra_dims=(8,))
    out = encoding.embed(Positions.grid(2, 3, 4)).unflatten(1, (2, 12))[0]
    torch.testing.assert_close(out[0, :, :16], out[1, :, :16])
    torch.testing.assert_close(out[:, :, :16][0], sincos(Positions.grid(3, 4).coords[0], 16, **SINCOS_PRESETS["mae"]))
    torch.testing.assert_close(out[1, :, 16:], sincos(torch.ones(12, 1), 8))


def test_time_stamps_with_any_number_of_frames() -> None:
    _, encoding = build(36, axes=5, extra_dims=(4, 4, 4))
    stamps = torch.tensor([[[15, 5, 10], [16, 0, 23]], [[3, 11, 0], [4, 1, 2]]])
    positions = timestamp_positions(stamps, 2, 3, num_prefix=1)
    assert positions.num_tokens == 13
    out = encoding.embed(positions).unflatten(1, (2, 6))
    for sample in range(2):
        for frame in range(2):
            for axis in range(3):
                part = out[sample, frame, :, 24 + 4 * axis : 28 + 4 * axis]
                torch.testing.assert_close(
                    part, sincos(stamps[sample, frame, axis].float().reshape(1, 1), 4).expand(6, -1)
                )
    torch.testing.assert_close(out[0, 0, :, :24], out[1, 1, :, :24])


def test_rescaling_leaves_the_extra_axes_alone() -> None:
    stack, encoding = build(24, axes=3, extra_dims=(8,), train_grid=(2, 3, 4))
    small = encoding.embed(Positions.grid(2, 3, 4))
    stack.set_resolution("rescaled")
    large = encoding.embed(Positions.grid(2, 6, 12)).unflatten(1, (2, 6, 12))[:, :, ::2, ::3].flatten(1, 3)
    torch.testing.assert_close(large, small)


def test_large_products_keep_their_phase_in_half_precision_tokens() -> None:
    stack, encoding = build()
    positions = Positions.grid(14, 14)
    x = torch.zeros(1, 196, 16, dtype=torch.bfloat16)
    out = encoding.add_to_tokens(x, positions, torch.tensor([37.0]))
    exact = encoding.embed(Positions.grid(14, 14, dtype=torch.float64), torch.tensor([37.0]))
    assert (out.double() - exact).abs().max() < 2**-8


def test_bad_arguments() -> None:
    for options, text in (
        ({"axes": 3, "extra_dims": (4, 4)}, "extra_dims"),
        ({"axes": 3, "extra_dims": (5,)}, "extra_dims"),
        ({"axes": 3, "extra_dims": (16,)}, "extra_dims"),
        ({"reference": 0.0}, "reference"),
    ):
        with pytest.raises(ValueError, match=text):
            build(**options)
    with pytest.raises(ValueError, match="gsd"):
        build()[1].embed(Positions.grid(2, 3), torch.ones(2, 2))
    with pytest.raises(ValueError, match="timestamps"):
        timestamp_positions(torch.zeros(2, 3), 2, 2)
    with pytest.raises(ValueError, match="new_size"):
        resized_gsd(1.0, 224, 0)
