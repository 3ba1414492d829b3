import pytest
import torch

from mmpos import create_encoding, list_encodings
from mmpos.encodings import Facts, PositionEncoding, encoding_class
from mmpos.plotting import plot_encoding, probe_encoding

pytest.importorskip("matplotlib")

GRID = (3, 5)


def stack(name, grid=GRID, dim=24, heads=2, **options):
    return create_encoding(name, dim, heads, train_grid=grid, **options)


def test_tokens_show_the_cosine_with_the_reference():
    built = stack("sincos")
    (panel,) = probe_encoding(built, GRID, reference=(1, 4))
    from mmpos import Positions

    table = built.add_to_tokens(torch.zeros(1, 15, 24), Positions.grid(*GRID, train_grid=GRID))[0]
    expected = torch.nn.functional.cosine_similarity(table[9][None], table).reshape(GRID)
    assert torch.allclose(panel.values, expected, atol=1e-6)
    assert panel.reference == (1, 4)
    assert panel.values[1, 4] == pytest.approx(1.0)


def test_rotations_show_the_trace_by_offset():
    # E[q R(offset) k] / E[q k] of a rotation is the mean cosine of its angles
    built = stack("rope_axial", theta=100.0)
    (panel,) = probe_encoding(built, GRID)
    freqs = 100.0 ** (-torch.arange(3) / 3)
    row, column = torch.meshgrid(torch.arange(-2, 3.0), torch.arange(-4, 5.0), indexing="ij")
    expected = (torch.cos(row[..., None] * freqs).sum(-1) + torch.cos(column[..., None] * freqs).sum(-1)) / 6
    assert panel.values.shape == (5, 9)
    assert panel.reference == (2, 4)
    assert panel.offsets
    assert torch.allclose(panel.values, expected, atol=1e-5)


def test_heads_that_differ_get_a_panel_each():
    titles = [panel.title for panel in probe_encoding(stack("rope_mixed"), GRID)]
    assert titles == ["head 0", "head 1"]
    assert [panel.title for panel in probe_encoding(stack("rope_axial"), GRID)] == ["every head"]


def test_a_layer_of_its_own():
    built = stack("rope_mixed", depth=2)
    first, second = (probe_encoding(built, GRID, layer=layer)[0].values for layer in (0, 1))
    assert not torch.allclose(first, second)
    with pytest.raises(ValueError, match="layer: expected 0 to 1, got 2"):
        probe_encoding(built, GRID, layer=2)


class Distance(PositionEncoding):
    """A bias of minus the row distance, for the hooks below."""

    facts = Facts(title="distance", source="test", plugs_into=("bias",))
    name = "distance"

    def prepare(self, positions):
        return positions

    def logit_bias(self, q, k, prepared):
        row = prepared.coords[..., 0]
        bias = torch.nn.functional.pad(-(row[:, :, None] - row[:, None]).abs(), (prepared.num_prefix, 0) * 2)
        return bias[:, None] * torch.tensor([1.0, 2.0])[:, None, None]


class OwnAttention(Distance):
    """The same bias inside its own attention."""

    name = "own_attention"

    def logit_bias(self, q, k, prepared):
        return None

    def attend(self, q, k, v, prepared, *, bias, scale, dropout_p, plain):
        return torch.softmax(q @ k.mT * scale + 50 * Distance.logit_bias(self, q, k, prepared), -1) @ v


def custom(cls, **options):
    from mmpos.encodings import EncodingStack

    return EncodingStack([cls.name], {cls.name: cls(24, 2, train_grid=GRID, **options)}, [{}])


@pytest.fixture
def known(monkeypatch):
    import mmpos.encodings.registry as registry

    for cls in (Distance, OwnAttention, OwnOutput):
        monkeypatch.setitem(registry._REGISTRY, cls.name, cls)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("num_prefix", [0, 2])
def test_biases_show_the_row_of_the_reference(num_prefix):
    panels = probe_encoding(custom(Distance, num_prefix=num_prefix), GRID, reference=(0, 1))
    expected = -torch.arange(3.0)[:, None].expand(3, 5)
    assert [panel.title for panel in panels] == ["head 0", "head 1"]
    assert torch.allclose(panels[0].values, expected)
    assert torch.allclose(panels[1].values, 2 * expected)


