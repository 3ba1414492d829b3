"""What an encoding knows about the plane: metrics of its similarity, and a task that only positions can solve."""

from mmpos.diagnostics.pesi import Pesi, attention_kernel, cosine_kernel, pesi, pesi_metrics
from mmpos.diagnostics.three_cell import (
    ThreeCell,
    three_cell_columns,
    three_cell_images,
    three_cell_relations,
    three_cell_sample,
    three_cell_targets,
)

__all__ = [
    "Pesi",
    "ThreeCell",
    "attention_kernel",
    "cosine_kernel",
    "pesi",
    "pesi_metrics",
    "three_cell_columns",
    "three_cell_images",
    "three_cell_relations",
    "three_cell_sample",
    "three_cell_targets",
]
