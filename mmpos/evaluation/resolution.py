"""Zero-shot resolution: one trained model, several image sizes, every resolution rule of its encoding side by side."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmpos.encodings import EncodingStack, PositionEncoding
from mmpos.evaluation.passes import CPU_TOKENS, now, time_ratio
from mmpos.evaluation.results import Row, read_results, wilson_interval, write_results

__all__ = ["Evaluation", "resolution_rule", "run_resolution", "stack_or_none"]

OWN = "own"  # the rule of a model without an attached encoding: whatever the model does itself
EXAMPLES = 16


@dataclass(frozen=True)
class Evaluation:
    """What was measured, for the report and for callers."""

    folder: Path
    encoding: str
    rows: list[Row]
    sizes: list[int]
    rules: list[str]
    train_size: int
    origins: dict[int, str]
    used: dict[int, tuple[int, int]]
    predictions: dict[str, np.ndarray] = field(repr=False)

    def accuracy(self, size: int, rule: str) -> Row | None:
        """The accuracy row of a size and rule."""
        return next((r for r in self.rows if (r.size, r.coordinates, r.metric) == (size, rule, "accuracy")), None)

    def value(self, size: int, rule: str, metric: str) -> float | None:
        """A single number, or ``None`` where it was not measured."""
        return next((r.value for r in self.rows if (r.size, r.coordinates, r.metric) == (size, rule, metric)), None)


def run_resolution(
    model: nn.Module,
    data: Any,
    sizes: Sequence[int] | None = None,
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
) -> Evaluation:
    """Accuracy and speed of a model at several image sizes under every resolution rule; writes table, pictures and
    report.

    Args:
        model: a timm ViT, with or without an attached encoding, that returns class logits.
        data: a :class:`~mmpos.data.base.ImageData`: test images at any size.
        sizes: image sizes in pixels; default the training size, 1.5 and 2 times it.
        encoding_name: name in the table.
        output_dir: folder of ``results.csv``, ``report.md``, ``report.html``, ``resolution.png``, ``encoding.png``.
            Numbers that are already in the table and belong to these weights are kept, so an evaluation that was
            killed goes on.
        rules: resolution rules; default all that the encoding knows and that differ.
        device: where to run; default where the model is.
        autocast: reduced precision, such as ``torch.bfloat16``.
        overhead: whether to compare time and parameters with the same model without position encoding.
        config: what the run was, shown in the report.
        command: how to repeat it, shown in the report.
        progress: whether to print one line per size.
    """
    from mmpos.evaluation.report import write_report

    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    stack = stack_or_none(model)
    patch = patch_size(model)
    sizes = default_sizes(data.image_size) if sizes is None else sorted({int(size) for size in sizes})
    used = {size: usable_size(size, patch) for size in sizes}
    chosen = check_rules(stack, rules)
    device = next(model.parameters()).device if device is None else torch.device(device)
    model.to(device)
    training, model_at = model.training, _ModelAtSize(model)
    model.eval()

    rows, predictions = _finished(folder, model, data, patch, encoding_name)
    reference = (
        data.image_size if data.image_size in sizes else min(sizes, key=lambda size: abs(size - data.image_size))
    )
    origins: dict[int, str] = {}
    try:
        with data.whole():
            for size in sizes:
                done = {row.coordinates for row in rows if row.size == size and row.metric == "accuracy"}
                keep = size == reference
                pending = [
                    rule for rule in chosen if rule not in done or (keep and rule == chosen[0] and not predictions)
                ]
                loader, origins[size] = data.test_loader(size)
                if not pending:
                    continue
                measured = _measure(
                    model_at(used[size]), loader, used[size], pending, device, autocast, data if keep else None
                )
                for rule in pending:
                    rows = _replace(rows, measured[rule].rows(encoding_name, size, rule))
                if keep and chosen[0] in pending:
                    predictions = measured[chosen[0]].arrays()
                    np.savez_compressed(folder / "predictions.npz", **predictions)  # type: ignore[arg-type]
                write_results(folder / "results.csv", _sorted(rows, sizes, chosen))
                if progress:
                    text = ", ".join(
                        f"{rule} {100 * measured[rule].correct / measured[rule].count:.1f} %" for rule in pending
                    )
                    print(f"{encoding_name} at {size} px ({origins[size]}): {text}", flush=True)
            if overhead and stack is not None and not any(row.metric == "time_over_none" for row in rows):
                rows = _replace(rows, _overhead(model, data, used, encoding_name, chosen[0], reference, device))
    finally:
        model.train(training)
    rows = _sorted(rows, sizes, chosen)
    write_results(folder / "results.csv", rows)
    evaluation = Evaluation(folder, encoding_name, rows, sizes, chosen, data.image_size, origins, used, predictions)
    write_report(evaluation, model, data, stack, patch=patch, config=config, command=command)
    return evaluation


@contextmanager
def resolution_rule(stack: EncodingStack | None, rule: str) -> Iterator[None]:
    """Set a resolution rule for a moment; every encoding gets back the rule it had."""
    if stack is None or rule == OWN:
        yield
        return
    before = [(module, module.resolution) for module in stack.modules() if isinstance(module, PositionEncoding)]
    try:
        stack.set_resolution(rule)
        yield
    finally:
        for module, old in before:
            module.set_resolution(old)


def stack_or_none(model: nn.Module) -> EncodingStack | None:
    """The encoding attached to a model, or ``None``."""
    from mmpos.adapters.timm import stack_of

    try:
        return stack_of(model)
    except ValueError:
        return None


def check_rules(stack: EncodingStack | None, rules: Sequence[str] | None) -> list[str]:
    """The rules to measure.

    By default all, less ``linear`` next to ``rescaled`` (frequencies / s or coordinates / s is one thing) and the
    ``resonance`` rules, which change the encoding at the training size too; name them to measure them.
    """
    known = [OWN] if stack is None else list(stack.resolution_rules())
    if rules is None:
        usual = [rule for rule in known if not rule.startswith("resonance")]
        return [rule for rule in usual if rule != "linear" or "rescaled" not in known]
    unknown = [rule for rule in rules if rule not in known]
    if unknown:
        raise ValueError(
            f"rules: {unknown} not among {known}, which this model supports; leave rules out to measure all"
        )
    return list(dict.fromkeys(rules))


def default_sizes(train_size: int) -> list[int]:
    """The training size, 1.5 and 2 times it."""
    return [train_size, train_size * 3 // 2, train_size * 2]


def patch_size(model: nn.Module) -> tuple[int, int]:
    """Patch height and width of a model; other than a ViT states them as ``patch_size``."""
    size: Any = getattr(getattr(model, "patch_embed", model), "patch_size", None)
    if size is None:
        raise ValueError(
            f"model: expected a ViT with patch_embed.patch_size, or a model with patch_size, got {type(model).__name__}"
        )
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def usable_size(size: int, patch: tuple[int, int]) -> tuple[int, int]:
    """Height and width that whole patches cover; the rest is cut off at the bottom and the right."""
    if size < max(patch):
        raise ValueError(
            f"sizes: {size} px is smaller than a patch of {patch[0]} x {patch[1]} px; choose {max(patch)} or more"
        )
    return size // patch[0] * patch[0], size // patch[1] * patch[1]


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class _Measured:
    """Running totals of one size and rule."""

    correct: int = 0
    count: int = 0
    seconds: float = 0.0
    timed: int = 0
    batches: int = 0
    labels: list[Tensor] = field(default_factory=list)
    predictions: list[Tensor] = field(default_factory=list)
    confidence: list[Tensor] = field(default_factory=list)
    examples: list[tuple[float, int, np.ndarray]] = field(default_factory=list)

    def add(self, logits: Tensor, labels: Tensor, seconds: float) -> Tensor:
        probability, predicted = logits.float().softmax(-1).cpu().max(-1)
        self.correct += int((predicted == labels).sum())
        if self.batches == 1:  # the first batch paid for allocations and kernel choice; it counts only when it is alone
            self.seconds, self.timed = 0.0, 0
        self.batches += 1
        self.seconds += seconds
        self.timed += len(labels)
        self.count += len(labels)
        self.labels.append(labels)
        self.predictions.append(predicted)
        self.confidence.append(probability)
        return predicted

    def add_examples(self, images: Tensor, data: Any) -> None:
        """Keep the most confident mistakes so far, with their pixels."""
        wrong = self.predictions[-1] != self.labels[-1]
        mean, std = (np.asarray(values, dtype=np.float32)[:, None, None] for values in (data.mean, data.std))
        first = self.count - len(wrong)
        for i in wrong.nonzero()[:, 0].tolist():
            pixels = (images[i].cpu().numpy() * std + mean).clip(0, 1)
            self.examples.append((float(self.confidence[-1][i]), first + i, (pixels * 255).round().astype(np.uint8)))
        self.examples = sorted(self.examples, key=lambda example: (-example[0], example[1]))[:EXAMPLES]

    def rows(self, encoding: str, size: int, rule: str) -> list[Row]:
        low, high = wilson_interval(self.correct, self.count)
        speed = self.timed / max(self.seconds, 1e-9)
        return [
            Row(encoding, size, rule, "accuracy", self.correct / self.count, low, high, self.count),
            Row(encoding, size, rule, "images_per_second", speed, n=self.count),
        ]

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            "labels": torch.cat(self.labels).numpy(),
            "predictions": torch.cat(self.predictions).numpy(),
            "confidence": torch.cat(self.confidence).numpy(),
            "example_index": np.array([index for _, index, _ in self.examples], dtype=np.int64),
            "example_images": np.stack([pixels for _, _, pixels in self.examples])
            if self.examples
            else np.zeros((0, 1, 1, 1), np.uint8),
        }


@torch.inference_mode()
def _measure(
    model: nn.Module,
    loader: Any,
    used: tuple[int, int],
    rules: Sequence[str],
    device: torch.device,
    autocast: torch.dtype | None,
    data: Any | None,
) -> dict[str, _Measured]:
    """One pass over the test images of a size; every rule sees the same batch, so files are read once."""
    stack = stack_or_none(model)
    out = {rule: _Measured() for rule in rules}
    cast = nullcontext() if autocast is None else torch.autocast(device.type, autocast)
    # a CPU is fastest while the activations of a pass stay in its cache
    patch = patch_size(model)
    tokens = (used[0] // patch[0]) * (used[1] // patch[1])
    chunk = max(1, CPU_TOKENS // tokens) if device.type == "cpu" else 2**31 - 1
    for images, labels in loader:
        images = images[..., : used[0], : used[1]].to(device)
        parts = images.split(chunk)
        for rule in rules:
            with resolution_rule(stack, rule), cast:
                start = now(device)
                logits = torch.cat([model(part) for part in parts])
                seconds = now(device) - start
            out[rule].add(logits, labels, seconds)
            if data is not None and rule == rules[0]:
                out[rule].add_examples(images, data)
    return out


@torch.inference_mode()
def _overhead(
    model: nn.Module,
    data: Any,
    used: Mapping[int, tuple[int, int]],
    encoding: str,
    rule: str,
    size: int,
    device: torch.device,
) -> list[Row]:
    """Parameters of the encoding, and the time of a forward pass over that of the same model without position
    encoding.
    """
    images = next(iter(data.test_loader(size)[0]))[0][:64, :, : used[size][0], : used[size][1]].to(device)
    return time_over_none(model, images, encoding, rule, size, device, lambda each: _ModelAtSize(each)(used[size]))


@torch.inference_mode()
def time_over_none(
    model: nn.Module,
    images: Tensor,
    encoding: str,
    rule: str,
    size: int,
    device: torch.device,
    at_size: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> list[Row]:
    """Rows ``encoding_parameters`` and ``time_over_none`` of a model with an attached encoding, on one batch."""
    from mmpos.adapters.timm import attach, detach

    stack = stack_or_none(model)
    count = 0 if stack is None else sum(parameter.numel() for parameter in stack.parameters())
    rows = [Row(encoding, size, rule, "encoding_parameters", float(count))]
    bare = attach(detach(copy.deepcopy(model)), "none").eval()
    pair = (at_size(model), at_size(bare))
    with resolution_rule(stack_or_none(pair[0]), rule):
        ratio, rounds = time_ratio(*pair, images, device)
    return [*rows, Row(encoding, size, rule, "time_over_none", ratio, n=rounds)]


class _ModelAtSize:
    """The model for an input size: itself when it takes any size, else a copy told its size."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model

    def __call__(self, used: tuple[int, int]) -> nn.Module:
        model = self.model
        fixed = getattr(getattr(model, "patch_embed", None), "img_size", None)
        if fixed is None or tuple(fixed) == used or getattr(model, "dynamic_img_size", True):
            return model
        model = copy.deepcopy(model)
        model.set_input_size(img_size=used)
        return model.eval()


