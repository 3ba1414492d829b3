"""The protocol: what an encoding may do to a transformer, and the facts each one states about itself.

::

    tokens --add_to_tokens-->
    [ block: qkv --transform_qkv--> softmax(q k^T s + logit_bias) v --transform_output--> proj, mlp ]
    --mix_tokens--> next block

A method overrides the hooks where it acts and leaves the rest alone. ``prepare`` runs once per forward pass and returns
an immutable value (tables, bucket indices) that the other hooks receive; no hook stores anything on the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmpos.positions import Positions

__all__ = ["BiasSlice", "Facts", "PositionEncoding", "ScoreMod", "score_of_pairs"]

#: samples, heads, and the bias of these
BiasSlice = tuple[slice, slice, Tensor]

#: score, sample, head, query and key to the changed score, as ``flex_attention`` takes it
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

HOOKS = ("add_to_tokens", "mix_tokens", "transform_qkv", "logit_bias", "transform_output", "attend")


@dataclass(frozen=True)
class Facts:
    """What is true of an encoding, for tables, checks and error messages.

    Args:
        title: name as the field writes it.
        source: paper and arXiv id.
        plugs_into: where it acts: ``tokens``, ``qk``, ``qkvo``, ``bias``, ``conv``.
        axes: smallest and largest number of coordinate axes.
        scope: ``model`` when one module serves all layers, ``layer`` when each layer owns its parameters.
        needs_grid: whether it works only on a raster.
        fractional: whether coordinates may be real numbers.
        resolution_rules: how it can meet a grid other than the training grid; the first one is the default.
        head_dim_rule: the constraint on the head dimension in words, empty when there is none.
        relative: whether attention depends on coordinate differences only.
        learned: whether it has parameters.
        exportable: whether ``torch.export`` with dynamic height and width is supported.
        needs_image: whether ``add_to_tokens`` takes the image as a third argument ``image``.
    """

    title: str
    source: str
    plugs_into: tuple[str, ...]
    axes: tuple[int, int] = (1, 4)
    scope: str = "model"
    needs_grid: bool = False
    fractional: bool = True
    resolution_rules: tuple[str, ...] = ("index",)
    head_dim_rule: str = ""
    relative: bool = False
    learned: bool = False
    exportable: bool = True
    needs_image: bool = False


class PositionEncoding(nn.Module):
    """Base of all encodings: hooks that do nothing, and the arguments every encoding takes.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        head_dim: width of a head ``d``; default ``dim / num_heads``.
        axes: coordinate axes ``A``.
        num_prefix: leading tokens without a place; only encodings with parameters for them read it.
        train_grid: sizes of the training grid.
        resolution: one of ``facts.resolution_rules``; default the first.
    """

    facts: ClassVar[Facts]
    name: ClassVar[str] = ""
    #: parameters and buffers that stay in float32 when the model is cast to half precision (frequencies: 8 bits lose
    # the position)
    fp32_parameters: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        axes: int = 2,
        num_prefix: int = 0,
        train_grid: Sequence[int] | None = None,
        resolution: str | None = None,
    ) -> None:
        super().__init__()
        if dim < 1 or num_heads < 1 or (head_dim is not None and head_dim < 1):
            raise ValueError(
                f"dim, num_heads, head_dim: expected positive integers, got dim {dim}, num_heads {num_heads}, head_dim "
                f"{head_dim}"
            )
        if head_dim is None:
            if dim % num_heads:
                raise ValueError(
                    f"dim: expected a multiple of num_heads, got dim {dim} and num_heads {num_heads}; change one of "
                    "them or give head_dim"
                )
            head_dim = dim // num_heads
        low, high = self.facts.axes
        if not low <= axes <= high:
            raise ValueError(f"axes: {self.name} supports {low} to {high} axes, got {axes}")
        if train_grid is not None and len(train_grid) != axes:
            raise ValueError(f"train_grid: expected {axes} sizes for axes={axes}, got {tuple(train_grid)}")
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.axes = axes
        self.num_prefix = num_prefix
        self.train_grid = None if train_grid is None else tuple(int(size) for size in train_grid)
        self.set_resolution(resolution or self.facts.resolution_rules[0])

    # -- hooks ----------------------------------------------------------------------------------------------------

    def prepare(self, positions: Positions) -> Any:
        """What depends on positions and parameters only, once per forward pass. Returns an immutable value.

        A method that overrides :meth:`prepare_shared` takes its result as an optional second argument.
        """
        return None

    def prepare_shared(self, positions: Positions) -> Any:
        """What depends on positions only and is the same in every layer (bucket indices).

        The stack calls it on the first layer, once per forward pass, and hands the result to ``prepare`` of every
        layer.
        """
        return None

    def at_layer(self, prepared: Any, layer: int, depth: int) -> Any:
        """What one of ``depth`` layers receives of a model-wide ``prepared``, for schedules over layers."""
        return prepared

    def check_depth(self, depth: int) -> None:
        """Raise when an option names a layer that a model of ``depth`` layers does not have."""

    @property
    def owns_attention(self) -> bool:
        """Whether :meth:`attend` replaces the fused attention; by default when the method overrides it."""
        return overrides(self, "attend")

    @property
    def needs_image(self) -> bool:
        """Whether :meth:`add_to_tokens` must be given the image; by default what the facts say."""
        return self.facts.needs_image

    @property
    def circular(self) -> bool:
        """Whether tokens that are shifted circularly on their grid give the shifted result, whatever the shift."""
        return False

    def add_to_tokens(self, x: Tensor, positions: Positions) -> Tensor:
        """Change the token sequence before the first block. Shape: ``(B, P + N, D)`` in and out.

        A method whose facts say ``needs_image`` takes ``image`` ``(B, channels, height, width)`` as a third argument.
        """
        return x

    def mix_tokens(self, x: Tensor, positions: Positions, layer: int) -> Tensor:
        """Change the token sequence after block ``layer``. Shape: ``(B, P + N, D)`` in and out."""
        return x

    def transform_qkv(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, x: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Change queries, keys and values; ``x`` is the input of the attention layer.

        Queries and keys may gain columns; the scale stays that of ``d``. Shape: each ``(B, heads, P + N, d)``, x
        ``(B, P + N, D)``.
        """
        return q, k, v

    def logit_bias(self, q: Tensor, k: Tensor, prepared: Any) -> Tensor | None:
        """A term added to the attention logits, broadcastable to ``(B, heads, P + N, P + N)``."""
        return None

    def logit_bias_slices(self, q: Tensor, k: Tensor, prepared: Any) -> Iterator[BiasSlice] | None:
        """:meth:`logit_bias` slice by slice of batch and heads, where that is faster; ``None`` where it is not."""
        return None

    def score_mod(self, q: Tensor, k: Tensor, prepared: Any) -> ScoreMod | None:
        """:meth:`logit_bias` as a function of single pairs, for ``flex_attention``; by default it reads that bias.

        Methods with a table override it, so that no bias of all pairs is made.
        """
        bias = self.logit_bias(q, k, prepared)
        return None if bias is None else score_of_pairs(bias.to(q.dtype))

    def transform_output(self, out: Tensor, v: Tensor, prepared: Any) -> Tensor:
        """Change the attention output before heads are merged. Shape: ``(B, heads, P + N, d)`` in and out."""
        return out

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prepared: Any,
        *,
        bias: Tensor | None,
        scale: float,
        dropout_p: float,
        plain: bool,
    ) -> Tensor:
        """The whole attention, overridden only by methods that need the attention probabilities themselves."""
        raise NotImplementedError

    # -- resolution -----------------------------------------------------------------------------------------------

    def set_resolution(self, rule: str) -> None:
        """Choose how the encoding meets a grid other than the training grid."""
        if rule not in self.facts.resolution_rules:
            raise ValueError(
                f"resolution: {self.name} supports {list(self.facts.resolution_rules)}, got {rule!r}; set resolution= "
                "to one of them"
            )
        self.resolution = rule

    def training_grid(self, positions: Positions) -> tuple[int, ...]:
        """Training sizes: those of the encoding, else those of the positions; raises when neither is known."""
        grid = self.train_grid if self.train_grid is not None else positions.train_grid
        if grid is None:
            raise ValueError(
                f"train_grid: resolution={self.resolution!r} of {self.name} compares the grid with the training grid, "
                "which is not known; give train_grid= to create_encoding"
            )
        return grid

    # -- parameters -----------------------------------------------------------------------------------------------

    def reset_parameters(self) -> None:
        """Initialise the parameters; call it after ``to_empty`` when the model was built on the meta device."""

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that must not decay; by default all of them: a position is not a weight."""
        return {name for name, _ in self.named_parameters()}

    def check_axes(self, positions: Positions) -> None:
        """Raise unless the positions have the axes the encoding was built for."""
        if not torch.jit.is_tracing() and positions.axes != self.axes:
            raise ValueError(
                f"positions: {self.name} was built for {self.axes} axes, got coordinates with {positions.axes}"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PositionEncoding:
        own: dict[str, Tensor | None] = {**self._parameters, **self._buffers}
        parameters = [p for p in (own.get(name) for name in self.fp32_parameters) if p is not None]
        kept = {id(tensor) for p in parameters for tensor in (p, p.grad) if tensor is not None}

        def keep_float32(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            narrowed = tensor.dtype in (torch.float32, torch.float64) and out.dtype in (torch.float16, torch.bfloat16)
            if id(tensor) in kept and narrowed:
                return tensor.to(out.device) if out.device != tensor.device else tensor
            return out

        super()._apply(keep_float32, recurse)
        return self

    def extra_repr(self) -> str:
        """Shown in ``print(model)``."""
        text = (
            f"{self.dim}, {self.num_heads}, head_dim={self.head_dim}, axes={self.axes}, resolution={self.resolution!r}"
        )
        return text if self.train_grid is None else f"{text}, train_grid={self.train_grid}"


def wide_dtype() -> torch.dtype:
    """Dtype of ``fp32_parameters``: the default dtype, or float32 when a loader has made the default half precision."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def score_of_pairs(bias: Tensor) -> ScoreMod:
    """A ``score_mod`` that adds a bias, or bars what a boolean mask does not allow.

    Shape: ``(B or 1, heads or 1, L, L)``, or fewer leading axes.
    """
    bias = bias[(None,) * (4 - bias.dim())]
    samples, heads = bias.shape[:2]
    if bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape, device=bias.device).masked_fill(~bias, float("-inf"))
    return lambda score, b, h, i, j: score + bias[b % samples, h % heads, i, j]


def overrides(encoding: PositionEncoding | type[PositionEncoding], hook: str) -> bool:
    """Whether a method implements a hook itself."""
    cls = encoding if isinstance(encoding, type) else type(encoding)
    return getattr(cls, hook) is not getattr(PositionEncoding, hook)
