"""Reading checkpoints: weights only, never pickled code, and errors that say which file and what else there is."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["load_state", "load_weights", "model_state", "newest_checkpoint", "plain_name", "read_checkpoint"]

WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def newest_checkpoint(folder: Path) -> Path | None:
    """``last.ckpt`` of a checkpoint folder, else the newest by step, else ``None``."""
    if (folder / "last.ckpt").is_file():
        return folder / "last.ckpt"
    steps = {path: int(found[1]) for path in folder.glob("*.ckpt") if (found := re.fullmatch(r"\d+-(\d+)", path.stem))}
    return max(steps, key=steps.__getitem__) if steps else None


def read_checkpoint(path: Path | str) -> dict[str, Any]:
    """Content of a Lightning or timm checkpoint, or of a safetensors file, on the CPU."""
    path = Path(path)
    others = sorted(other.name for other in path.parent.glob("*.ckpt") if other != path) if path.parent.is_dir() else []
    hint = f"; the folder also holds {', '.join(others)}" if others else ""
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint: no file {path}{hint}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return {"state_dict": load_file(path)}
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's own message advises to allow pickled code
        raise ValueError(
            f"checkpoint: {path} cannot be read, it is damaged or holds more than weights{hint}"
        ) from error
    except Exception as error:  # zip, pickle and safetensors each raise types of their own
        raise ValueError(f"checkpoint: {path} cannot be read, it is damaged ({_first_line(error)}){hint}") from error
    if not isinstance(content, dict):
        raise ValueError(f"checkpoint: {path} holds a {type(content).__name__}, expected a dict of tensors{hint}")
    return content


def model_state(content: dict[str, Any]) -> dict[str, Tensor]:
    """Weights of the inner network from a run of this package (``model.*``) or from timm, names without wrappers."""
    state = next(
        (content[key] for key in ("state_dict", "model", "state_dict_ema") if isinstance(content.get(key), dict)),
        content,
    )
    tensors = {plain_name(name): value for name, value in state.items() if isinstance(value, Tensor)}
    own = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    return own or tensors


def load_weights(model: nn.Module, path: Path | str, *, fresh: Sequence[str] = ()) -> None:
    """Load the weights of a checkpoint into a model; every missing, unknown or misshapen name is listed.

    Args:
        model: the model.
        path: the checkpoint.
        fresh: shell patterns of names that stay as they are, whether the checkpoint has them or not.
    """
    load_state(model, model_state(read_checkpoint(path)), path, fresh=fresh)


def load_state(model: nn.Module, state: dict[str, Tensor], path: Path | str, *, fresh: Sequence[str] = ()) -> None:
    """:func:`load_weights` of a state that was read already; the path is for the error."""
    own = model.state_dict()
    if fresh:
        keep = lambda name: not any(fnmatchcase(name, pattern) for pattern in fresh)  # noqa: E731
        state = {name: value for name, value in state.items() if keep(name)}
        own = {name: value for name, value in own.items() if keep(name)}
    missing = sorted(set(own) - set(state))
    unknown = sorted(set(state) - set(own))
    shapes = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(own[name].shape)}"
        for name in sorted(set(own) & set(state))
        if state[name].shape != own[name].shape
    ]
    if missing or unknown or shapes:
        found = [
            f"{title} {', '.join(names[:8])}"
            for title, names in (("missing", missing), ("unknown", unknown), ("shape", shapes))
            if names
        ]
        raise ValueError(
            f"checkpoint: {path} does not fit this model and encoding: {'; '.join(found)}. Set model, encoding "
            "and their options to those of the checkpoint"
        )
    model.load_state_dict(state, strict=not fresh)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def plain_name(name: str) -> str:
    """A parameter name without what ``torch.compile``, DDP, FSDP or checkpoint wrappers put into it."""
    for wrapper in WRAPPERS:
        if name.startswith(wrapper) or f".{wrapper}" in name:
            name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name
