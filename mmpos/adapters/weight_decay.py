"""Which parameters of any model must not decay, encodings included."""

from __future__ import annotations

from torch import nn

__all__ = ["no_weight_decay"]


def no_weight_decay(model: nn.Module) -> set[str]:
    """Names, as in ``model.named_parameters()``, that the encodings and the models inside ``model`` exempt from decay.

    Unlike asking the outermost module, this looks through every wrapper: a Lightning module, DDP, ``torch.compile``, an
    open_clip model.
    """
    names = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if callable(getattr(module, "no_weight_decay", None))
        for name in module.no_weight_decay()  # type: ignore[operator]
    }
    return names & {name for name, _ in model.named_parameters()}
