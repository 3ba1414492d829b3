"""One golden case: inputs, parameters and outputs of a reference code, with bookkeeping of what a runner has read.

A runner must read, check or produce everything in the file. What it leaves unread is reported as unknown, so a case
with an option that the runner does not know can never pass by accident.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

_MISSING = object()


class Unknown(Exception):
    """The case holds something this runner does not know."""


class Case:
    """A golden file: :meth:`option` and :meth:`expect` read options, :meth:`input` and :meth:`param` tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.method = path.parent.name
        self.name = path.stem
        with safe_open(str(path), framework="pt") as file:
            self.spec: dict[str, Any] = json.loads((file.metadata() or {}).get("spec", "{}"))
            self.tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        self.config: dict[str, Any] = dict(self.spec.get("config", {}))
        self._read: set[str] = set()

    # -- options --------------------------------------------------------------------------------------------------

    def has_option(self, key: str) -> bool:
        """Whether the configuration has a key (does not count as reading it)."""
        return key in self.config

    def option(self, key: str, default: Any = _MISSING) -> Any:
        """Value of a configuration key; a missing key without a default is unknown territory."""
        if key not in self.config:
            if default is _MISSING:
                raise Unknown(f"config without {key}")
            return default
        self._read.add(f"config.{key}")
        return self.config[key]

    def expect(self, key: str, *allowed: Any) -> Any:
        """Read a key that may be absent, and refuse values other than those the runner was written for."""
        if key not in self.config:
            return None
        value = self.option(key)
        if value not in allowed:
            raise Unknown(f"config.{key}={value!r}")
        return value

    def describe(self, *keys: str) -> None:
        """Mark keys as read that only describe the file (they repeat shapes or name the source)."""
        self._read.update(f"config.{key}" for key in keys)

    # -- tensors --------------------------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Whether a tensor such as ``in.x`` is present (does not count as reading it)."""
        return key in self.tensors

    def _tensor(self, key: str, dtype: torch.dtype | None) -> Tensor:
        if key not in self.tensors:
            raise Unknown(f"no tensor {key}")
        self._read.add(key)
        value = self.tensors[key]
        return value if dtype is None or not value.is_floating_point() else value.to(dtype)

    def input(self, key: str, dtype: torch.dtype | None = None) -> Tensor:
        """Tensor ``in.<key>``."""
        return self._tensor(f"in.{key}", dtype)

    def param(self, key: str, dtype: torch.dtype | None = None) -> Tensor:
        """Tensor ``param.<key>``."""
        return self._tensor(f"param.{key}", dtype)

    def buffer(self, key: str, dtype: torch.dtype | None = None) -> Tensor:
        """Tensor ``buffer.<key>``: state of the reference that does not train."""
        return self._tensor(f"buffer.{key}", dtype)

    def params(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """All ``param.*`` tensors, as a state dict of the reference."""
        names = [key.removeprefix("param.") for key in self.tensors if key.startswith("param.")]
        return {name: self.param(name, dtype) for name in names}

    def grid(self, key: str = "grid_hw") -> tuple[int, ...]:
        """Integer sizes stored as ``in.<key>``."""
        return tuple(int(size) for size in self.input(key))

    def outputs(self) -> dict[str, Tensor]:
        """All ``out.*`` tensors by name."""
        return {key.removeprefix("out."): value for key, value in self.tensors.items() if key.startswith("out.")}

    def wants(self, name: str) -> bool:
        """Whether the case stores ``out.<name>``."""
        return f"out.{name}" in self.tensors

    # -- bookkeeping ----------------------------------------------------------------------------------------------

    def unread(self) -> list[str]:
        """Configuration keys and input tensors the runner has not looked at."""
        config = [f"config.{key}" for key in self.config if f"config.{key}" not in self._read]
        tensors = [
            key for key in self.tensors if key.startswith(("in.", "param.", "buffer.")) and key not in self._read
        ]
        return config + tensors
