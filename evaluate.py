"""Evaluate: ``python evaluate.py run=<run folder> evaluation=resolution sizes=[28,42,56,84]``."""

from mmpos.cli import evaluate_command

if __name__ == "__main__":
    evaluate_command()
