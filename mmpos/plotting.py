"""Pictures of encodings: what each position looks like to each other one.

Nothing here knows a method by name. An encoding is asked through its hooks, with contents of which the outcome is
known, so an encoding registered tomorrow has a picture today.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos.attention import attend
from mmpos.encodings import EncodingStack, PositionEncoding, create_encoding, encoding_class
from mmpos.encodings.base import overrides
from mmpos.positions import Positions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PALETTE", "Panel", "new_figure", "plot_encoding", "probe_encoding"]

#: colours that remain distinct under the common kinds of colour blindness (Okabe and Ito)
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

MAX_HEADS = 6
_SAMPLES = 16


@dataclass(frozen=True)
class Panel:
    """One map over the raster, or over offsets.

    Args:
        group: what is shown; panels of a group share a row and a colour scale.
        title: which head or axis.
        values: the map.
        reference: cell of the reference position in the map.
        offsets: whether the axes are offsets rather than places.
        unit: name of the colour scale.

    Shape:
        values ``(rows, columns)``.
    """

    group: str
    title: str
    values: Tensor
    reference: tuple[int, int]
    offsets: bool
    unit: str

    @property
    def constant(self) -> bool:
        """Whether the map says the same of every place."""
        values = self.values[self.values.isfinite()]
        return len(values) == self.values.numel() and float(values.max() - values.min()) < 1e-6


def plot_encoding(
    encoding: str | EncodingStack,
    grid: Sequence[int] = (14, 14),
    output: str | Path | None = None,
    *,
    reference: Sequence[int] | None = None,
    layer: int = 0,
    dim: int = 192,
    num_heads: int = 3,
    seed: int = 0,
    **options: Any,
) -> Figure:
    """Draw how an encoding relates positions: similarity of token vectors, kernel of rotations, map of biases,
    attention.

    Args:
        encoding: a registry name, or the stack of a trained model.
        grid: rows and columns (one size draws a single row; of three or more the last two are drawn, at the reference
            of the others).
        output: image file to write.
        reference: cell of the reference position; default the middle.
        layer: which layer of a stack whose layers differ.
        dim: model width when ``encoding`` is a name.
        num_heads: heads when ``encoding`` is a name.
        seed: seed of initial parameters and probe contents.
        options: options of the encoding when it is a name.
    """
    grid = tuple(int(size) for size in grid)
    if isinstance(encoding, str):
        stack = _build(encoding, grid, dim, num_heads, seed, options)
    elif options:
        raise ValueError(f"options: the encoding is built already, got {sorted(options)}")
    else:
        stack = encoding
    panels = probe_encoding(stack, grid, reference=reference, layer=layer, seed=seed)
    figure = _draw(panels, _title(stack, grid, layer))
    if output is not None:
        figure.savefig(output, dpi=150)
    return figure


# -- probing ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def probe_encoding(
    stack: EncodingStack, grid: Sequence[int], *, reference: Sequence[int] | None = None, layer: int = 0, seed: int = 0
) -> list[Panel]:
    """The maps of an encoding, found through its hooks alone; empty when it does nothing."""
    grid = tuple(grid)
    reference = tuple(size // 2 for size in grid) if reference is None else tuple(reference)
    if len(reference) != len(grid) or not all(0 <= cell < size for cell, size in zip(reference, grid, strict=True)):
        raise ValueError(f"reference: expected a cell of the grid {grid}, got {reference}")
    if not 0 <= layer < stack.depth:
        raise ValueError(f"layer: expected 0 to {stack.depth - 1}, got {layer}")
    encodings = stack.encodings_of(layer)
    first = encodings[0]
    device = next((parameter.device for parameter in stack.parameters()), torch.device("cpu"))
    positions = Positions.grid(*grid, num_prefix=first.num_prefix, train_grid=first.train_grid or grid, device=device)
    training = stack.training
    stack.eval()
    try:
        probe = _Probe(stack, positions, grid, reference, layer, torch.Generator().manual_seed(seed))
        panels = []
        if any(overrides(e, "add_to_tokens") for e in encodings):
            panels += probe.tokens()
        if any(overrides(e, "mix_tokens") for e in encodings):
            panels += probe.mixing()
        if any(overrides(e, "transform_qkv") for e in encodings):
            panels += probe.kernel()
        if any(overrides(e, "logit_bias") for e in encodings):
            panels += probe.bias()
        silent = all(not panel.values.nan_to_num().any() for panel in panels)
        if silent and any(overrides(e, hook) for e in encodings for hook in ("attend", "transform_output")):
            panels = probe.attention()
        telling = [panel for panel in panels if not panel.constant]
        return telling or panels
    finally:
        stack.train(training)


@dataclass
class _Probe:
    stack: EncodingStack
    positions: Positions
    grid: tuple[int, ...]
    reference: tuple[int, ...]
    layer: int
    generator: torch.Generator

    @property
    def encoding(self) -> PositionEncoding:
        return self.stack.encodings_of(self.layer)[0]

    @property
    def centre(self) -> int:
        """Row-major index of the reference cell among the placed tokens."""
        index = 0
        for cell, size in zip(self.reference, self.grid, strict=True):
            index = index * size + cell
        return index

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.positions.coords.device)

    def tokens(self) -> list[Panel]:
        """Cosine of the vector that is added at the reference with those added elsewhere."""
        count, prefix = self.positions.num_tokens, self.positions.num_prefix
        zeros = torch.zeros(1, count, self.encoding.dim, device=self.positions.coords.device)
        table = self.stack.add_to_tokens(zeros, self.positions, image=self.grey())[0, prefix:]
        cosine = F.cosine_similarity(table[self.centre][None], table, dim=-1)
        return [self.panel("similarity of the added vectors", "", cosine, "cosine with the reference")]

    def grey(self) -> Tensor | None:
        """An image without content, for encodings that read one and say its patch size and channels."""
        for e in self.stack.encodings_of(self.layer):
            if e.needs_image:
                patch, channels = getattr(e, "patch_size", (16, 16)), getattr(e, "channels", 3)
                height, width = (size * side for size, side in zip(self.grid, patch, strict=True))
                return torch.zeros(1, channels, height, width, device=self.positions.coords.device)
        return None

    def mixing(self) -> list[Panel]:
        """How far a mark on the reference token spreads."""
        count, prefix = self.positions.num_tokens, self.positions.num_prefix
        x = torch.zeros(_SAMPLES, count, self.encoding.dim, device=self.positions.coords.device)
        marked = x.clone()
        marked[:, prefix + self.centre] = self.random(_SAMPLES, self.encoding.dim)
        change = self.stack.mix_tokens(self.layer, marked, self.positions) - self.stack.mix_tokens(
            self.layer, x, self.positions
        )
        change = (change - (marked - x))[:, prefix:].norm(dim=-1).mean(0)
        return [self.panel("spread of a token between blocks", "", change, "norm of the change")]

    def kernel(self) -> list[Panel]:
        """Expected logit over all offsets of a query and a key with the same content, ``E[q R(offset) k]``, over
        that at offset 0.
        """
        by_offset = self.offset_mean(self.scores())
        middle = tuple(size - 1 for size in self.grid)
        place: tuple[Any, ...] = (slice(None), *middle)
        peak = by_offset[place].abs().clamp_min(1e-12)
        kernels = by_offset / peak.reshape(-1, *[1] * len(self.grid))
        out = []
        for title, values in _heads(kernels):
            out.append(
                Panel(
                    "expected logit by offset",
                    title,
                    _plane(values, middle),
                    _last_two(middle),
                    True,
                    "E[q R k] / value at 0",
                )
            )
        return out

    def scores(self) -> Tensor:
        """Mean of ``q_i . k_j`` over contents that all tokens share. Shape: ``(heads, N, N)``.

        The contents are the unit vectors when queries and keys keep their width, which makes the mean exact: it is a
        trace.
        """
        e, prefix = self.encoding, self.positions.num_prefix
        count = self.positions.num_tokens
        unit = torch.eye(e.head_dim, device=self.positions.coords.device) * e.head_dim**0.5
        content = unit[:, None, None].expand(-1, e.num_heads, count, -1)
        x = self.random(1, 1, e.dim).expand(e.head_dim, count, -1)
        state = self.stack.prepare(self.positions)[self.layer]
        q, k, v = content, content, content
        for encoding, prepared in zip(state.encodings, state.prepared, strict=True):
            q, k, v = encoding.transform_qkv(q, k, v, prepared, x)
        q, k = (t[:, :, prefix:].transpose(0, 1).transpose(1, 2).flatten(2) for t in (q, k))
        return q @ k.transpose(-2, -1) / e.head_dim

    def offset_mean(self, logits: Tensor) -> Tensor:
        """Average over all pairs with the same offset.

        Shape: ``(heads, N, N)`` -> ``(heads, 2 s - 1 for each size s)``.
        """
        coords = Positions.grid(*self.grid, device=logits.device).coords[0].long()
        offset = coords[None] - coords[:, None]
        sizes = torch.tensor(self.grid, device=logits.device)
        index = torch.zeros(offset.shape[:2], dtype=torch.long, device=logits.device)
        for axis, size in enumerate(self.grid):
            index = index * (2 * size - 1) + offset[..., axis] + size - 1
        total = int((2 * sizes - 1).prod())
        counts = torch.bincount(index.reshape(-1), minlength=total)
        sums = logits.new_zeros(logits.shape[0], total).index_add_(
            1, index.reshape(-1), logits.reshape(logits.shape[0], -1)
        )
        return (sums / counts).reshape(-1, *(2 * size - 1 for size in self.grid))

    def bias(self) -> list[Panel]:
        """Bias of the reference query towards every key.

        Where it depends on random contents, its mean, or its size if that is zero.
        """
        e, prefix, count = self.encoding, self.positions.num_prefix, self.positions.num_tokens
        state = self.stack.prepare(self.positions)[self.layer]
        q = self.random(_SAMPLES, e.num_heads, count, e.head_dim)
        total = torch.zeros(_SAMPLES, e.num_heads, count, device=q.device)
        for encoding, prepared in zip(state.encodings, state.prepared, strict=True):
            term = encoding.logit_bias(q, q, prepared)
            if term is not None:
                term = term.reshape(*[1] * (4 - term.dim()), *term.shape)
                total = total + term.float().expand(_SAMPLES, e.num_heads, count, count)[:, :, prefix + self.centre]
        total = total[..., prefix:]
        total = total.masked_fill(total < -1e30, float("nan"))  # keys that may not be seen
        mean, size = total.mean(0), total.square().mean(0).sqrt()
        # a bias made from the query averages to zero over random queries: 16 samples leave a quarter of its size
        contextual = bool(mean.nan_to_num().abs().mean() < 0.5 * size.nan_to_num().mean())
        group = (
            "size of the bias of the reference query (it depends on content)"
            if contextual
            else "bias of the reference query"
        )
        return [
            self.panel(group, title, values, "added to the logit")
            for title, values in _heads(size if contextual else mean)
        ]

    def attention(self) -> list[Panel]:
        """What the encoding changes at the reference query when the value of one token is marked, for every token.

        The mark is one in all channels, so that the mean over channels is an attention weight. A method that changes
        the output of each channel in its own way shows the size of that change instead.
        """
        e, prefix, count = self.encoding, self.positions.num_prefix, self.positions.num_tokens
        state = self.stack.prepare(self.positions)[self.layer]
        signed = any(overrides(encoding, "attend") for encoding in state.encodings)
        total = torch.zeros(count, e.num_heads, device=self.positions.coords.device)
        for _ in range(_SAMPLES // 4):
            q, k = self.random(2, 1, e.num_heads, count, e.head_dim)
            x = self.random(1, count, e.dim)
            for marked in torch.arange(count, device=total.device).split(32):
                size = len(marked)
                v = torch.zeros(size, e.num_heads, count, e.head_dim, device=total.device)
                v[torch.arange(size), :, marked] = 1
                one = (q.expand(size, -1, -1, -1), k.expand(size, -1, -1, -1), v)
                change = attend(*one, state, x=x.expand(size, -1, -1)) - attend(*one)
                change = change[:, :, prefix + self.centre]
                total[marked] += (change.mean(-1) if signed else change.square().mean(-1).sqrt()) / (_SAMPLES // 4)
        what = (
            "attention of the reference query: gain over no encoding" if signed else "reach of the change of the output"
        )
        values = (total.T * (count if signed else 1))[:, prefix:]
        unit = "weight x tokens" if signed else "size of the change"
        return [self.panel(what, title, value, unit) for title, value in _heads(values)]

    def panel(self, group: str, title: str, values: Tensor, unit: str) -> Panel:
        """A map over the places of the raster from values ``(N,)``."""
        values = _plane(values.reshape(self.grid), self.reference)
        return Panel(group, title, values, _last_two(self.reference), False, unit)


def _heads(values: Tensor) -> list[tuple[str, Tensor]]:
    """Maps ``(heads, ...)`` with titles; a single one when all heads agree."""
    if len(values) == 1:
        return [("", values[0])]
    if torch.allclose(values, values[:1].expand_as(values), rtol=1e-4, atol=1e-5, equal_nan=True):
        return [("every head", values[0])]
    return [(f"head {head}", value) for head, value in enumerate(values[:MAX_HEADS])]


def _plane(values: Tensor, reference: Sequence[int]) -> Tensor:
    """The last two axes at the reference of the others; one axis becomes one row."""
    for cell in reference[: max(0, values.dim() - 2)]:
        values = values[cell]
    return (values[None] if values.dim() == 1 else values).detach().cpu().float()


def _last_two(cell: Sequence[int]) -> tuple[int, int]:
    return (0, cell[0]) if len(cell) == 1 else (cell[-2], cell[-1])


def _build(
    name: str, grid: tuple[int, ...], dim: int, num_heads: int, seed: int, options: dict[str, Any]
) -> EncodingStack:
    low, high = encoding_class(name).facts.axes
    if not low <= len(grid) <= high:
        raise ValueError(
            f"grid: {name} has {low} to {high} axes, got {grid}; give as many sizes, for example {(14,) * max(low, 1)}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return create_encoding(name, dim, num_heads, train_grid=grid, **options)


# -- drawing ------------------------------------------------------------------------------------------------------


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that draws without a display and leaves no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('pictures are drawn with matplotlib; install it with pip install "mmpos[plot]"') from error
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _title(stack: EncodingStack, grid: tuple[int, ...], layer: int) -> str:
    own: Any = stack.layers
    where = f", layer {layer}" if stack.depth > 1 and any(len(module) for module in own) else ""
    titles = " + ".join(encoding_class(name).facts.title for name in stack.names)
    return f"{titles} on a {' x '.join(map(str, grid))} grid{where}"


def _draw(panels: list[Panel], title: str) -> Figure:
    groups: dict[str, list[Panel]] = {}
    for panel in panels:
        groups.setdefault(panel.group, []).append(panel)
    if not groups:
        figure = new_figure(5.2, 1.6)
        figure.suptitle(title, fontsize=12, fontweight="bold")
        figure.text(
            0.5, 0.4, "does not act on tokens, queries, keys or logits", ha="center", color="#5b6b7b", fontsize=10
        )
        return figure
    columns = max(map(len, groups.values()))
    cell = 3.0 if columns <= 3 else 2.35
    ratio = max(panel.values.shape[0] / panel.values.shape[1] for panel in panels)
    texts = max(0.115 * len(title), 0.085 * max(map(len, groups))) + 0.4  # inches that title and group names need
    figure = new_figure(
        max(4.6, texts, cell * columns + 1.1), (max(0.8, cell * min(ratio, 1.6)) + 0.75) * len(groups) + 0.5
    )
    figure.suptitle(title, fontsize=12.5, fontweight="bold")
    rows: Any = figure.subfigures(len(groups), 1, squeeze=False)[:, 0]
    for row, (group, members) in zip(rows, groups.items(), strict=True):
        row.suptitle(group, fontsize=10.5, color="#33414e")
        axes = row.subplots(1, len(members), squeeze=False)[0]
        scale = _scale(members)
        image = None
        for axis, panel in zip(axes, members, strict=True):
            image = _draw_panel(axis, panel, *scale)
        bar = row.colorbar(image, ax=list(axes), fraction=0.05, pad=0.02)
        bar.set_label(members[0].unit, fontsize=8.5)
        bar.ax.tick_params(labelsize=8)
        bar.outline.set_visible(False)
    return figure


def _scale(panels: list[Panel]) -> tuple[str, float, float]:
    """Colours and limits of a group: two-sided about zero when both signs matter, else from smallest to largest."""
    values = torch.cat([panel.values.reshape(-1) for panel in panels])
    values = values[values.isfinite()]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    if high - low < 1e-9:
        return "cividis", low - 1.0, high + 1.0
    if min(-low, high) > 0.02 * max(-low, high):
        high = max(-low, high)
        return "RdBu_r", -high, high
    return "cividis", low, high


def _draw_panel(axis: Any, panel: Panel, colours: str, low: float, high: float) -> Any:
    rows, columns = panel.values.shape
    row, column = panel.reference
    shift_row, shift_column = (row, column) if panel.offsets else (0, 0)
    extent = (-0.5 - shift_column, columns - 0.5 - shift_column, rows - 0.5 - shift_row, -0.5 - shift_row)
    image = axis.imshow(
        panel.values.numpy(),
        cmap=colours,
        vmin=low,
        vmax=high,
        extent=extent,
        interpolation="nearest",
        aspect="equal" if rows > 1 else "auto",
    )
    axis.set_facecolor("#d7dce2")  # masked cells
    axis.plot(column - shift_column, row - shift_row, marker="o", ms=5, mfc="white", mec="black", mew=1.1)
    axis.set_title(panel.title, fontsize=9)
    axis.tick_params(labelsize=7.5, length=2.5)
    axis.locator_params(integer=True, nbins=5)
    axis.set_xlabel("column offset" if panel.offsets else "column", fontsize=8.5)
    if rows > 1:
        axis.set_ylabel("row offset" if panel.offsets else "row", fontsize=8.5)
    else:
        axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_visible(False)
    if float(panel.values.nan_to_num().abs().max()) == 0:
        axis.text(
            0.5, 0.06, "zero at initialisation", transform=axis.transAxes, ha="center", fontsize=8, color="#33414e"
        )
    return image