# -- what a restart finds ---------------------------------------------------------------------------------------------


def _finished(
    folder: Path, model: nn.Module, data: Any, patch: tuple[int, int], encoding: str
) -> tuple[list[Row], dict[str, np.ndarray]]:
    """Rows and predictions of an earlier evaluation of these weights on these data; others are dropped."""
    digest = hashlib.sha256(repr((encoding, data.name, data.image_size, data.class_names, patch)).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    stamp, note = {"weights_and_data": digest.hexdigest()}, folder / "evaluation.json"
    same = note.is_file() and json.loads(note.read_text()) == stamp
    note.write_text(json.dumps(stamp) + "\n")
    table, arrays = folder / "results.csv", folder / "predictions.npz"
    if not same:
        table.unlink(missing_ok=True)
        arrays.unlink(missing_ok=True)
        return [], {}
    rows = read_results(table) if table.is_file() else []
    if not arrays.is_file():
        return rows, {}
    with np.load(arrays, allow_pickle=False) as file:
        return rows, {name: file[name] for name in file.files}


def _replace(rows: list[Row], new: list[Row]) -> list[Row]:
    keys = {row.key for row in new}
    return [row for row in rows if row.key not in keys] + new


def _sorted(rows: list[Row], sizes: Sequence[int], rules: Sequence[str]) -> list[Row]:
    """By size, rule as the encoding lists them, metric."""
    place = {rule: number for number, rule in enumerate(rules)}
    return sorted(rows, key=lambda row: (row.size, place.get(row.coordinates, len(place)), row.coordinates, row.metric))
