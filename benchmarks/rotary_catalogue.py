"""Cost of every rotary and group encoding: ``python -m benchmarks.rotary_catalogue [--threads 1] [--quick]``.

Per method and sequence length: making the table of one layer, and transforming q and k with it; in training (gradients
wanted), in evaluation, and after folding the constant basis into the projections. *x copy* is against copying q and k
into preallocated memory, *x mixed* against RoPE-Mixed in evaluation, table and application together. Times are
processor time of the one thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._timing import keep_freed_memory, machine, peak_bytes, print_table
from mmpos import Positions, create_encoding, list_encodings
from mmpos.encodings import encoding_class
from mmpos.encodings._fold import FoldableEncoding
from mmpos.encodings._rotary import RotaryEncoding
from mmpos.encodings.liere import LieRE
from mmpos.functional.skew import matrix_exp

BATCH, HEADS, D = 8, 6, 64
#: options besides the defaults: LieRE in the small blocks that are practical
OPTIONS: dict[str, dict[str, Any]] = {"liere": {"generator_dim": 8}}


def methods() -> Iterator[str]:
    """Names of all encodings that transform q and k by a table."""
    for name in list_encodings():
        if issubclass(encoding_class(name), (RotaryEncoding, FoldableEncoding, LieRE)):
            yield name


def cost(work: Callable[[], object], repeats: int) -> float:
    """Lower quartile of the milliseconds of processor time of one call."""
    for _ in range(2):
        work()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        work()
        times.append(1e3 * (time.thread_time() - start))
    return statistics.quantiles(times, n=4)[0]


def row(name: str, side: int, q: Tensor, k: Tensor, repeats: int) -> dict[str, float]:
    """All costs of one method."""
    positions = Positions.grid(side, side, num_prefix=1)
    options = OPTIONS.get(name, {})
    stack = create_encoding(name, HEADS * D, HEADS, train_grid=(side, side), **options)
    encoding: Any = stack.encodings_of(0)[0]
    few = max(3, repeats // (10 if name == "liere" else 1))
    costs = {"train table": cost(lambda: encoding.prepare(positions), few)}
    prepared = encoding.prepare(positions)
    costs["train apply"] = cost(lambda: encoding.transform_qkv(q, k, k, prepared), repeats)

    def step() -> None:
        left, right = q.detach().requires_grad_(), k.detach().requires_grad_()
        outputs = encoding.transform_qkv(left, right, k, encoding.prepare(positions))[:2]
        torch.autograd.backward(outputs, (q, k))

    costs["forward+backward"] = cost(step, max(3, few // 2))
    stack.eval()
    with torch.no_grad():
        costs["table"] = cost(lambda: encoding.prepare(positions), few)
        prepared = encoding.prepare(positions)
        costs["apply"] = cost(lambda: encoding.transform_qkv(q, k, k, prepared), repeats)
        costs["memory"] = peak_bytes(lambda: encoding.transform_qkv(q, k, k, prepared)) / (2 * q.nbytes)
        if isinstance(encoding, FoldableEncoding):
            folded: Any = copy.deepcopy(encoding)
            folded.fold_(nn.Linear(HEADS * D, 2 * HEADS * D))
            costs["folded table"] = cost(lambda: folded.prepare(positions), repeats)
            finished = folded.prepare(positions)
            costs["folded apply"] = cost(lambda: folded.transform_qkv(q, k, k, finished), repeats)
    return costs


def dense_comrope(side: int, q: Tensor, k: Tensor, repeats: int) -> dict[str, float]:
    """ComRoPE as its released code does it: an exponential per token, and a dense ``d x d`` matrix for each."""
    stack = create_encoding("comrope_ld", HEADS * D, HEADS)
    encoding: Any = stack.encodings_of(0)[0]
    coords = encoding.token_coordinates(Positions.grid(side, side, num_prefix=1))
    generators = encoding.directions()[..., None, None] * encoding.skew()  # (A, heads, m, b, b)

    def table() -> Tensor:
        blocks = matrix_exp(torch.einsum("na,ahmij->hnmij", coords[0], generators))
        dense = blocks.new_zeros(HEADS, coords.shape[1], D // 8, 8, D // 8, 8)
        dense.diagonal(dim1=2, dim2=4).copy_(blocks.permute(0, 1, 3, 4, 2))
        return dense.flatten(4, 5).flatten(2, 3)

    with torch.no_grad():
        matrices = table()
        return {
            "train table": cost(table, max(3, repeats // 10)),
            "train apply": cost(lambda: [(matrices @ x[..., None])[..., 0] for x in (q, k)], max(3, repeats // 10)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rotary_catalogue", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kept = keep_freed_memory()
    print(machine() + ("" if kept else "; freed memory is given back to the system, expect noise"))
    repeats = 10 if options.quick else 40
    for tokens in (197, 577, 1025):
        side = int((tokens - 1) ** 0.5)
        q, k = (x.contiguous() for x in torch.randn(2, BATCH, HEADS, tokens, D).unbind(0))
        out_q, out_k = torch.empty_like(q), torch.empty_like(k)

        def memcpy(q: Tensor = q, k: Tensor = k, out_q: Tensor = out_q, out_k: Tensor = out_k) -> None:
            out_q.copy_(q)
            out_k.copy_(k)

        unit = cost(memcpy, repeats)
        found = {"copy": {"apply": unit}}
        try:
            from timm.layers.pos_embed_sincos import apply_rot_embed_cat

            emb = torch.randn(tokens, 2 * D)
            found["timm, application"] = {
                "apply": cost(lambda e=emb, a=q, b=k: [apply_rot_embed_cat(x, e) for x in (a, b)], repeats)  # type: ignore[misc]
            }
        except ImportError:
            pass
        if tokens == 197:
            found["comrope, dense"] = dense_comrope(side, q, k, repeats)
        for name in methods():
            found[name] = row(name, side, q, k, repeats)
        mixed = found["rope_mixed"]["table"] + found["rope_mixed"]["apply"]
        columns = [
            "train table", "train apply", "forward+backward", "table", "apply", "folded table", "folded apply", "memory"
        ]  # fmt: skip
        rows = []
        for name, costs in found.items():
            best = [costs.get(f"folded {part}", costs.get(part)) for part in ("table", "apply")]
            ratios = ["", ""]
            if best[1] is not None:
                ratios[0] = f"{best[1] / unit:.2f}"
            if best[0] is not None and best[1] is not None:
                ratios[1] = f"{(best[0] + best[1]) / mixed:.2f}"
            rows.append([name, *(f"{costs[key]:.2f}" if key in costs else "" for key in columns), *ratios])
        title = f"q and k ({BATCH}, {HEADS}, {tokens}, {D}) float32, ms; memory in sizes of q and k"
        print_table(title, ["", *columns, "x copy", "x mixed"], rows)


if __name__ == "__main__":
    main()
