"""Data sets as Lightning data modules: reproducible order, resumable loaders, test images at any size."""

from mmpos.data.registry import create_data, data_options, list_data

__all__ = ["create_data", "data_options", "list_data"]
