"""A small LLaVA-style model: vision tower, 2 x 2 merge and projector, and a Llama decoder with any position scheme.

As in LLaVA (arXiv 2304.08485) visual tokens stand among the words of the prompt; as in LLaVA-NeXT and InternVL large
images come as tiles and a thumbnail; as in Qwen2-VL (arXiv 2409.12191) 2 x 2 tokens of the tower are merged into one.
The decoder is the Llama of transformers; how its tokens are placed is the choice of a scheme of
:mod:`mmpos.multimodal`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.adapters._attachment import require
from mmpos.encodings import EncodingStack, create_encoding
from mmpos.models.decoder import Decoder
from mmpos.models.tiles import tile_image
from mmpos.models.tower import MERGE, DenseTower, Tower, create_dense_tower, create_tower, initialise_linear
from mmpos.multimodal import PositionLayout, Scheme, Segment, Text
from mmpos.multimodal import scheme as named_scheme
from mmpos.positions import Positions

__all__ = ["Decoder", "DenseTower", "Projector", "Tower", "Vlm", "create_dense_tower", "create_vlm", "tile_image"]


class Projector(nn.Sequential):
    """From features of cells to embeddings of the decoder: norm and two layers, as in LLaVA-1.5.

    Shape: ``(..., features)`` to ``(..., width)``.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__(nn.LayerNorm(features), nn.Linear(features, width), nn.GELU(), nn.Linear(width, width))


