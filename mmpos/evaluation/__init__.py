"""Measurements of trained models: accuracy and speed at other resolutions, comparison of runs; PESI of encodings."""

from mmpos.diagnostics.pesi import Pesi, pesi
from mmpos.evaluation.checkpoint import evaluate_checkpoint
from mmpos.evaluation.resolution import Evaluation, resolution_rule, run_resolution
from mmpos.evaluation.results import COLUMNS, Row, read_results, wilson_interval, write_results
from mmpos.evaluation.shift import ShiftEvaluation, run_shift
from mmpos.evaluation.three_cell import ThreeCellEvaluation, run_three_cell

__all__ = [
    "COLUMNS",
    "Evaluation",
    "Pesi",
    "Row",
    "ShiftEvaluation",
    "ThreeCellEvaluation",
    "evaluate_checkpoint",
    "pesi",
    "read_results",
    "resolution_rule",
    "run_resolution",
    "run_shift",
    "run_three_cell",
    "wilson_interval",
    "write_results",
]
