"""The rotary side of an attachment: an instance module that makes the tables, and what layers do with them."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.functional.rotary import Rotation
from mmpos.multimodal import Allocation, channel_tables, rotary_angles, rotate_grouped

__all__ = ["IDS", "SchemeRotary", "by_head_forward", "check_heads", "pick_variant", "rotate_projection", "table_layout"]

#: ids ``(V, A, B, L)`` of the forward pass in progress; the model's own ids argument stays an ordinary range
IDS: ContextVar[Tensor | None] = ContextVar("mmpos_ids", default=None)
_HEADS: ContextVar[Rotation | None] = ContextVar("mmpos_heads", default=None)


class SchemeRotary(nn.Module):
    """Stands in for the ``rotary_emb`` of one decoder: ids of the scheme to cosine and sine tables.

    Args:
        allocation: which axis each pair reads.
        ladder: inverse frequencies ``(pairs,)``, float32; kept out of buffers so that casting the model leaves them.
        scaling: factor of cosines and sines (YaRN).
        layout: ``half`` or ``interleaved`` channels, as the model expects its tables.
        by_axis: whether the model expects one table for each axis and picks sections of them itself; it then gets
            views of the one table, whose sections are what the scheme says.

    Shape:
        Cosine and sine ``(B, L, 2 pairs)``; ``(V, B, L, 2 pairs)`` when layers differ; ``(B, kv heads, L, pairs)``
        when heads differ. With ``by_axis`` one more dimension of three before the batch, unless heads differ.
    """

    def __init__(
        self, allocation: Allocation, ladder: Tensor, scaling: float, layout: str, by_axis: bool = False
    ) -> None:
        super().__init__()
        self.allocation = allocation
        self.ladder = ladder
        self.scaling = scaling
        self.layout = layout
        self.by_axis = by_axis

    @property
    def by_head(self) -> bool:
        """Whether key/value heads read different axes."""
        return self.allocation.axis.dim() == 2

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Tables of the pass in progress; outside of one, of the ids given."""
        ids = IDS.get()
        if ids is None:
            ids = position_ids[None] if position_ids.dim() == 2 else position_ids
            axes = max(int(self.allocation.axis.max()) + 1, 1)
            ids = (ids.expand(axes, -1, -1) if ids.shape[0] == 1 else ids)[None]
        if self.ladder.device != x.device:
            self.ladder = self.ladder.to(x.device)
        tables = [self._table(variant, x.dtype) for variant in ids.to(x.device)]
        cos, sin = (part[0] if len(part) == 1 else torch.stack(part) for part in zip(*tables, strict=True))
        if self.by_axis and not self.by_head:
            return for_each_axis(cos), for_each_axis(sin)
        return cos, sin

    def _table(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        with torch.autocast(ids.device.type, enabled=False):
            angles = rotary_angles(ids, self.allocation, 1.0, self.ladder)
            if self.by_head:
                return angles.cos() * self.scaling, angles.sin() * self.scaling
            cos, sin = channel_tables(angles[:, 0], self.layout)
            return (cos * self.scaling).to(dtype), (sin * self.scaling).to(dtype)


def for_each_axis(table: Tensor) -> Tensor:
    """One table seen as three, without copies. Shape: ``(..., B, L, D)`` to ``(..., 3, B, L, D)``."""
    return table.unsqueeze(-4).expand(*table.shape[:-3], 3, *table.shape[-3:])


def table_layout(own: Any, multi_axis: bool, like: Tensor) -> tuple[str, bool]:
    """Channel layout of a model's rotary module and whether it gives one table for each axis, found by asking it for a
    table; anything unknown is refused.
    """
    places = torch.tensor([[0, 1, 5]], device=like.device)
    try:
        cos, sin = own(like, places[None].expand(3, -1, -1) if multi_axis else places)
        angles = places[..., None].float() * own.inv_freq.float()
        by_axis = multi_axis and cos.shape[:-2] == (3, 1)  # Qwen-VL of transformers before 5.14
        if by_axis:
            cos, sin = cos[0], sin[0]
        for layout in ("half", "interleaved"):
            expected = [table * own.attention_scaling for table in channel_tables(angles, layout)]
            if cos.shape == expected[0].shape and all(
                torch.allclose(found.float(), wanted, atol=1e-2)
                for found, wanted in zip((cos, sin), expected, strict=True)
            ):
                return layout, by_axis
    except (TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"model: the rotary module {type(own).__name__} does not work as expected: {error}") from error
    raise ValueError(f"model: the tables of {type(own).__name__} have a layout this adapter does not know")


def pick_variant(variant: int, count: int) -> Any:
    """Pre-hook of an attention module: the tables and the pattern of its layer out of those of all variants."""

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        cos, sin = kwargs["position_embeddings"]
        kwargs = {**kwargs, "position_embeddings": (cos[variant], sin[variant])}
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] == count:
            kwargs["attention_mask"] = mask[:, variant : variant + 1]
        return args, kwargs

    return hook


