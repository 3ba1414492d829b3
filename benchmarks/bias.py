"""Relative biases against plain SDPA: ``python -m benchmarks.bias``, ``--grid 24x24 --batch 2``, ``--backward``.

One thread, one process, contenders taking turns, medians and their ratio to ``scaled_dot_product_attention`` on the
same queries, keys and values. Every row is what one layer does between q, k, v and the attention output, parameters
included: reading tables, adding terms, softmax, values. What a model computes once per forward pass for all layers
(indices, ALiBi) is prepared outside, as in a model, and shown in its own column. *direct* is the definition written
down with indexing and an ``L x L x d`` table of values.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._timing import machine, peak_bytes, print_table
from mmpos import EncodingStack, LayerState, Positions, attend, create_encoding

HEADS, WIDTH = 6, 64
#: largest ratio to SDPA, forward
TARGETS = {
    "irpe product q,k,v": 2.7,
    "irpe product k": 1.6,
    "irpe cross q,k,v": 3.5,
    "irpe bias k": 1.15,
    "irpe bias q,k per head": 1.15,
    "swin_rpb": 1.15,
    "alibi_2d": 1.15,
    "lookhere": 1.15,
    "functional_bias": 1.15,
}
BACKWARD_TARGETS = {"irpe product q,k,v": 2.4}


def options(grid: tuple[int, int]) -> dict[str, tuple[str, dict[str, object]]]:
    """Rows of the table: encoding and options."""
    cross = {"method": "cross", "ratio": 20.0}
    return {
        "irpe product k": ("irpe", {"on": "k"}),
        "irpe product q,k": ("irpe", {"on": "qk"}),
        "irpe product q,k,v": ("irpe", {"on": "qkv"}),
        "irpe product q,k,v per head": ("irpe", {"on": "qkv", "shared_heads": False}),
        "irpe cross k": ("irpe", {"on": "k", **cross}),
        "irpe cross q,k,v": ("irpe", {"on": "qkv", **cross}),
        "irpe bias k": ("irpe", {"on": "k", "mode": "bias"}),
        "irpe bias q,k per head": ("irpe", {"on": "qk", "mode": "bias", "shared_heads": False}),
        "swin_rpb": ("swin_rpb", {"train_grid": grid}),
        "decomposed_rpe": ("decomposed_rpe", {"train_grid": grid}),
        "alibi_2d": ("alibi_2d", {}),
        "lookhere": ("lookhere", {}),
        "functional_bias": ("functional_bias", {"train_grid": grid}),
        "lepe": ("lepe", {}),
    }


def build(name: str, chosen: dict[str, object]) -> EncodingStack:
    """A stack with parameters that are not zero."""
    stack = create_encoding(name, HEADS * WIDTH, HEADS, num_prefix=1, **chosen)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return stack


def direct(stack: EncodingStack, q: Tensor, k: Tensor, v: Tensor, index: Tensor) -> Tensor:
    """Contextual product on q, k, v as it is defined."""
    encoding = stack.layers[0]["irpe"]
    scaled_q, scaled_k = q * WIDTH**-0.5, k * WIDTH**-0.5
    rows = torch.arange(index.shape[-1])[:, None]
    on_k = torch.matmul(scaled_q, encoding.table_k[0])[:, :, rows, index]
    on_q = torch.matmul(scaled_k, encoding.table_q[0])[:, :, rows, index].mT
    weights = (torch.matmul(scaled_q, k.mT) + on_k + on_q).softmax(-1)
    values = encoding.table_v[0, 0][index]  # (L, L, d)
    return torch.matmul(weights, v) + torch.einsum("bhij,ijd->bhid", weights, values)


def take_turns(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median processor milliseconds of each function in turn, the second of two calls; other processes do not count."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            function()  # memory that the contender before it gave back to the system is fetched again
            start = time.thread_time()
            function()
            times[name].append(1e3 * (time.thread_time() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main(arguments: list[str] | None = None) -> int:
    """Print the table; the exit status says whether every target was met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bias", description=__doc__)
    parser.add_argument("--grid", default="14x14", help="rows x columns")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument(
        "--backward", action="store_true", help="forward and backward, gradients of q, k, v and parameters"
    )
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, columns = (int(size) for size in chosen.grid.split("x"))
    positions = Positions.grid(rows, columns, num_prefix=1)
    q, k, v = torch.randn(3, chosen.batch, HEADS, positions.num_tokens, WIDTH).unbind(0)
    if chosen.backward:
        for tensor in (q, k, v):
            tensor.requires_grad_()
    stacks = {label: build(name, given) for label, (name, given) in options((rows, columns)).items()}
    work: dict[str, Callable[[], Tensor]] = {"SDPA": lambda: F.scaled_dot_product_attention(q, k, v)}
    for label, stack in stacks.items():
        with torch.set_grad_enabled(chosen.backward):  # a bias that asks for gradients keeps SDPA off its fast kernel
            state = stack.prepare(positions)[0]
        work[label] = lambda state=state, stack=stack: attend(q, k, v, _fresh(state, stack, positions))
    reference = stacks["irpe product q,k,v"]
    index = reference.prepare(positions)[0].prepared[0].index[0][0].long()
    work["irpe product q,k,v direct"] = lambda: direct(reference, q, k, v, index)

    def run(function: Callable[[], Tensor]) -> Callable[[], object]:
        return (lambda: function().sum().backward()) if chosen.backward else function

    with torch.set_grad_enabled(chosen.backward):
        difference = (work["irpe product q,k,v"]() - work["irpe product q,k,v direct"]()).abs().max()
        if difference > 1e-4:
            raise RuntimeError(f"the fast form differs from the definition by {float(difference):.1e}")
        functions = {label: run(function) for label, function in work.items()}
        times = take_turns(functions, chosen.rounds)
        peaks = {label: peak_bytes(function) / 2**20 for label, function in functions.items()}
        prepare = take_turns({label: lambda s=s: s.prepare(positions) for label, s in stacks.items()}, 5)
    targets = BACKWARD_TARGETS if chosen.backward else TARGETS
    table, missed = [], []
    for label, milliseconds in times.items():
        ratio = milliseconds / times["SDPA"]
        target = targets.get(label)
        missed += [label] if target is not None and ratio > target else []
        limit = "" if target is None else f"<= {target}{'' if ratio <= target else ' MISSED'}"
        once = f"{prepare[label]:.2f}" if label in prepare else ""
        table.append([label, f"{milliseconds:.2f}", f"{ratio:.2f}", limit, f"{peaks[label]:.1f}", once])
    what = "forward + backward" if chosen.backward else "forward"
    print(machine())
    print_table(
        f"{what}, ({chosen.batch}, {HEADS}, {positions.num_tokens}, {WIDTH}) float32, grid {rows} x {columns} + 1",
        ["", "ms", "x SDPA", "target", "peak MiB", "once, ms"],
        table,
    )
    print("\nevery target met" if not missed else f"\nmissed: {', '.join(missed)}")
    return 1 if missed else 0


def _fresh(state: LayerState, stack: EncodingStack, positions: Positions) -> LayerState:
    """The state of a layer; with gradients it is prepared anew, as in each training step."""
    if not torch.is_grad_enabled():
        return state
    return stack.prepare(positions)[0]


if __name__ == "__main__":
    raise SystemExit(main())
