"""Zero-shot frame counts: one trained video model, clips of several lengths, every rule of its encoding side by side.

Only the number of frames changes, so a rule acts on time alone: *index* lets a longer clip run beyond the trained
range, *rescaled* stretches its time onto that of the training clips.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.evaluation.passes import CPU_TOKENS, now
from mmpos.evaluation.resolution import check_rules, resolution_rule, stack_or_none, time_over_none
from mmpos.evaluation.results import Row, wilson_interval, write_results

__all__ = ["FrameEvaluation", "default_frames", "metric_name", "run_frames"]


@dataclass(frozen=True)
class FrameEvaluation:
    """What was measured.

    Args:
        folder: where table and report are.
        encoding: name in the table.
        rows: the table; ``size`` is the number of frames.
        frames: tested numbers of frames.
        rules: tested resolution rules.
        clips: how clips got more frames; metrics of the first have plain names.
        tasks: the questions about a clip and the number of answers to each.
        train_frames: frames of the training clips.
    """

    folder: Path
    encoding: str
    rows: list[Row]
    frames: list[int]
    rules: list[str]
    clips: tuple[str, ...]
    tasks: dict[str, int]
    train_frames: int

    def row(self, frames: int, rule: str, metric: str) -> Row | None:
        """A measured number, or ``None``."""
        return next((r for r in self.rows if (r.size, r.coordinates, r.metric) == (frames, rule, metric)), None)

    def metric(self, task: str | None, clip: str) -> str:
        """Name of the accuracy of a question, or of all together, on one kind of clips."""
        return metric_name(task, clip, self.clips)

    def questions(self) -> list[str | None]:
        """The questions, then ``None`` for all of them together where there are several."""
        return [*self.tasks, None] if len(self.tasks) > 1 else [None]


@dataclass
class _Counts:
    """Running totals of one frame count, kind of clips and rule."""

    right: dict[str | None, int] = field(default_factory=dict)
    count: int = 0
    seconds: float = 0.0


def metric_name(task: str | None, clip: str, clips: Sequence[str]) -> str:
    """``accuracy``, ``direction_accuracy``, ``accuracy_denser``: the first kind of clips has plain names."""
    name = "accuracy" if task is None else f"{task}_accuracy"
    return name if clip == clips[0] else f"{name}_{clip}"


def default_frames(train_frames: int, tubelet: int) -> list[int]:
    """1, 1.5, 2 and 3 times the training frames, in whole tubelets."""
    return sorted({max(tubelet, round(train_frames * factor / tubelet) * tubelet) for factor in (1, 1.5, 2, 3)})


def run_frames(
    model: nn.Module,
    data: Any,
    frames: Sequence[int] | None = None,
    *,
    encoding_name: str,
    output_dir: str | Path,
    rules: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    overhead: bool = True,
    config: Mapping[str, Any] | None = None,
    command: str | None = None,
    progress: bool = True,
) -> FrameEvaluation:
    """Accuracy and speed of a video model at several frame counts; writes table, picture and report.

    Args:
        model: a video ViT of :func:`mmpos.models.create_video_vit`.
        data: a :class:`~mmpos.data.video.VideoData`: test clips of any length.
        frames: numbers of frames; default 1, 1.5, 2 and 3 times those of the training clips.
        encoding_name: name in the table.
        output_dir: folder of ``results.csv`` (whose column ``size`` is the number of frames), ``report.md``,
            ``report.html`` and ``frames.png``.
        rules: resolution rules; default all that the encoding knows and that differ.
        device: where to run; default where the model is.
        autocast: reduced precision, such as ``torch.bfloat16``.
        overhead: whether to compare the time with the same model without position encoding.
        config: what the run was, shown in the report.
        command: how to repeat it, shown in the report.
        progress: whether to print one line per frame count.
    """
    from mmpos.evaluation.frames_report import write_frames_report

    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    tubelet = tubelet_frames(model)
    counts = default_frames(data.frames, tubelet) if frames is None else sorted({int(count) for count in frames})
    wrong = [count for count in counts if count < tubelet or count % tubelet]
    if not counts or wrong:
        raise ValueError(f"frames: expected multiples of the tubelet of {tubelet} frames, got {wrong or counts}")
    stack = stack_or_none(model)
    chosen = check_rules(stack, rules)
    device = next(model.parameters()).device if device is None else torch.device(device)
    training = model.training
    model.to(device).eval()
    rows: list[Row] = []
    try:
        with data.whole():
            for count in counts:
                for clip in data.clips:
                    measured = _measure(model, data, count, clip, chosen, device, autocast)
                    for rule, totals in measured.items():
                        rows += _rows(totals, encoding_name, count, rule, clip, data.clips)
                    if progress:
                        print(_line(measured, encoding_name, count, clip, data.frames), flush=True)
                    if count == data.frames:  # no clip has more frames yet: the kinds are the same clips
                        rows += [
                            row
                            for other in data.clips[1:]
                            for rule, totals in measured.items()
                            for row in _rows(totals, encoding_name, count, rule, other, data.clips)
                        ]
                        break
                write_results(folder / "results.csv", rows)
            if overhead and stack is not None:
                reference = min(counts, key=lambda count: abs(count - data.frames))
                clips = next(iter(data.test_clips(reference)))[0][:32].to(device)
                rows += time_over_none(model, clips, encoding_name, chosen[0], reference, device)
    finally:
        model.train(training)
    rows.sort(key=lambda row: (row.size, chosen.index(row.coordinates), row.metric))
    write_results(folder / "results.csv", rows)
    out = FrameEvaluation(
        folder, encoding_name, rows, counts, chosen, tuple(data.clips), dict(data.tasks), int(data.frames)
    )
    write_frames_report(out, model, data, stack, config=config, command=command)
    return out


def tubelet_frames(model: nn.Module) -> int:
    """Frames of a tubelet of a model; raises for a model of images."""
    size: Any = getattr(getattr(model, "patch_embed", None), "patch_size", ())
    if not isinstance(size, tuple) or len(size) != 3:
        raise ValueError(
            f"model: expected a video ViT whose patch embedding has a tubelet, got {type(model).__name__}; build it "
            "with mmpos.models.create_video_vit"
        )
    return int(size[0])


@torch.inference_mode()
def _measure(
    model: nn.Module,
    data: Any,
    frames: int,
    clip: str,
    rules: Sequence[str],
    device: torch.device,
    autocast: torch.dtype | None,
) -> dict[str, _Counts]:
    """One pass over the test clips; every rule sees the same batch."""
    stack = stack_or_none(model)
    out = {rule: _Counts() for rule in rules}
    patch: Any = model.patch_embed.patch_size  # type: ignore[union-attr]
    for clips, labels in data.test_clips(frames, clip):
        tokens = math.prod(clips.shape[-3:]) // math.prod(patch)
        # a CPU is fastest while the activations of a pass stay in its cache
        parts = clips.to(device).split(max(1, CPU_TOKENS // tokens) if device.type == "cpu" else len(clips))
        for rule, totals in out.items():
            cast = nullcontext() if autocast is None else torch.autocast(device.type, autocast)
            with resolution_rule(stack, rule), cast:
                start = now(device)
                logits = torch.cat([model(part) for part in parts])
                totals.seconds += now(device) - start
            _count(totals, logits.float().cpu(), labels, data.tasks)
    return out


def _count(totals: _Counts, logits: Tensor, labels: Tensor, tasks: Mapping[str, int]) -> None:
    """Add the right answers to each question, and to all of them, of one batch. Shape: labels ``(B, tasks)``."""
    answers = torch.stack([part.argmax(-1) for part in logits.split(list(tasks.values()), dim=-1)], dim=-1)
    right = answers == labels
    found: dict[str | None, int] = {None: int(right.all(-1).sum())}
    if len(tasks) > 1:
        found |= {task: int(right[:, number].sum()) for number, task in enumerate(tasks)}
    for task, count in found.items():
        totals.right[task] = totals.right.get(task, 0) + count
    totals.count += len(labels)


def _rows(totals: _Counts, encoding: str, frames: int, rule: str, clip: str, clips: Sequence[str]) -> list[Row]:
    n = totals.count
    rows = [
        Row(encoding, frames, rule, metric_name(task, clip, clips), right / n, *wilson_interval(right, n), n)
        for task, right in totals.right.items()
    ]
    if clip == clips[0]:
        rows.append(Row(encoding, frames, rule, "clips_per_second", n / max(totals.seconds, 1e-9), n=n))
    return rows


def _line(measured: Mapping[str, _Counts], encoding: str, frames: int, clip: str, trained: int) -> str:
    kind = "" if frames == trained else f" ({clip})"
    parts = []
    for rule, totals in measured.items():
        named = {task: right for task, right in totals.right.items() if task is not None} or {"": totals.right[None]}
        texts = [f"{task} {100 * right / totals.count:.1f} %".strip() for task, right in named.items()]
        parts.append(f"{rule} {', '.join(texts)}")
    return f"{encoding} at {frames} frames{kind}: " + "; ".join(parts)
