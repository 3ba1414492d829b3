"""Evaluate any timm checkpoint on disk at other resolutions, with the position encoding it has or with an
attached one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmpos.evaluation.resolution import Evaluation, run_resolution

__all__ = ["check_classes", "checkpoint_model", "evaluate_checkpoint"]


def evaluate_checkpoint(
    path: str | Path,
    *,
    model: str,
    data: Any,
    output_dir: str | Path,
    sizes: Sequence[int] | None = None,
    encoding: Any = None,
    encoding_options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    **evaluation: Any,
) -> Evaluation:
    """Load a checkpoint into a timm model and test it at several image sizes.

    Args:
        path: ``.safetensors``, or a ``.pt`` / ``.pth`` / ``.ckpt`` file of weights (read with ``weights_only``; no
            pickled code runs).
        model: name of the timm model, or ``vit_micro``.
        data: a :class:`~mmpos.data.base.ImageData` whose ``image_size`` is that of the training.
        output_dir: folder of table and report.
        sizes: image sizes; default the training size, 1.5 and 2 times it.
        encoding: the attached encoding the weights belong to; ``None`` for the model as timm builds it.
        encoding_options: options of the encoding.
        model_options: arguments of the model's constructor.
        evaluation: further arguments of :func:`~mmpos.evaluation.resolution.run_resolution`.
    """
    vit = checkpoint_model(
        path,
        model=model,
        data=data,
        encoding=encoding,
        encoding_options=encoding_options,
        model_options=model_options,
    )
    name = (
        "own"
        if encoding is None
        else encoding
        if isinstance(encoding, str)
        else "+".join(e if isinstance(e, str) else e[0] for e in encoding)
    )
    return run_resolution(vit, data, sizes, encoding_name=name, output_dir=output_dir, **evaluation)


def checkpoint_model(
    path: str | Path,
    *,
    model: str,
    data: Any,
    encoding: Any = None,
    encoding_options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The timm model a checkpoint belongs to, with its weights; the arguments are those of
    :func:`evaluate_checkpoint`.
    """
    from mmpos.evaluation.weights import load_state, model_state, read_checkpoint

    state = model_state(read_checkpoint(path))
    common = {"in_chans": data.in_chans, "num_classes": data.num_classes}
    if encoding is not None or model == "vit_micro":
        from mmpos.models import create_vit

        vit = create_vit(
            model,
            encoding="none" if encoding is None else encoding,
            encoding_options=encoding_options,
            image_size=data.image_size,
            **common,
            **dict(model_options or {}),
        )
    else:
        if encoding_options:
            raise ValueError(
                f"encoding_options: given without encoding ({sorted(encoding_options)}); give encoding=<name>"
            )
        vit = _timm_model(model, {**common, "img_size": data.image_size, **dict(model_options or {})})
    check_classes(state, data, path)
    load_state(vit, state, path)
    return vit


def _timm_model(name: str, arguments: dict[str, Any]) -> Any:
    """A timm model for any image size where it can be built so, else for its own."""
    try:
        import timm
    except ImportError as error:
        raise ImportError('timm models need timm; install it with pip install "mmpos[vit]"') from error
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.split('.')[0][:12]}*")[:3]
        raise ValueError(
            f"model: timm has no model {name!r}{'; did you mean ' + ', '.join(near) + '?' if near else ''}"
        )
    try:
        return timm.create_model(name, dynamic_img_size=True, **arguments)
    except TypeError:
        return timm.create_model(name, **arguments)


def check_classes(state: Mapping[str, Tensor], data: Any, path: str | Path) -> None:
    """Raise where the classifier of a state dict counts other classes than the data."""
    head = state.get("head.weight")
    if head is not None and head.shape[0] != data.num_classes:
        raise ValueError(
            f"data: {path} was trained for {head.shape[0]} classes, data {data.name} has {data.num_classes}; choose "
            f"the data it belongs to"
        )
