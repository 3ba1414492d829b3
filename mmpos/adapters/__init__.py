"""Encodings for models written elsewhere: attached to one instance, removable, without touching a class or a module."""

from mmpos.adapters.weight_decay import no_weight_decay

__all__ = ["no_weight_decay"]