def by_head_forward(original: Any, pairing: str, by_axis: bool, *args: Any, **kwargs: Any) -> Any:
    """Forward of an attention module whose heads read different axes, around its ``original`` one.

    The module itself gets a table that turns nothing; queries and keys are turned as they leave their projection (or
    its norm), so the cache holds turned keys as usual.
    """
    cos, sin = kwargs.pop("position_embeddings")
    still = torch.ones(cos.shape[0], cos.shape[2], 2 * cos.shape[-1], device=cos.device)
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    still = still if hidden is None else still.to(hidden.dtype)
    still = for_each_axis(still) if by_axis else still
    token = _HEADS.set(Rotation(pairing, cos, sin))
    try:
        return original(*args, position_embeddings=(still, torch.zeros_like(still)), **kwargs)
    finally:
        _HEADS.reset(token)


def rotate_projection(head_dim: int) -> Any:
    """Forward hook of a query or key projection, or of the norm behind it."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        rotation = _HEADS.get()
        if rotation is None:
            return output
        heads = output.reshape(*output.shape[:2], -1, head_dim).transpose(1, 2)
        return rotate_grouped(heads, rotation).transpose(1, 2).reshape(output.shape)

    return hook


@torch.no_grad()
def check_heads(attention: Any, by_head: SchemeRotary, like: Tensor) -> str:
    """Why heads of an attention module cannot be turned one by one; empty when they can.

    On text all axes agree, so the module has to give what it gives with one table for all heads: one that clamps, norms
    or turns its queries and keys in a way of its own does not.
    """
    if like.device.type == "meta":
        return ""
    one = Allocation(torch.zeros_like(by_head.allocation.axis[0]), by_head.allocation.exponent)
    plain = SchemeRotary(one, by_head.ladder, by_head.scaling, by_head.layout, by_head.by_axis)
    width = int(getattr(attention.config, "hidden_size", like.shape[-1]))
    generator = torch.Generator().manual_seed(0)
    x = (8 * torch.randn(1, 5, width, generator=generator)).to(like.device, like.dtype)
    places = torch.arange(5, device=like.device)[None]
    training, forward = attention.training, attention.forward
    attention.eval()
    try:
        found = forward(hidden_states=x, position_embeddings=by_head(x, places), attention_mask=None)[0]
        wanted = forward.args[0](hidden_states=x, position_embeddings=plain(x, places), attention_mask=None)[0]
    except Exception as error:  # whatever a module of another kind raises, the answer is that it cannot be hosted
        return f"it raised {type(error).__name__}: {error}".splitlines()[0]
    finally:
        attention.train(training)
    away = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))
    limit = 1e-4 if like.dtype in (torch.float32, torch.float64) else 0.05
    return "" if away < limit else f"its output on text changes by {100 * away:.0f} %"
