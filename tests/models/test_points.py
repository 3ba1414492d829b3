"""Point transformer: what it sees of the places of points, padding, and which encodings it takes."""

from __future__ import annotations

import pytest
import torch

from mmpos import create_encoding, list_encodings
from mmpos.encodings import encoding_class
from mmpos.functional.points import random_rotations
from mmpos.models import create_point_transformer
from mmpos.testing import randomise

SMALL = {"depth": 2, "num_groups": 9, "group_part": 0.2, "field": 6, "num_classes": 5}
REFUSED = {
    "abs_win",
    "cpe",
    "decomposed_rpe",
    "geoclip",
    "lepe",
    "lookhere",
    "loope",
    "seqpe",
    "spherical",
    "swin_rpb",
}


def clouds(batch: int = 2, points: int = 37, seed: int = 0) -> torch.Tensor:
    return 1.5 * torch.randn(batch, points, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moved(points: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """Turned and shifted rigidly."""
    generator = torch.Generator().manual_seed(seed)
    turn = random_rotations(torch.rand(len(points), 3, generator=generator, dtype=torch.float64))
    return points @ turn.mT + torch.randn(len(points), 1, 3, generator=generator, dtype=torch.float64)


def model_of(encoding, **options):
    torch.manual_seed(3)
    model = create_point_transformer(encoding=encoding, **{**SMALL, **options}).double().eval()
    randomise(model.position_encoding)
    return model


def change(model, points, other):
    with torch.no_grad():
        before, after = model(points), model(other)
    return float((after - before).abs().max() / before.std())


@pytest.mark.parametrize("encoding", ["pape_ri", "none"])
def test_no_rigid_motion_changes_a_model_that_sees_distances_alone(encoding):
    points = clouds()
    model = model_of(encoding)
    assert change(model, points, moved(points)) < 1e-10
    assert change(model, points, points * torch.tensor([1.0, 1.0, -1.0])) < 1e-10  # nor does a mirror


@pytest.mark.parametrize("encoding", ["rope_3d", "pape", "rope_mixed"])
def test_a_rotation_changes_a_model_that_sees_directions_and_a_shift_does_not(encoding):
    points = clouds()
    model = model_of(encoding)
    assert change(model, points, moved(points)) > 1e-4
    assert change(model, points, points + torch.tensor([3.0, -4.0, 0.5])) < 1e-10


def test_pape_ri_sees_where_groups_are():
    """Otherwise the invariance above would be that of a model without positions."""
    points = clouds()
    model, without = model_of("pape_ri"), model_of("none")
    parts = [points[:, :18], points[:, 18:]]
    near = torch.cat([parts[0] * 0.1, parts[1] * 0.1 + torch.tensor([3.0, 0.0, 0.0])], dim=1)
    far = torch.cat([parts[0] * 0.1, parts[1] * 0.1 + torch.tensor([6.0, 0.0, 0.0])], dim=1)
    # two clusters further apart: the same groups with the same insides
    assert change(without, near, far) < 1e-10
    assert change(model, near, far) > 1e-4


def test_relative_tokens_see_directions_and_no_place():
    points = clouds()
    model = model_of("none", local="relative")
    assert change(model, points, points + torch.tensor([3.0, -4.0, 0.5])) < 1e-10
    assert change(model, points, moved(points)) > 1e-3


def test_absolute_encodings_see_the_place():
    points = clouds()
    assert change(model_of("sincos"), points, points + torch.tensor([1.0, -1.0, 0.5])) > 1e-3


@pytest.mark.parametrize("encoding", ["pape", "pape_ri", "rope_3d", "sincos", "irpe", "none"])
def test_padding_changes_nothing(encoding):
    points = clouds()
    model = model_of(encoding)
    mask = torch.arange(45).expand(2, -1) < 37
    with torch.no_grad():
        plain = model(points)
        for filling in (0.0, 50.0, float("nan")):
            filled = torch.cat([points, torch.full((2, 8, 3), filling, dtype=torch.float64)], dim=1)
            assert torch.allclose(plain, model(filled, mask=mask), atol=1e-10)


@pytest.mark.parametrize("encoding", ["pape_ri", "rope_3d"])
def test_clouds_of_a_batch_may_differ_in_size_and_be_smaller_than_the_number_of_groups(encoding):
    points = clouds(3, 37)
    sizes = [37, 20, 5]  # nine groups
    model = model_of(encoding)
    mask = torch.arange(37) < torch.tensor(sizes)[:, None]
    with torch.no_grad():
        together = model(points, mask=mask)
        apart = torch.cat([model(cloud[None, :size]) for cloud, size in zip(points, sizes, strict=True)])
    assert torch.allclose(together, apart, atol=1e-10)


def test_the_order_of_points_does_not_matter():
    points = clouds()
    order = torch.randperm(37, generator=torch.Generator().manual_seed(0))
    assert change(model_of("pape"), points, points[:, order]) < 1e-10


def test_features_of_points():
    points, colours = clouds(), clouds(seed=5)[..., :2]
    model = model_of("pape_ri", features=2)
    with torch.no_grad():
        joined = model(torch.cat([points, colours], dim=-1))
        assert torch.equal(joined, model(points, colours))
        assert (joined - model(points, colours.flip(1))).abs().max() > 1e-3
    with pytest.raises(ValueError, match=r"features: expected \(B, N, 2\)"):
        model(points)
    with pytest.raises(ValueError, match=r"features: expected \(B, N, 0\).*give features=2"):
        model_of("none")(points, colours)


@pytest.mark.parametrize("encoding", sorted(set(list_encodings()) - REFUSED))
def test_every_encoding_of_real_places_in_three_axes_works(encoding):
    torch.manual_seed(0)
    model = create_point_transformer(encoding=encoding, **SMALL)
    randomise(model.position_encoding)
    points = clouds().float()
    out = model(points)
    assert out.shape == (2, 5)
    assert bool(out.isfinite().all())
    out.square().sum().backward()
    gradients = [p.grad for p in model.position_encoding.parameters() if p.requires_grad]
    assert all(g is None or bool(g.isfinite().all()) for g in gradients)
    if encoding != "none":
        bare = create_point_transformer(encoding="none", **SMALL)
        bare.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("position_encoding.")})
        with torch.no_grad():
            assert (out - bare(points)).abs().max() > 1e-5


