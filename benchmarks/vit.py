"""Cost of position encodings in a whole model: forward and backward of ViT-S/16 at 224 pixels, over no encoding.

``python -m benchmarks.vit [--encodings rope_axial,rope_mixed] [--batch 4] [--rounds 15] [--threads 1]``; LePE in the
model it comes from: ``--model cswin_micro --encodings lepe --batch 64``, 28 pixels.

The models take turns in one process. A ratio is the median over rounds of (time with the encoding / time without it in
the same round), which other jobs on the machine disturb less than a ratio of medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from benchmarks._timing import keep_freed_memory, machine, print_table

import torch  # isort: skip

from mmpos.adapters.timm import attach
from mmpos.models.cswin import CSWin


def step_of(encoding: str, batch: int, name: str) -> Callable[[], tuple[float, float]]:
    """A function that runs forward and backward and returns the seconds of each."""
    import timm

    torch.manual_seed(0)
    model: torch.nn.Module
    if name == "cswin_micro":
        sizes = {"dim": 36, "depths": (1, 2, 2), "heads": (2, 4, 8), "splits": (1, 2, None), "patch": 2}
        model = CSWin(10, in_chans=1, encoding=(encoding, {}), **sizes).train()  # configs/model/cswin_micro.yaml
        images = torch.randn(batch, 1, 28, 28)
    else:
        model = attach(timm.create_model(name, num_classes=1000), encoding).train()
        images = torch.randn(batch, 3, 224, 224)

    def step() -> tuple[float, float]:
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        loss = model(images).square().mean()
        middle = time.perf_counter()
        loss.backward()
        return middle - start, time.perf_counter() - middle

    return step


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vit", description=__doc__)
    parser.add_argument("--encodings", default="rope_axial,rope_mixed", help="names, comma-separated")
    parser.add_argument("--model", default="vit_small_patch16_224", help="a timm ViT for 224 pixels, or cswin_micro")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    print(f"{machine()}, batch {options.batch}, {options.rounds} rounds")
    names = ["none", *(name for name in options.encodings.split(",") if name != "none")]
    steps = {name: step_of(name, options.batch, options.model) for name in names}
    for step in steps.values():
        step()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for index in range(options.rounds):
        for name in names if index % 2 == 0 else reversed(names):
            times[name].append(steps[name]())
    rows = []
    for name in names:
        both = [sum(pair) for pair in times[name]]
        ratios = [ours / sum(base) for ours, base in zip(both, times["none"], strict=True)]
        forward = [ours[0] / base[0] for ours, base in zip(times[name], times["none"], strict=True)]
        rows.append(
            [
                name,
                f"{statistics.median(both) * 1e3:.0f}",
                f"{min(both) * 1e3:.0f}",
                f"{statistics.median(ratios):.3f}",
                f"{min(both) / min(sum(base) for base in times['none']):.3f}",
                f"{statistics.median(forward):.3f}",
            ]
        )
    columns = ["", "median ms", "best ms", "/ none (median)", "/ none (best)", "forward / none"]
    print_table(f"{options.model}, forward and backward", columns, rows)


if __name__ == "__main__":
    main()
