"""Names to data sets: :func:`create_data`, :func:`list_data`, :func:`data_options`."""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmpos.data.base import ImageData

__all__ = ["create_data", "data_options", "list_data"]

# name -> module and class: a module is imported when its data set is asked for, since each needs other packages
_DATA = {
    "mnist5k": ("mnist5k", "Mnist5k"),
    "digits": ("digits", "Digits"),
    "image_folder": ("image_folder", "ImageFolderData"),
    "webdataset": ("shards", "ShardData"),
    "npz": ("npz", "NpzData"),
    "fake": ("fake", "Fake"),
    "moving_mnist5k": ("video", "MovingMnist5k"),
    "omniglot_pen_video": ("video", "PenVideo"),
    "three_cell": ("three_cell", "ThreeCellData"),
    "mnist_points": ("points", "MnistPoints"),
    "ycb_scans": ("points", "YcbScans"),
    "mnist_grounding": ("grounding", "MnistGrounding"),
    "bccd": ("bccd", "Bccd"),
    "nlvr": ("nlvr", "Nlvr"),
}


def list_data() -> list[str]:
    """Names of all data sets, sorted.

    Example:
        >>> "mnist5k" in list_data()
        True
    """
    return sorted(_DATA)


def _data_class(name: str) -> type[ImageData]:
    if name not in _DATA:
        near = difflib.get_close_matches(name, _DATA, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ValueError(f"name: no data set is called {name!r}; {hint}there are {list_data()}")
    module, cls = _DATA[name]
    return getattr(importlib.import_module(f"mmpos.data.{module}"), cls)


def data_options(name: str) -> dict[str, Any]:
    """Options of a data set and their defaults (``inspect.Parameter.empty`` where one must be given)."""
    parameters = inspect.signature(_data_class(name).__init__).parameters
    return {key: parameter.default for key, parameter in parameters.items() if key != "self"}


def create_data(name: str, **options: Any) -> ImageData:
    """Build a data set by name.

    Args:
        name: one of :func:`list_data`.
        options: options of the data set, see :func:`data_options`.

    Example:
        >>> data = create_data("fake", image_size=8)
        >>> images, labels = next(iter(data.train_dataloader()))
        >>> images.shape, data.num_classes
        (torch.Size([8, 1, 8, 8]), 4)
    """
    cls = _data_class(name)
    known = data_options(name)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(
            f"options: data {name} has no option {', '.join(map(repr, unknown))}; its options are {sorted(known)}"
        )
    return cls(**options)
