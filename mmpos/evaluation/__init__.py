"""Measurements of trained models: accuracy and speed at other resolutions, comparison of runs."""

from mmpos.evaluation.checkpoint import evaluate_checkpoint
from mmpos.evaluation.resolution import Evaluation, resolution_rule, run_resolution
from mmpos.evaluation.results import COLUMNS, Row, read_results, wilson_interval, write_results

__all__ = [
    "COLUMNS",
    "Evaluation",
    "Row",
    "evaluate_checkpoint",
    "read_results",
    "resolution_rule",
    "run_resolution",
    "wilson_interval",
    "write_results",
]
