"""Names to encodings: :func:`create_encoding` and :func:`list_encodings`; :class:`EncodingStack` for models."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mmpos.encodings.base import PositionEncoding, overrides
from mmpos.positions import Positions

__all__ = [
    "EncodingStack",
    "LayerState",
    "create_encoding",
    "encoding_class",
    "encoding_options",
    "list_encodings",
    "register",
]

_REGISTRY: dict[str, type[PositionEncoding]] = {}
_COMMON = ("dim", "num_heads", "head_dim", "axes", "num_prefix", "train_grid")

E = TypeVar("E", bound=type[PositionEncoding])
Spec = str | tuple[str, Mapping[str, Any]]


def register(name: str) -> Callable[[E], E]:
    """Class decorator that makes an encoding known under ``name``. User code may register its own."""

    def add(cls: E) -> E:
        if name in _REGISTRY and _REGISTRY[name].__module__ != cls.__module__:
            raise ValueError(f"name: {name!r} is already registered by {_REGISTRY[name].__module__}")
        if not hasattr(cls, "facts"):
            raise ValueError(f"facts: {cls.__name__} must state its facts (mmpos.encodings.base.Facts)")
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return add


def load_all() -> None:
    """Import every module of ``mmpos.encodings`` so that its classes register."""
    import mmpos.encodings as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def list_encodings() -> list[str]:
    """Names of all encodings, sorted.

    Example:
        >>> "rope_mixed" in list_encodings()
        True
    """
    return sorted(_REGISTRY)


def encoding_class(name: str) -> type[PositionEncoding]:
    """The class behind a name; an unknown name suggests the nearest ones."""
    if name not in _REGISTRY:
        near = difflib.get_close_matches(name, _REGISTRY, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ValueError(
            f"name: no encoding is called {name!r}; {hint}`mmpos list` shows all: {', '.join(list_encodings())}"
        )
    return _REGISTRY[name]


def encoding_options(name: str) -> dict[str, Any]:
    """Options of an encoding and their defaults, without the arguments that come from the model."""
    skip = {*_COMMON, "self"}
    options: dict[str, Any] = {}
    for cls in encoding_class(name).__mro__:  # a class passes what it does not know to its base by **keywords
        if not issubclass(cls, PositionEncoding):
            break
        for key, parameter in inspect.signature(cls.__init__).parameters.items():
            if key not in skip and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                options.setdefault(key, parameter.default)
    return options


class LayerState(NamedTuple):
    """What one attention layer needs: its encodings, what they prepared, and the padding mask ``(B, 1, 1, P + N)``."""

    encodings: tuple[PositionEncoding, ...]
    prepared: tuple[Any, ...]
    mask: Tensor | None


class EncodingStack(nn.Module):
    """All position encodings of one model: those that serve the whole model and those each layer owns.

    Made by :func:`create_encoding`. Parameters appear as ``shared.<name>.*`` and ``layers.<i>.<name>.*``.

    Example:
        >>> stack = create_encoding("rope_mixed", dim=32, num_heads=2, depth=3)
        >>> states = stack.prepare(Positions.grid(2, 3, num_prefix=1))
        >>> len(states), stack.layers[0]["rope_mixed"].freqs.shape
        (3, torch.Size([2, 2, 8]))
    """

    def __init__(
        self,
        names: Sequence[str],
        shared: Mapping[str, PositionEncoding],
        layers: Sequence[Mapping[str, PositionEncoding]],
    ):
        super().__init__()
        self.names = tuple(names)
        self.shared = nn.ModuleDict(dict(shared))
        self.layers = nn.ModuleList(nn.ModuleDict(dict(layer)) for layer in layers)
        owners = [e for e in self.encodings_of(0) if e.owns_attention]
        if len(owners) > 1:
            raise ValueError(
                f"name: {' and '.join(e.name for e in owners)} each replace the whole attention and cannot be "
                "combined; keep one of them"
            )
        for encoding in self.encodings_of(0):
            encoding.check_depth(self.depth)

    @property
    def depth(self) -> int:
        """Number of attention layers."""
        return len(self.layers)

    @property
    def title(self) -> str:
        """Names joined by ``+``."""
        return "+".join(self.names)

    def encodings_of(self, layer: int) -> tuple[PositionEncoding, ...]:
        """The encodings that act in a layer, in the order they were named."""
        own: Any = self.layers[layer]
        shared: Any = self.shared
        return tuple(own[name] if name in own else shared[name] for name in self.names)

    def prepare(self, positions: Positions) -> tuple[LayerState, ...]:
        """Everything the attention layers need for these positions, once per forward pass; one state per layer."""
        mask = positions.token_mask()
        mask = None if mask is None else mask[:, None, None]
        once = {name: encoding.prepare(positions) for name, encoding in self.shared.items()}  # type: ignore[operator]
        # what only positions decide is computed on the first layer and handed to all of them
        common = {
            encoding.name: (encoding.prepare_shared(positions),)
            for encoding in self.encodings_of(0)
            if encoding.name not in once and overrides(encoding, "prepare_shared")
        }
        states = []
        for layer in range(self.depth):
            encodings = self.encodings_of(layer)
            prepared = tuple(
                encoding.at_layer(
                    once[name] if name in once else encoding.prepare(positions, *common.get(name, ())),
                    layer,
                    self.depth,
                )
                for name, encoding in zip(self.names, encodings, strict=True)
            )
            states.append(LayerState(encodings, prepared, mask))
        return tuple(states)

    @property
    def needs_image(self) -> bool:
        """Whether :meth:`add_to_tokens` must be given the image, because an encoding reads it."""
        return any(encoding.needs_image for encoding in self.encodings_of(0))

    def add_to_tokens(self, x: Tensor, positions: Positions, image: Tensor | None = None) -> Tensor:
        """Token hook of every model-wide encoding; ``image`` goes to those that read it and is ignored by the rest.

        Shape:
            x ``(B, P + N, D)`` in and out, image ``(B, channels, height, width)``.
        """
        self._check(x, positions)
        for encoding in self.shared.values():
            extra = {"image": image} if encoding.facts.needs_image else {}  # type: ignore[union-attr]
            x = encoding.add_to_tokens(x, positions, **extra)  # type: ignore[operator]
        return x

    def mix_tokens(self, layer: int, x: Tensor, positions: Positions) -> Tensor:
        """Hook between blocks, after block ``layer``. Shape: ``(B, P + N, D)`` in and out."""
        self._check(x, positions)
        for encoding in self.encodings_of(layer):
            x = encoding.mix_tokens(x, positions, layer)
        return x

    def _check(self, x: Tensor, positions: Positions) -> None:
        positions.check_tokens(x)
        dim = self.encodings_of(0)[0].dim
        if not torch.jit.is_tracing() and x.shape[-1] != dim:
            raise ValueError(
                f"x: expected {dim} channels, the dim {self.title} was built for, got {x.shape[-1]} in {tuple(x.shape)}"
            )

    def set_resolution(self, rule: str) -> None:
        """Set the resolution rule of every encoding that knows it; raises when none does."""
        found = False
        for module in self.modules():
            if isinstance(module, PositionEncoding) and rule in module.facts.resolution_rules:
                module.set_resolution(rule)
                found = True
        if not found:
            raise ValueError(f"resolution: {self.title} supports {list(self.resolution_rules())}, got {rule!r}")

    def resolution_rules(self) -> tuple[str, ...]:
        """Rules that at least one encoding knows, defaults first."""
        rules = [rule for encoding in self.encodings_of(0) for rule in encoding.facts.resolution_rules]
        return tuple(dict.fromkeys(rules))

    def no_weight_decay(self) -> set[str]:
        """Names, relative to the stack, of parameters that must not decay."""
        names = set()
        for prefix, module in self.named_modules():
            if isinstance(module, PositionEncoding):
                names |= {f"{prefix}.{name}" for name in module.no_weight_decay()}
        return names

    def reset_parameters(self) -> None:
        """Initialise all encodings, for example after ``to_empty``."""
        for module in self.modules():
            if isinstance(module, PositionEncoding):
                module.reset_parameters()

    def init_non_persistent_buffers(self) -> None:
        """Nothing to do, as no encoding keeps derived tables; timm calls it after construction on the meta device."""


def _sizes(train_grid: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in train_grid)
    except (TypeError, ValueError):
        sizes = ()
    if not sizes or any(size < 1 or size != given for size, given in zip(sizes, train_grid, strict=True)):
        raise ValueError(
            f"train_grid: expected positive whole sizes, height before width, for example (14, 14), got {train_grid!r}"
        )
    return sizes


def create_encoding(
    name: Spec | Sequence[Spec],
    dim: int,
    num_heads: int,
    depth: int = 1,
    *,
    head_dim: int | None = None,
    axes: int | None = None,
    num_prefix: int = 0,
    train_grid: Sequence[int] | None = None,
    per_layer: bool | None = None,
    **options: Any,
) -> EncodingStack:
    """Build one encoding, or several that act together, for a transformer of ``depth`` layers.

    Args:
        name: a registry name, a pair ``(name, options)``, or a sequence of these: ``["learned", "rope_mixed"]``.
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        depth: number of layers.
        head_dim: width of a head; default ``dim / num_heads``.
        axes: coordinate axes; default the length of ``train_grid``, else 2.
        num_prefix: tokens in front without a place (CLS, registers).
        train_grid: sizes of the training grid, height before width.
        per_layer: whether each layer owns its parameters; default as the method says.
        options: options of the encoding when ``name`` is a single name.

    Example:
        >>> create_encoding("rope_axial", dim=64, num_heads=2, depth=4, theta=100.0).title
        'rope_axial'
    """
    if isinstance(name, str):
        specs: list[tuple[str, Mapping[str, Any]]] = [(name, options)]
    elif isinstance(name, tuple) and len(name) == 2 and isinstance(name[0], str) and isinstance(name[1], Mapping):
        specs = [(name[0], {**name[1], **options})]
    else:
        if options:
            raise ValueError(
                f"options: with several encodings give options as pairs (name, options), got {sorted(options)}"
            )
        specs = []
        for entry in name:
            if isinstance(entry, str):
                specs.append((entry, {}))
            elif (
                not isinstance(entry, Mapping)
                and len(entry) == 2
                and isinstance(entry[0], str)
                and isinstance(entry[1], Mapping)
            ):
                specs.append((entry[0], entry[1]))
            else:
                raise ValueError(f"name: expected names or pairs (name, options), got {entry!r} in {list(name)}")
    names = [entry for entry, _ in specs]
    if not names:
        raise ValueError("name: expected at least one encoding; use 'none' for no position encoding")
    if len(set(names)) != len(names):
        raise ValueError(f"name: expected different encodings, got {names}")
    if depth < 1:
        raise ValueError(f"depth: expected at least 1 layer, got {depth}")
    train_grid = None if train_grid is None else _sizes(train_grid)
    if axes is None:
        axes = 2 if train_grid is None else len(train_grid)
    common: dict[str, Any] = {"head_dim": head_dim, "axes": axes, "num_prefix": num_prefix, "train_grid": train_grid}
    shared: dict[str, PositionEncoding] = {}
    layers: list[dict[str, PositionEncoding]] = [{} for _ in range(depth)]
    for entry, given in specs:
        cls = encoding_class(entry)
        known = encoding_options(entry)
        unknown = [option for option in given if option not in known]
        if unknown:
            raise ValueError(
                f"options: {entry} has no option {', '.join(map(repr, unknown))}; its options are {sorted(known)}"
            )
        own = cls.facts.scope == "layer" if per_layer is None else per_layer
        if own and overrides(cls, "add_to_tokens"):
            raise ValueError(f"per_layer: {entry} acts on the tokens before the first block and cannot be per layer")
        if own:
            for layer in layers:
                layer[entry] = cls(dim, num_heads, **common, **given)
        else:
            shared[entry] = cls(dim, num_heads, **common, **given)
    return EncodingStack(names, shared, layers)
