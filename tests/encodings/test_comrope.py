"""ComRoPE-LD and -AP: a commuting group, its closed forms, folding, the training noise and the rotated prefix."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mmpos import EncodingStack, Positions, attend, create_encoding
from mmpos.checkpoints import comrope_layer, comrope_layers
from mmpos.encodings._comrope import ComRopeNoise
from mmpos.functional.rotary import Rotation
from mmpos.testing import assert_close, encodings_of, qkv, scores, seeded

METHODS = ("comrope_ld", "comrope_ap")
both = pytest.mark.parametrize("name", METHODS)


def make(name: str, head_dim: int = 24, axes: int = 2, depth: int = 1, **options: Any) -> EncodingStack:
    torch.manual_seed(3)
    return create_encoding(name, 2 * head_dim, 2, depth, axes=axes, **options)


def only(stack: EncodingStack) -> Any:
    return encodings_of(stack)[0]


def table(stack: EncodingStack, positions: Positions, q: Tensor, k: Tensor) -> Tensor:
    with torch.no_grad():
        return scores(stack, positions, q, k)


# -- the group --------------------------------------------------------------------------------------------------------


@both
@settings(max_examples=15, deadline=None, derandomize=True)
@given(axes=st.integers(1, 4), block=st.sampled_from([2, 3, 4]), seed=st.integers(0, 99))
def test_group_depends_on_differences_only(name: str, axes: int, block: int, seed: int) -> None:
    encoding = only(make(name, head_dim=12 * block, axes=axes, block_size=block, coordinates="index").double())
    r, s = seeded(2, 1, 5, axes, seed=seed, dtype=torch.float64).unbind(0)
    at_r, at_s, difference = (encoding.blocks(c).detach() for c in (r, s, s - r))
    eye = torch.eye(block, dtype=torch.float64)
    assert (at_r.mT @ at_s - difference).abs().max() < 1e-11
    assert (at_r.mT @ at_r - eye).abs().max() < 1e-12
    assert (torch.linalg.det(at_r) - 1).abs().max() < 1e-11
    assert (encoding.blocks(0 * r) - eye).abs().max() < 1e-12
    generators = encoding.directions()[..., None, None] * encoding.skew()
    for a in range(axes):
        for b in range(a):
            assert (generators[a] @ generators[b] - generators[b] @ generators[a]).abs().max() < 1e-13


@both
def test_rotating_only_the_keys_is_enough(name: str) -> None:
    stack = make(name, head_dim=16, block_size=4, coordinates="index").double()
    encoding = only(stack)
    coords = seeded(1, 6, 2, dtype=torch.float64)
    q, k, _ = qkv(2, 2, 6, 16, dtype=torch.float64)
    logits = scores(stack, Positions.points(coords), q, k) * 16**0.5
    for query in range(6):
        blocks = encoding.blocks(coords - coords[:, query : query + 1])
        turned = (blocks @ k.unflatten(-1, (4, 4))[..., None])[..., 0].flatten(-2)
        assert_close((q[:, :, query : query + 1] * turned).sum(-1), logits[:, :, query], terms=16)


@both
def test_symmetric_matrices_do_nothing(name: str) -> None:
    stack = make(name, block_size=4)
    matrices = only(stack).generators
    with torch.no_grad():
        matrices.copy_(matrices + matrices.mT.clone())
    positions = Positions.grid(3, 5, num_prefix=1)
    q, k, _ = qkv(2, 2, 16, 24)
    assert_close(scores(stack, positions, q, k), q @ k.mT * 24**-0.5)
    assert_close(table(stack, positions, q, k), q @ k.mT * 24**-0.5)


def test_linear_start_at_the_identity_still_trains() -> None:
    stack = make("comrope_ld", block_size=4, init_std=0.0)
    q, k, _ = qkv(1, 2, 15, 24)
    logits = scores(stack, Positions.grid(3, 5), q, k)
    assert_close(logits, q @ k.mT * 24**-0.5)
    (logits * seeded(*logits.shape, seed=5)).sum().backward()
    assert only(stack).generators.grad.abs().max() > 1e-3


# -- other methods with these parameters ------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_axis_partition_of_size_two_is_axial(axes: int) -> None:
    """Axes alternate block by block, which is the formula of the RoPE paper."""
    stack = make("comrope_ap", head_dim=24, axes=axes, block_size=2, coordinates="index", prefix_position=None)
    axial = create_encoding(
        "rope_axial", 48, 2, axes=axes, theta=7.0, allocation="alternating", axis_order="ij", coordinates="index"
    )
    ladder = encodings_of(axial)[0].frequencies(None)
    with torch.no_grad():
        only(stack).generators.zero_()
        only(stack).generators[..., 1, 0] = ladder.repeat_interleave(axes)
    positions = Positions.grid(*(3, 5, 2)[:axes], num_prefix=2)
    q, k, _ = qkv(2, 2, positions.num_tokens, 24)
    assert_close(scores(stack, positions, q, k), scores(axial, positions, q, k))


def test_linear_of_size_two_is_mixed_with_rank_one_frequencies() -> None:
    stack = make("comrope_ld", head_dim=24, block_size=2, coordinates="index", prefix_position=None)
    mixed = create_encoding("rope_mixed", 48, 2)
    speed = only(stack).skew()[..., 1, 0]
    with torch.no_grad():
        encodings_of(mixed)[0].freqs.copy_(only(stack).scales * speed)
    positions = Positions.grid(3, 5, num_prefix=1)
    q, k, _ = qkv(2, 2, 16, 24)
    assert isinstance(stack.prepare(positions)[0].prepared[0], Rotation)
    assert_close(scores(stack, positions, q, k), scores(mixed, positions, q, k))


# -- evaluation and folding -------------------------------------------------------------------------------------------


def attention(stack: EncodingStack, qkv_layer: nn.Linear, x: Tensor, positions: Positions) -> Tensor:
    q, k, v = qkv_layer(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    return attend(q, k, v, stack.prepare(positions)[0])


@both
@pytest.mark.parametrize("block", [2, 3, 4, 6])
def test_evaluation_and_folding_give_the_outputs_of_training(name: str, block: int) -> None:
    stack = make(name, head_dim=24, block_size=block)
    torch.manual_seed(0)
    fused = nn.Linear(48, 144)
    x = seeded(2, 17, 48)
    positions = Positions.grid(3, 5, num_prefix=2)
    trained = attention(stack, fused, x, positions).detach()
    prepared = stack.prepare(positions)[0].prepared[0]
    assert isinstance(prepared, Rotation) == (block == 2)
    with torch.no_grad():
        assert isinstance(stack.prepare(positions)[0].prepared[0], Rotation)
        assert_close(attention(stack, fused, x, positions), trained, terms=4096)
    q, k, v = nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 48)
    for part, layer in enumerate((q, k, v)):
        layer.load_state_dict({key: value.chunk(3)[part] for key, value in fused.state_dict().items()})
    split = copy.deepcopy(stack)
    only(split).fold_(q, k)
    values = fused.weight[96:].detach().clone()
    only(stack).fold_(fused)
    assert torch.equal(fused.weight[96:], values), "values are not touched"
    folded = stack.prepare(positions)[0].prepared[0]
    assert isinstance(folded, Rotation)
    assert folded.basis is None
    assert (attention(stack, fused, x, positions) - trained).abs().max() < 1e-5
    joined = nn.Linear(48, 144)
    joined.load_state_dict({key: torch.cat([p.state_dict()[key] for p in (q, k, v)]) for key in ("weight", "bias")})
    assert (attention(split, joined, x, positions) - trained).abs().max() < 1e-5


@both
def test_folded_weights_are_saved_and_frozen(name: str) -> None:
    stack = make(name, block_size=4)
    fused = nn.Linear(48, 144)
    only(stack).fold_(fused)
    assert not any(parameter.requires_grad for parameter in stack.parameters())
    other = create_encoding(name, 48, 2, block_size=4)
    other.load_state_dict(stack.state_dict())
    positions = Positions.grid(3, 4, num_prefix=1)
    q, k, _ = qkv(1, 2, 13, 24)
    assert torch.equal(scores(other, positions, q, k), scores(stack, positions, q, k))
    assert stack.bfloat16().state_dict()[f"layers.0.{name}.folded_freqs"].dtype == torch.float32
    with pytest.raises(ValueError, match="folded already"):
        only(stack).fold_(fused)
    with pytest.raises(RuntimeError, match="folded_freqs"):  # weights from before folding do not fit a folded module
        other.load_state_dict(make(name, block_size=4).state_dict())


def test_folding_checks_the_layers() -> None:
    encoding = only(make("comrope_ld", block_size=4))
    with pytest.raises(ValueError, match="q: expected at least 96 output features"):
        encoding.fold_(nn.Linear(48, 48))
    with pytest.raises(ValueError, match="k: expected 48 output features"):
        encoding.fold_(nn.Linear(48, 48), nn.Linear(48, 24))
    assert encoding.folded_freqs is None


def test_training_mode_without_gradients_and_evaluation_with_them() -> None:
    """What decides is whether somebody wants gradients, not the mode of the module."""
    stack = make("comrope_ld", block_size=4).eval()
    positions = Positions.grid(3, 4)
    q, k, _ = qkv(1, 2, 12, 24)
    scores(stack, positions, q, k).square().sum().backward()
    assert only(stack).generators.grad.abs().max() > 0
    assert only(stack).scales.grad.abs().max() > 0
    stack.requires_grad_(False)
    assert isinstance(stack.prepare(positions)[0].prepared[0], Rotation)


@both
@pytest.mark.parametrize("sizes", [(3, 5), (2, 3, 2), (4,)])
def test_every_way_to_take_the_exponentials(name: str, sizes: tuple[int, ...]) -> None:
    options: dict[str, Any] = {"head_dim": 24, "axes": len(sizes), "block_size": 4}
    positions = Positions.grid(*sizes, num_prefix=2)
    q, k, _ = qkv(2, 2, positions.num_tokens, 24)
    results = []
    for exponential in ("auto", "planes", "matrix_exp"):
        stack = make(name, exponential=exponential, **options)
        logits = scores(stack, positions, q, k)
        (logits * seeded(*logits.shape, seed=4)).sum().backward()
        results.append([logits, *(p.grad for p in stack.parameters())])
        assert_close(table(stack, positions, q, k), logits)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_close(b, a, terms=1024)
    kept = positions.take(torch.arange(positions.num_placed - 1))  # no longer a raster
    stack = make(name, exponential="matrix_exp", **options)
    assert_close(scores(stack, kept, q[:, :, :-1], k[:, :, :-1]), results[0][0][..., :-1, :-1])


# -- coordinates, prefix, noise ---------------------------------------------------------------------------------------


def test_prefix_tokens_stand_in_the_middle_or_nowhere() -> None:
    positions = Positions.grid(3, 5, num_prefix=2)
    q, k, _ = qkv(1, 2, 17, 24)
    stack = make("comrope_ld", block_size=4)
    encoding = only(stack)
    turned = encoding.transform_qkv(q, k, k, stack.prepare(positions)[0].prepared[0])[0]
    middle = encoding.blocks(torch.full((1, 1, 2), 0.5))
    expected = (middle @ q[:, :, :2].unflatten(-1, (6, 4))[..., None])[..., 0].flatten(-2)
    assert_close(turned[:, :, :2], expected)
    assert (turned[:, :, :2] - q[:, :, :2]).abs().max() > 0.1
    alone = make("comrope_ld", block_size=4, prefix_position=None)
    untouched = encodings_of(alone)[0].transform_qkv(q, k, k, alone.prepare(positions)[0].prepared[0])[0]
    assert_close(untouched[:, :, :2], q[:, :, :2])
    assert_close(untouched[:, :, 2:], turned[:, :, 2:])


def test_extent_or_spacing_is_kept() -> None:
    encoding = only(make("comrope_ld", block_size=4, train_grid=(3, 4)))
    large, train = Positions.grid(6, 8), Positions.grid(3, 4)
    coords = encoding.token_coordinates(large)[0].view(6, 8, 2)
    assert torch.allclose(coords[:, 0, 0], (torch.arange(6) + 0.5) / 6)
    encoding.set_resolution("index")
    assert torch.allclose(encoding.token_coordinates(train), (train.coords + 0.5) / torch.tensor([3.0, 4.0]))
    coords = encoding.token_coordinates(large)[0].view(6, 8, 2)
    assert torch.allclose(coords[1:, 0, 0] - coords[:-1, 0, 0], torch.tensor(1 / 3))
    assert torch.allclose(coords.mean((0, 1)), torch.tensor(0.5)), "about the middle, where the prefix is"
    with pytest.raises(ValueError, match="train_grid"):
        only(make("comrope_ld", block_size=4, resolution="index")).prepare(large)


def test_frames_are_divided_by_their_own_number() -> None:
    video = Positions.grid(8, 4, 4)
    ours, theirs = (
        only(make("comrope_ld", axes=3, block_size=4, frame_norm=norm)).token_coordinates(video)[0, :, 0]
        for norm in ("own", "spatial")
    )
    assert float(ours.max()) == 7.5 / 8
    assert float(theirs.max()) == 1.875


@both
def test_noise_of_training(name: str) -> None:
    stack = make(name, axes=1, depth=2, block_size=4, perturbation=1.0, shift=0.1)
    stack.layers[1].load_state_dict(stack.layers[0].state_dict())
    positions = Positions.grid(9, num_prefix=1)
    with torch.no_grad():
        first = [state.prepared[0].cos for state in stack.prepare(positions)]
        assert torch.equal(first[0], first[1]), "one draw for all layers"
        assert not torch.equal(first[0], stack.prepare(positions)[0].prepared[0].cos), "another one each step"
        stack.eval()
        still = stack.prepare(positions)[0].prepared[0].cos
        assert torch.equal(still, stack.prepare(positions)[0].prepared[0].cos)
    encoding = only(stack).train()
    for _ in range(2):
        encoding.generator = torch.Generator().manual_seed(5)
        drawn = encoding.prepare_shared(positions)
    encoding.generator = torch.Generator().manual_seed(5)
    assert torch.equal(drawn, encoding.prepare_shared(positions)), "a generator repeats the step"


def test_noise_moves_patches_inside_themselves_and_leaves_time_and_prefix() -> None:
    encoding = only(make("comrope_ld", axes=3, block_size=4, perturbation=1.0, shift=0.5))
    positions = Positions.grid(3, 4, 5, num_prefix=1)
    clean = encoding.token_coordinates(positions)
    moved = encoding.token_coordinates(positions, ComRopeNoise(patches=seeded(60, 3) * 3))
    patches = (moved - clean) * torch.tensor([3.0, 4.0, 5.0])
    assert patches[:, :, 0].abs().max() == 0
    assert torch.equal(moved[:, 0], clean[:, 0])
    assert 0.499 < patches.abs().max() <= 0.5 + 1e-5
    shifted = encoding.token_coordinates(positions, ComRopeNoise(shift=torch.tensor([1.0, -2.0, 0.0])))
    assert torch.allclose(shifted - clean, torch.tensor([0.5, -1.0, 0.0]).expand_as(clean), atol=1e-6)


# -- weights and wrong input ------------------------------------------------------------------------------------------


def test_reference_state_dict() -> None:
    stack = make("comrope_ld", depth=3, block_size=4)
    state = {}
    for layer in range(3):
        prefix = f"vision_model.encoder.layers.{layer}.self_attn"
        state[f"{prefix}.freqs"] = seeded(2, 1, 6, 4, 4, seed=layer)
        state[f"{prefix}.multiplier"] = seeded(1, 2, 6, 1, 1, seed=layer + 9)
        state[f"{prefix}.q_proj.weight"] = torch.zeros(2, 2)
    for layer, own in enumerate(comrope_layers(state)):
        stack.layers[layer]["comrope_ld"].load_state_dict(own)
        assert torch.equal(
            stack.layers[layer]["comrope_ld"].scales[:, 0], seeded(1, 2, 6, 1, 1, seed=layer + 9)[0, :, :, 0, 0]
        )
    with pytest.raises(ValueError, match="freqs"):
        comrope_layers({"head.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match="freqs: expected"):
        comrope_layer({"freqs": torch.zeros(2, 6, 4, 4)})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("comrope_ld", {"block_size": 5}, "block_size: expected a divisor of head_dim 24"),
        ("comrope_ap", {"block_size": 8}, "multiple of 2 x block_size 8"),
        ("comrope_ld", {"block_size": 4, "coordinates": "polar"}, "coordinates: expected one of"),
        ("comrope_ld", {"block_size": 4, "exponential": "pade"}, "exponential: expected one of"),
        ("comrope_ld", {"block_size": 4, "frame_norm": "x"}, "frame_norm"),
        ("comrope_ld", {"block_size": 4, "perturbation": -1.0}, "perturbation: expected 0 or more"),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_encoding(name, 48, 2, **options)


def test_free_points_need_an_extent() -> None:
    with pytest.raises(ValueError, match="extent"):
        make("comrope_ld", block_size=4).prepare(Positions.points(seeded(4, 2)))