@pytest.mark.parametrize("encoding", sorted(REFUSED))
def test_others_are_refused_with_the_reason(encoding):
    facts = encoding_class(encoding).facts
    reasons = {
        "works on a raster only": facts.needs_grid,
        "reads whole numbers only": not facts.fractional,
        "has 2 axes": facts.axes[1] < 3,
    }
    with pytest.raises(ValueError, match=f"encoding: {encoding}.*real places in 3 axes") as error:
        create_point_transformer(encoding=encoding)
    for reason, applies in reasons.items():
        assert applies <= (reason in str(error.value))
    with pytest.raises(ValueError, match=f"encoding: {encoding}"):
        create_point_transformer(encoding=["none", (encoding, {})])


def test_parameters_of_the_encoding_are_found_and_do_not_decay():
    from mmpos.training.optim import no_weight_decay_names

    model = create_point_transformer(encoding="pape", **SMALL)
    own = create_encoding("pape", 96, 4, 2, axes=3)
    names = {name for name, _ in model.named_parameters() if name.startswith("position_encoding.")}
    assert names == {f"position_encoding.{name}" for name, _ in own.named_parameters()}
    assert no_weight_decay_names(model) == {f"position_encoding.layers.{i}.pape.axes_map" for i in (0, 1)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"points": torch.zeros(2, 5, 2)}, "points: expected real numbers"),
        ({"points": torch.zeros(5, 3)}, "points: expected real numbers"),
        ({"points": torch.zeros(2, 5, 3, dtype=torch.long)}, "points: expected real numbers"),
        ({"points": torch.zeros(2, 5, 3), "mask": torch.ones(2, 5)}, "mask: expected bool"),
        ({"points": torch.zeros(2, 5, 3), "mask": torch.zeros(2, 5, dtype=torch.bool)}, "at least one real point"),
    ],
)
def test_wrong_inputs_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        create_point_transformer(encoding="none", **SMALL)(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 0}, "num_groups"),
        ({"group_part": 0.0}, "group_part: expected a part"),
        ({"local": "angles"}, "local: expected one of"),
        ({"field": 0}, "field: expected"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        create_point_transformer(**{**SMALL, **options})