class Vlm(nn.Module):
    """Images, videos and words in, words out; made by :func:`create_vlm`.

    Args:
        tower: images to features of cells.
        projector: features to embeddings of the decoder.
        decoder: the language model with its scheme.
        image_token: token number that holds the place of a visual token.
        places: an encoding that is added to the visual tokens of each image, tile or frame, besides the scheme.
    """

    def __init__(
        self,
        tower: Tower,
        projector: nn.Module,
        decoder: Decoder,
        *,
        image_token: int,
        places: EncodingStack | None = None,
    ) -> None:
        super().__init__()
        self.tower = tower
        self.projector = projector
        self.decoder = decoder
        self.image_token = image_token
        self.places = places

    @property
    def scheme(self) -> Scheme:
        """How tokens are placed."""
        return self.decoder.scheme

    def layout(self, rows: Sequence[Sequence[Segment]], **options: Any) -> PositionLayout:
        """Places of the tokens of a batch; drawn steps of images (V2PE, HoPE) in training mode only."""
        rows = self.scheme.randomise(rows) if self.training else rows
        layout = self.scheme.layout(rows, num_layers=self.decoder.layers, **options)
        return layout.to(self.decoder.embedding.weight.device)

    def project(self, pixels: Tensor) -> Tensor:
        """What is in each cell of images of one size, as the decoder would say it: before any place is added.

        Shape: ``(N, C, H, W)`` to ``(N, cells, D)``.
        """
        return self.projector(self.tower(pixels))

    def see(self, pixels: Sequence[Tensor]) -> Tensor:
        """Embeddings of all visual tokens, in the order of rows and of the blocks in a row.

        Args:
            pixels: visual blocks. Either blocks that all rows have, ``(B, n, C, H, W)`` each, or the blocks of all rows
                in order, ``(n, C, H, W)`` each; ``n`` counts tiles or frames. Blocks of one size are seen at once.

        Shape:
            Returns ``(visual tokens, D)``.
        """
        return self.see_twice(pixels)[1]

    def see_twice(self, pixels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """As :meth:`see`, before and after places are added. Shape: ``(visual tokens, D)`` twice."""
        if not pixels:
            none = self.decoder.embedding.weight.new_zeros(0, self.decoder.embedding.embedding_dim)
            return none, none
        dims = {block.dim() for block in pixels}
        if len(dims) > 1 or not dims <= {4, 5}:
            raise ValueError(
                "pixels: expected blocks (n, C, H, W) of all rows, or (B, n, C, H, W) for blocks that all rows have, "
                f"got {[tuple(block.shape) for block in pixels]}"
            )
        of_all = dims == {5}
        flat = [block.flatten(0, 1) if of_all else block for block in pixels]
        parts: list[tuple[Tensor, Tensor]] = [(flat[0], flat[0])] * len(flat)
        for size in dict.fromkeys(block.shape[-2:] for block in flat):
            mine = [number for number, block in enumerate(flat) if block.shape[-2:] == size]
            plain = self.project(torch.cat([flat[number] for number in mine]))
            placed = plain
            if self.places is not None:
                placed = self.places.add_to_tokens(plain, Positions.grid(*self.tower.grid(*size)))
            counts = [len(flat[number]) for number in mine]
            for number, *both in zip(mine, plain.split(counts), placed.split(counts), strict=True):
                parts[number] = (both[0], both[1])

        def joined(seen: Sequence[Tensor]) -> Tensor:
            if not of_all:
                return torch.cat([part.flatten(0, 1) for part in seen])
            rows = len(pixels[0])
            return torch.cat([part.reshape(rows, -1, part.shape[-1]) for part in seen], dim=1).flatten(0, 1)

        return joined([plain for plain, _ in parts]), joined([placed for _, placed in parts])

    def embed(self, tokens: Tensor, visual: Tensor, layout: PositionLayout) -> Tensor:
        """Words and visual tokens in one sequence.

        Shape: tokens ``(B, L)``, visual ``(V, D)``; returns ``(B, L, D)``.
        """
        x = self.decoder.embedding(tokens)
        places = (layout.block >= 0).expand(len(tokens), -1)
        count = int(places.sum())
        if count != len(visual):
            raise ValueError(
                f"pixels: the segments hold {count} visual tokens, the images give {len(visual)}; an image of H x W "
                f"pixels has H/{self.tower.cell} x W/{self.tower.cell}"
            )
        marked = tokens == self.image_token
        if not torch.equal(marked, places):
            raise ValueError(
                f"tokens: expected the image token {self.image_token} in the {count} slots of visual tokens and "
                f"nowhere else, got it in {int(marked.sum())} slots"
            )
        x = x.to(visual.dtype) if len(visual) else x
        return x.masked_scatter(places[..., None], visual)

    def forward(
        self,
        tokens: Tensor,
        pixels: Sequence[Tensor],
        segments: Sequence[Sequence[Segment]] | PositionLayout,
        *,
        branch: Tensor | None = None,
        visual: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token at every slot.

        Args:
            tokens: token numbers with :attr:`image_token` where visual tokens stand.
            pixels: see :meth:`see`.
            segments: what the rows are made of (one row stands for all), or their layout.
            branch: 0 for tokens that all may see, ``k`` for those of branch ``k``; branches do not see each other.
            visual: what :meth:`see` gave for ``pixels``, to see once and ask often.

        Shape:
            tokens ``(B, L)``, branch ``(L,)`` or ``(B, L)``; returns ``(B, L, words)``.
        """
        layout = segments if isinstance(segments, PositionLayout) else self.layout(segments)
        if layout.kind.shape[1] != tokens.shape[1] or len(layout.kind) not in (1, len(tokens)):
            raise ValueError(
                f"segments: they hold {tuple(layout.kind.shape)} slots, tokens are {tuple(tokens.shape)}; give a row "
                "of segments for each row of tokens, or one for all"
            )
        visual = self.see(pixels) if visual is None else visual
        x = self.embed(tokens, visual, layout)
        return self.logits(self.decoder(x, layout, self.pattern(layout, branch)))

    def logits(self, hidden: Tensor) -> Tensor:
        """Words from hidden states, by the embeddings. Shape: ``(..., D)`` to ``(..., words)``."""
        return F.linear(hidden, self.decoder.embedding.weight.to(hidden.dtype))

    def choose(self, logits: Tensor) -> Tensor:
        """The most likely word, which is never the image token. Shape: ``(..., words)`` to ``(...)``."""
        best = logits.clone()
        best[..., self.image_token] = float("-inf")
        return best.argmax(-1)

    def pattern(self, layout: PositionLayout, branch: Tensor | None = None) -> Tensor:
        """Which slot may attend to which: the scheme's pattern, padding and branches.

        Shape: ``(B or 1, 1 or V, L, L)``.
        """
        allowed = layout.variant_masks() | torch.diag_embed(~layout.mask)[:, None]
        if branch is not None:
            branch = branch.to(allowed.device)
            branch = branch[None] if branch.dim() == 1 else branch
            own = (branch[:, None] == 0) | (branch[:, :, None] == branch[:, None])
            allowed = allowed & own[:, None]
        return allowed

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        pixels: Sequence[Tensor],
        segments: Sequence[Sequence[Segment]],
        *,
        max_new_tokens: int,
        end_token: int | None = None,
        cached: bool = True,
    ) -> Tensor:
        """Greedy answers of a batch of rows of one length; after ``end_token`` a row repeats it.

        Args:
            tokens: prompts.
            pixels: see :meth:`see`.
            segments: what the rows are made of (one row stands for all).
            max_new_tokens: tokens of an answer.
            end_token: token that ends an answer.
            cached: keep keys and values; ``False`` computes everything anew for every token (the plain form).

        Shape:
            tokens ``(B, L)``; returns ``(B, new tokens)``.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected 1 or more, got {max_new_tokens}")
        layout = self.layout(segments)
        if not bool(layout.mask.all()):
            raise ValueError("segments: generate() takes rows of one length; call it for each length")
        if len(layout.kind) == 1:
            layout = layout.rows(torch.zeros(len(tokens), dtype=torch.long, device=layout.kind.device))
        visual = self.see(pixels)
        x = self.embed(tokens, visual, layout)
        cache = require("transformers", "vlm").DynamicCache() if cached else None
        hidden = self.decoder(x, layout, self.pattern(layout), cache)[:, -1]
        out: list[Tensor] = []
        ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for _ in range(max_new_tokens):
            word = self.choose(self.logits(hidden))
            if end_token is not None:
                word = torch.where(ended, end_token, word)
                ended = ended | (word == end_token)
            out.append(word)
            if len(out) == max_new_tokens or bool(ended.all()):
                break
            before = layout.kind.shape[1]
            layout = layout.extend([[Text(1)]] * len(tokens))
            new = self.decoder.embedding(word)[:, None].to(x.dtype)
            if cache is None:
                x = torch.cat([x, new], dim=1)
                hidden = self.decoder(x, layout, self.pattern(layout))[:, -1]
            else:
                allowed = layout.mask[:, None, None, :]
                hidden = self.decoder(new, layout.slots(before, before + 1), allowed, cache)[:, -1]
        return torch.stack(out, dim=1)


def create_vlm(
    *,
    vocabulary: int,
    image_token: int,
    scheme: str | Scheme = "mrope_interleave",
    encoding: Any = "rope_mixed",
    visual_encoding: Any = None,
    in_chans: int = 1,
    train_grid: Sequence[int] = (12, 16),
    tower: Mapping[str, Any] | None = None,
    decoder: Mapping[str, Any] | None = None,
    theta: float = 1_000.0,
    sections: Sequence[int] | None = None,
    scheme_options: Mapping[str, Any] | None = None,
    ordered: Sequence[tuple[int, int]] = (),
) -> Vlm:
    """Build a small vision-language model.

    The decoder starts with keys equal to queries, so that a token attends to what resembles it (mimetic initialisation,
    arXiv 2305.09828, eq. 3), and words with an order start as sines of their place in it: without a language model to
    start from, both save most of the training.

    Args:
        vocabulary: number of words.
        image_token: token number that holds the place of visual tokens.
        scheme: name of a scheme or a :class:`~mmpos.multimodal.Scheme`: how the decoder's tokens are placed.
        encoding: position encoding of the tower: registry name, pair ``(name, options)``, or a list of these.
        visual_encoding: an additive encoding of the visual tokens behind the projector, alike; ``None`` for none. With
            it a visual token knows its own row and column, without it only the scheme tells them.
        in_chans: image channels.
        train_grid: patches of the training images of the tower.
        tower: arguments of :func:`~mmpos.models.create_vit` (depth, embed_dim, patch_size ...).
        decoder: arguments of ``transformers.LlamaConfig``; the default has 4 layers of width 128.
        theta: base of the rotary ladder of the decoder.
        sections: rotary pairs of each axis (heads of each for ``mhrope``); default those of the scheme.
        scheme_options: choices of a named scheme to change.
        ordered: (first token, count) of words that have an order, such as places and numbers.

    Example:
        >>> from mmpos.multimodal import Image, Text
        >>> model = create_vlm(vocabulary=20, image_token=1, tower={"depth": 1}, decoder={"num_hidden_layers": 1})
        >>> tokens = torch.tensor([[2, 1, 1, 1, 1, 7, 8]])
        >>> model(tokens, [torch.zeros(1, 1, 1, 16, 16)], [[Text(1), Image(2, 2), Text(2)]]).shape
        torch.Size([1, 7, 20])
    """
    if isinstance(scheme, str):
        scheme = named_scheme(scheme, **dict(scheme_options or {}))
    elif scheme_options:
        scheme = replace(scheme, **dict(scheme_options))
    config: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "initializer_range": 0.09,
        "vocab_size": vocabulary,
        **dict(decoder or {}),
    }
    made = create_tower(encoding, in_chans=in_chans, train_grid=train_grid, **dict(tower or {}))
    language = Decoder(config, scheme, theta=theta, sections=sections)
    width = int(config["hidden_size"])
    places = None
    if visual_encoding is not None:
        grid = [side // MERGE for side in train_grid]
        places = create_encoding(visual_encoding, width, 1, 1, train_grid=grid)
    model = Vlm(made, Projector(made.width, width), language, image_token=image_token, places=places)
    initialise_linear(model.projector)
    language.initialise(ordered)
    return model
