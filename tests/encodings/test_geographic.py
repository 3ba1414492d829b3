"""Location encoders as encodings of tokens."""

from __future__ import annotations

import math

import pytest
import torch

from mmpos import Positions, create_encoding
from mmpos.checkpoints import geoclip_frequencies, siren_layers
from mmpos.encodings.spherical import Siren
from mmpos.functional.geographic import equal_earth, spherical_harmonics

PLACES = torch.tensor([[12.5, 55.7], [-122.4, 37.8], [179.9, -89.0]])


def test_siren_layers_and_ranges() -> None:
    siren = Siren(9, 50, 3, 4, w0_first=20.0, w0=2.0)
    x = torch.randn(5, 9)
    h = torch.sin(20 * siren.layers[0](x))
    h = torch.sin(2 * siren.layers[2](torch.sin(2 * siren.layers[1](h))))
    torch.testing.assert_close(siren(x), siren.last(h))
    for layer, bound in zip([*siren.layers, siren.last], [1 / 9] + [math.sqrt(6 / 50) / 2] * 3, strict=True):
        assert 0.9 * bound < layer.weight.abs().max() <= bound
    with pytest.raises(ValueError, match="layers"):
        Siren(9, 5, 0, 4)


def test_spherical_adds_the_siren_of_the_harmonics() -> None:
    torch.manual_seed(0)
    stack = create_encoding("spherical", 12, 2, degree=6, hidden=8)
    encoding = stack.shared["spherical"]
    mask = torch.tensor([[True, True, True], [True, True, False]])
    positions = Positions.points(PLACES, num_prefix=1, mask=mask)
    out = stack.add_to_tokens(torch.zeros(2, 4, 12), positions)
    torch.testing.assert_close(out[0, 1:], encoding.siren(spherical_harmonics(PLACES, 6)))
    torch.testing.assert_close(out[1, 1:3], out[0, 1:3])
    assert not out[:, 0].any()
    # no seam: the two sides of the date line are one place
    sides = encoding.encode(torch.tensor([[180.0, 10.0], [-180.0, 10.0]]))
    torch.testing.assert_close(sides[0], sides[1])


def test_geoclip_sums_its_scales_and_puts_latitude_first() -> None:
    torch.manual_seed(0)
    stack = create_encoding("geoclip", 12, 2, sigmas=(1, 4), features=5, hidden=8, layers=2)
    encoding = stack.shared["geoclip"]
    latlon = PLACES.flip(-1)
    total = 0
    for b, capsule in zip(encoding.frequencies, encoding.capsules, strict=True):
        angle = 2 * math.pi * equal_earth(latlon) @ b.T
        h = torch.cat([angle.cos(), angle.sin()], -1)
        total = total + capsule[2](torch.relu(capsule[1](torch.relu(capsule[0](h)))))
    out = stack.add_to_tokens(torch.zeros(1, 4, 12), Positions.points(latlon, num_prefix=1))
    torch.testing.assert_close(out[0, 1:], total)
    assert not out[:, 0].any()


def test_geoclip_frequencies_are_saved_fixed_and_of_the_right_spread() -> None:
    stack = create_encoding("geoclip", 8, 2, features=4000, hidden=4)
    encoding = stack.shared["geoclip"]
    assert encoding.frequencies.std((1, 2)).tolist() == pytest.approx([1, 16, 256], rel=0.05)
    assert "shared.geoclip.frequencies" in stack.state_dict()
    assert not encoding.frequencies.requires_grad
    assert stack.bfloat16().shared["geoclip"].frequencies.dtype == torch.float32
    assert stack.double().shared["geoclip"].frequencies.dtype == torch.float64


def test_reference_weights() -> None:
    ours = siren_layers({"layers.0.weight": torch.ones(2, 3), "last_layer.bias": torch.zeros(1)})
    assert set(ours) == {"layers.0.weight", "last.bias"}
    with pytest.raises(ValueError, match="net.0"):
        siren_layers({"net.0.weight": torch.ones(1)})
    weights = {"b_sigma1": torch.zeros(5, 2), "b_sigma16": torch.ones(5, 2)}
    assert geoclip_frequencies(weights, (1, 16)).shape == (2, 5, 2)
    with pytest.raises(ValueError, match="b_sigma256"):
        geoclip_frequencies(weights, (1, 256))


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="degree"):
        create_encoding("spherical", 8, 2, degree=0)
    with pytest.raises(ValueError, match="sigmas"):
        create_encoding("geoclip", 8, 2, sigmas=(1, -1))
    with pytest.raises(ValueError, match="layers"):
        create_encoding("geoclip", 8, 2, layers=0)
    for name in ("spherical", "geoclip"):
        with pytest.raises(ValueError, match="axes"):
            create_encoding(name, 8, 2, axes=3)
