"""A small vision-language model under every scheme: branches, batches, decoding, tiles, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmpos.models.vlm import Projector, create_dense_tower, create_vlm, tile_image
from mmpos.multimodal import Image, Text, Tiles, Video, list_schemes

pytest.importorskip("transformers")

IMAGE = 1
SMALL: dict[str, Any] = {
    "vocabulary": 30,
    "image_token": IMAGE,
    "train_grid": (6, 8),
    "tower": {"depth": 1, "embed_dim": 24, "num_heads": 2},
}
DECODER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def model(scheme: str = "mrope", heads: int = 4, **options: Any) -> Any:
    torch.manual_seed(0)
    decoder = {**DECODER, "num_key_value_heads": heads}
    return create_vlm(**{**SMALL, "scheme": scheme, "decoder": decoder, **options}).eval()


def talkative(vlm: Any, seed: int = 3) -> Any:
    """Words from a drawn readout: untrained, tied embeddings repeat the last word wherever the tokens stand."""
    width = vlm.decoder.embedding.embedding_dim
    readout = torch.randn(vlm.decoder.embedding.num_embeddings, width, generator=torch.Generator().manual_seed(seed))
    vlm.logits = lambda hidden: hidden @ readout.to(hidden.dtype).T
    return vlm


def words(count: int, seed: int = 0, rows: int = 1) -> Tensor:
    return torch.randint(5, 30, (rows, count), generator=torch.Generator().manual_seed(seed))


def places(count: int, rows: int = 1) -> Tensor:
    return torch.full((rows, count), IMAGE)


def pixels(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scheme", list_schemes())
@torch.no_grad()
def test_branches_are_the_questions_asked_alone(scheme: str) -> None:
    vlm = model(scheme)
    prefix, block = [Text(2), Image(2, 3), Text(1)], [pixels(2, 1, 1, 16, 24)]
    start = torch.cat([words(2, 1, 2), places(6, 2), words(1, 2, 2)], 1)
    questions = [words(3, 3, 2), words(4, 4, 2)]
    together = torch.cat([start, *questions], 1)
    branch = torch.tensor([0] * 9 + [1] * 3 + [2] * 4)
    segments = [[*prefix, Text(3, shared=True), Text(4, shared=True)]]
    got = vlm(together, block, segments, branch=branch)
    for question, slots in zip(questions, (slice(9, 12), slice(12, 16)), strict=True):
        alone = vlm(torch.cat([start, question], 1), block, [[*prefix, Text(question.shape[1])]])
        torch.testing.assert_close(got[:, slots], alone[:, 9:], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(got[:, :9], alone[:, :9], atol=2e-5, rtol=1e-4)
    other = together.clone()
    other[:, 10] = 5 + (other[:, 10] - 4) % 25
    changed = vlm(other, block, segments, branch=branch)
    torch.testing.assert_close(changed[:, 12:], got[:, 12:], atol=1e-6, rtol=1e-5)
    assert (changed[:, 10:12] - got[:, 10:12]).abs().max() > 1e-3


@pytest.mark.parametrize("scheme", list_schemes())
@torch.no_grad()
def test_decoding_with_a_cache_is_decoding_without(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = talkative(model(scheme))
    row = [Text(1), Video(2, 2, 3), Text(2), Image(3, 1), Tiles(1, 2, 2), Text(2)]
    parts = [words(1, 1, 2), places(12, 2), words(2, 2, 2), places(3, 2), places(12, 2), words(2, 3, 2)]
    tokens = torch.cat(parts, 1)
    block = [pixels(2, 2, 1, 16, 24), pixels(2, 1, 1, 24, 8, seed=5), pixels(2, 3, 1, 16, 16, seed=6)]
    seen: list[Tensor] = []
    readout = vlm.logits
    monkeypatch.setattr(vlm, "logits", lambda hidden: seen.append(readout(hidden)) or seen[-1])
    cached = vlm.generate(tokens, block, [row] * 2, max_new_tokens=5)
    plain = vlm.generate(tokens, block, [row], max_new_tokens=5, cached=False)
    assert cached.shape == (2, 5)
    assert torch.equal(cached, plain)
    assert not bool((cached == IMAGE).any())
    assert not torch.equal(cached, tokens[:, -1:].expand(-1, 5))
    whole = vlm(torch.cat([tokens, cached], 1), block, [[*row, Text(5)]])[:, -6:-1]
    for steps in (seen[:5], seen[5:10]):  # teacher forcing the answer gives the same logits
        torch.testing.assert_close(torch.stack(steps, 1), whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("scheme", list_schemes())
@torch.no_grad()
def test_rows_that_mix_everything_are_as_alone(scheme: str) -> None:
    vlm = model(scheme)
    rows = [
        [Text(2), Image(2, 3), Image(1, 2), Text(1), Video(2, 2, 1), Text(3)],
        [Text(1), Tiles(1, 2, 2), Text(2), Image(3, 1)],
        [Text(4)],
        [Video(3, 1, 2), Text(1), Image(2, 2), Text(2), Tiles(2, 1, 2), Text(1)],
    ]
    pictures: list[list[tuple[int, int, int]]] = [  # tiles or frames, and tokens of each along its sides
        [(1, 2, 3), (1, 1, 2), (2, 2, 1)],
        [(3, 2, 2), (1, 3, 1)],
        [],
        [(3, 1, 2), (1, 2, 2), (3, 2, 2)],
    ]
    blocks = [
        [pixels(n, 1, 8 * h, 8 * w, seed=10 * row + number) for number, (n, h, w) in enumerate(of)]
        for row, of in enumerate(pictures)
    ]
    tokens = []
    for number, row in enumerate(rows):
        counts = iter([n * h * w for n, h, w in pictures[number]])
        parts = [words(s.length, number) if isinstance(s, Text) else places(next(counts)) for s in row]
        tokens.append(torch.cat(parts, 1))
    length = max(row.shape[1] for row in tokens)
    padded = torch.cat([torch.nn.functional.pad(row, (0, length - row.shape[1])) for row in tokens])
    got = vlm(padded, [block for of in blocks for block in of], rows)
    for number, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        alone = vlm(token, blocks[number], [row])
        torch.testing.assert_close(got[number : number + 1, : token.shape[1]], alone, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_blocks_of_several_sizes_keep_their_order() -> None:
    vlm = model()
    blocks = [pixels(2, 1, 1, 16, 8, seed=1), pixels(2, 2, 1, 8, 24, seed=2), pixels(2, 1, 1, 16, 8, seed=3)]
    seen = vlm.see(blocks).reshape(2, 2 + 6 + 2, -1)
    for row in range(2):
        alone = torch.cat([vlm.see([block[row]]) for block in blocks])
        torch.testing.assert_close(seen[row], alone, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_an_image_decides_and_so_does_its_place() -> None:
    tokens, rows = torch.cat([words(1), places(6), words(2)], 1), [[Text(1), Image(2, 3), Text(2)]]
    block = pixels(1, 1, 1, 16, 24)
    for options in ({}, {"visual_encoding": ("sincos", {"base": 100.0})}):
        vlm = model("raster", **options)
        assert (vlm(tokens, [block], rows) - vlm(tokens, [block + 1], rows)).abs().max() > 1e-3
    bare, placed = vlm.see_twice([block])
    assert (placed - bare).std() > 0.1
    torch.testing.assert_close(bare[None], vlm.project(block[0]))


@pytest.mark.parametrize("scheme", ["mhrope", "mrope", "circlerope_age"])
@torch.no_grad()
def test_grouped_heads_run_with_schemes_by_head_and_by_axis(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, tokens = [Text(1), Image(2, 3), Text(2)], torch.cat([words(1), places(6), words(2)], 1)
    block, vlm = [pixels(1, 1, 1, 16, 24)], talkative(model(scheme, heads=2))
    seen: list[Tensor] = []
    readout = vlm.logits
    monkeypatch.setattr(vlm, "logits", lambda hidden: seen.append(readout(hidden)) or seen[-1])
    answer = vlm.generate(tokens, block, [row], max_new_tokens=3)
    assert torch.equal(answer, vlm.generate(tokens, block, [row], max_new_tokens=3, cached=False))
    whole = vlm(torch.cat([tokens, answer], 1), block, [[*row, Text(3)]])[:, -4:-1]
    for steps in (seen[:3], seen[3:6]):
        torch.testing.assert_close(torch.stack(steps, 1), whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("scheme", "block"), [("v2pe", Image(3, 4)), ("v2pe", Video(3, 2, 3)), ("hope", Video(3, 2, 3))]
)
def test_steps_are_drawn_in_training_only(scheme: str, block: Any) -> None:
    vlm = model(scheme)
    rows = [[Text(1), block, Text(1)]]
    fixed = {tuple(vlm.layout(rows).ids.flatten().tolist()) for _ in range(16)}
    vlm.train()
    drawn = {tuple(vlm.layout(rows).ids.flatten().tolist()) for _ in range(16)}
    assert len(fixed) == 1
    assert len(drawn) > 1


def test_keys_start_as_queries_and_ordered_words_as_neighbours() -> None:
    vlm = model(heads=2, ordered=((10, 12),))
    for layer in vlm.decoder.model.layers:
        query = layer.self_attn.q_proj.weight.unflatten(0, (2, 2, 8))
        torch.testing.assert_close(query[:, 0].flatten(0, 1), layer.self_attn.k_proj.weight)
    ordered = torch.nn.functional.normalize(vlm.decoder.embedding.weight[10:22].detach(), dim=-1)
    likeness = ordered @ ordered.T
    assert float(likeness.diagonal(1).min()) > float(likeness.diagonal(6).max())
    assert float(likeness.diagonal(1).min()) > 0.7


def test_autocast_is_finite() -> None:
    vlm = model("mrope_interleave")
    tokens, rows = torch.cat([words(1), places(6), words(2)], 1), [[Text(1), Image(2, 3), Text(2)]]
    with torch.autocast("cpu", torch.bfloat16):
        out = vlm(tokens, [pixels(1, 1, 1, 16, 24)], rows)
    assert bool(out.isfinite().all())


def test_tiles_keep_form_and_pixels() -> None:
    image = pixels(1, 32, 96)
    tiles, segment = tile_image(image, 32)
    assert segment == Tiles(1, 3, 4)
    torch.testing.assert_close(torch.cat(list(tiles[:3]), -1), image)
    assert tiles.shape == (4, 1, 32, 32)
    whole, one = tile_image(pixels(1, 32, 32), 32, max_tiles=1)
    assert (whole.shape[0], one) == (1, Image(4, 4))
    torch.testing.assert_close(whole[0], pixels(1, 32, 32))
    tall, segment = tile_image(pixels(2, 90, 30), 16, max_tiles=6)
    assert segment == Tiles(3, 1, 2)
    assert tall.shape == (4, 2, 16, 16)


def test_a_tower_says_what_lies_in_each_cell() -> None:
    tower = create_dense_tower(num_classes=3, train_grid=(6, 8), tower=SMALL["tower"])
    classes, edges = tower(pixels(2, 1, 24, 16))
    assert (classes.shape, edges.shape) == ((2, 6, 4), (2, 6, 4))
    with torch.no_grad():  # 2 x 2 tokens of the tower make a cell, in the order of rows
        plain = tower.tower.vit.forward_features(pixels(2, 1, 24, 16)).unflatten(1, (6, 4))
        cell = plain[:, 2:4, 2:4].flatten(1)
        torch.testing.assert_close(tower.tower(pixels(2, 1, 24, 16))[:, 1 * 2 + 1], cell)


def test_wrong_input_is_named() -> None:
    vlm = model()
    good = torch.cat([words(1), places(6), words(2)], 1)
    rows = [[Text(1), Image(2, 3), Text(2)]]
    block = pixels(1, 1, 1, 16, 24)
    with pytest.raises(ValueError, match="multiples of 8 pixels"):
        vlm(good, [pixels(1, 1, 1, 16, 20)], rows)
    with pytest.raises(ValueError, match="pixels: the segments hold 6 visual tokens, the images give 4"):
        vlm(good, [pixels(1, 1, 1, 16, 16)], rows)
    with pytest.raises(ValueError, match="tokens: expected the image token 1 in the 6 slots"):
        vlm(good.roll(1, 1), [block], rows)
    with pytest.raises(ValueError, match="segments: they hold"):
        vlm(good[:, :-1], [block], rows)
    with pytest.raises(ValueError, match="pixels: expected blocks"):
        vlm.see([block, block[0]])
    with pytest.raises(ValueError, match="max_new_tokens"):
        vlm.generate(good, [block], rows, max_new_tokens=0)
    with pytest.raises(ValueError, match="image, side"):
        tile_image(block[0, 0], 12)
    with pytest.raises(ValueError, match="theta"):
        model(theta=0.5)
    with pytest.raises(ValueError, match="no scheme is called"):
        model("mroppe")
    assert isinstance(vlm.projector, Projector)