@pytest.mark.usefixtures("known")
def test_own_attention_shows_what_it_gains():
    panels = probe_encoding(custom(OwnAttention), GRID, reference=(2, 0))
    # all weight is in the last row: it gains, the others lose, and the sum of the changes is zero
    for panel in panels:
        assert panel.values[2].sum() > 1
        assert (panel.values[:2] < 0).all()
        assert panel.values.sum().abs() < 1e-3


class OwnOutput(Distance):
    """Adds twice the value of the token to the right."""

    name = "own_output"

    def logit_bias(self, q, k, prepared):
        return None

    def transform_output(self, out, v, prepared):
        return out + 2 * v.roll(-1, -2)


@pytest.mark.usefixtures("known")
def test_a_change_of_the_output_shows_its_reach():
    (panel,) = probe_encoding(custom(OwnOutput), GRID, reference=(1, 2))
    expected = torch.zeros(GRID)
    expected[1, 3] = 2
    assert torch.allclose(panel.values, expected, atol=1e-5)


@pytest.mark.usefixtures("known")
def test_maps_that_say_nothing_are_left_out_next_to_others():
    from mmpos.encodings import EncodingStack

    one, two = Distance(24, 2, train_grid=GRID), encoding_class("none")(24, 2, train_grid=GRID)
    panels = probe_encoding(EncodingStack(["distance", "none"], {"distance": one, "none": two}, [{}]), GRID)
    assert {panel.group for panel in panels} == {"bias of the reference query"}


@pytest.mark.usefixtures("known")
def test_an_encoding_registered_by_a_user_is_drawn(tmp_path):
    plot_encoding("distance", GRID, tmp_path / "x.png", dim=24, num_heads=2)
    assert (tmp_path / "x.png").stat().st_size > 5000


def test_nothing_to_show(tmp_path):
    assert probe_encoding(stack("none"), GRID) == []
    plot_encoding("none", GRID, tmp_path / "none.png")
    assert (tmp_path / "none.png").is_file()


@pytest.mark.parametrize("name", list_encodings())
def test_every_encoding_has_a_picture(name, tmp_path):
    low, high = encoding_class(name).facts.axes
    grid = (4, 6) if low <= 2 <= high else (4,) * low
    figure = plot_encoding(name, grid, tmp_path / "x.png")
    axes = [axis for axis in figure.axes if axis.get_images()]
    assert (tmp_path / "x.png").stat().st_size > 3000
    for axis in axes:
        values = axis.get_images()[0].get_array()
        assert values.size > 1
        assert axis.get_xlabel()
    assert axes or name == "none"


@pytest.mark.parametrize("grid", [(6,), (2, 3, 4)])
def test_other_numbers_of_axes(grid):
    (panel,) = probe_encoding(stack("rope_axial", grid=grid, dim=48), grid)[:1]
    assert panel.values.shape == ((1, 11) if len(grid) == 1 else (5, 7))
    figure = plot_encoding("sincos", grid, dim=48, num_heads=2)
    assert figure.axes


def test_initial_parameters_are_seeded_and_leave_the_global_state(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = plot_encoding("rope_mixed", GRID, seed=1)
    assert torch.equal(torch.rand(1), expected)
    second, other = plot_encoding("rope_mixed", GRID, seed=1), plot_encoding("rope_mixed", GRID, seed=2)
    image = lambda figure: figure.axes[0].get_images()[0].get_array()  # noqa: E731
    assert (image(first) == image(second)).all()
    assert not (image(first) == image(other)).all()


def test_training_mode_and_parameters_stay():
    built = stack("rope_mixed").train()
    before = built.layers[0]["rope_mixed"].freqs.clone()
    probe_encoding(built, GRID)
    assert built.training
    assert torch.equal(before, built.layers[0]["rope_mixed"].freqs)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: plot_encoding("rope_mixde", GRID), "did you mean 'rope_mixed'"),
        (
            lambda: plot_encoding("rope_axial", GRID, reference=(3, 0)),
            r"reference: expected a cell of the grid \(3, 5\)",
        ),
        (lambda: plot_encoding("rope_axial", (2,) * 9), "grid: rope_axial has 1 to"),
        (lambda: plot_encoding(stack("none"), GRID, theta=3), "the encoding is built already"),
    ],
)
def test_bad_requests(call, match):
    with pytest.raises(ValueError, match=match):
        call()
