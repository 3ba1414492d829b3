"""PaPE attention against plain SDPA and against the 3 M + 2 columns of the released code:
``python -m benchmarks.additive``.

Every row is measured in one process, the contenders taking turns, and shown as the median time and the median of the
ratios to plain SDPA of the same turn. *attention* is what happens between finished coefficients and the attention
output: building the columns, widening q and k, padding v, the kernel. *layer part* adds the maps from the block input
to the coefficients, which no column layout can avoid and which cost about as much as attention itself at 197 tokens (D
x h M multiplications per token, M = 50).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos import Positions, create_encoding
from mmpos.attention import fused_attention
from mmpos.functional.parabolic import key_columns, query_columns, reference_columns, widen

GRIDS = {197: (14, 14), 1025: (32, 32)}


def timed(work: Callable[[], Tensor]) -> float:
    """Milliseconds of one call."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return 1e3 * (time.perf_counter() - start)


def contenders(tokens: int, batch: int, dtype: torch.dtype, device: str) -> dict[str, Callable[[], Tensor]]:
    """The work of each row for ViT-B: 12 heads of 64, one prefix token."""
    torch.manual_seed(0)
    dim, heads, width = 768, 12, 64
    positions = Positions.grid(*GRIDS[tokens], num_prefix=1, device=device)
    q, k, v = torch.randn(3, batch, heads, tokens, width, device=device).to(dtype)
    x = torch.randn(batch, tokens, dim, device=device).to(dtype)
    scale = width**-0.5
    stacks = {name: create_encoding(name, dim, heads).to(device).to(dtype) for name in ("pape", "pape_ri")}
    encoding = stacks["pape"].layers[0]["pape"]
    prepared = {name: stack.prepare(positions)[0] for name, stack in stacks.items()}
    places, folded = prepared["pape"].prepared[0]
    forms, slope = encoding.coefficients(x, folded)
    split = (-1, (heads, encoding.parabolas))
    a = F.softplus(encoding.curvature(x).float()).unflatten(*split).transpose(1, 2).contiguous()
    b = encoding.slope(x).float().unflatten(*split).transpose(1, 2).contiguous()
    raw = torch.cat([torch.zeros(1, 1, 2, device=device), positions.coords + 1], dim=1)

    def minimal() -> Tensor:
        queries = query_columns(forms, slope, places.coords, places.balance)
        wide_q, wide_k = encoding.append(q, k, queries, key_columns(places.coords, places.balance), None, places)
        return fused_attention(wide_q, wide_k, v, bias=None, scale=scale)

    def reference() -> Tensor:
        queries, keys = reference_columns(raw, a, b, encoding.axes_map)
        return fused_attention(widen(q, queries), widen(k, keys), v, bias=None, scale=scale)

    def layer(name: str) -> Callable[[], Tensor]:
        def work() -> Tensor:
            own, state = stacks[name].layers[0][name], prepared[name].prepared[0]
            return fused_attention(*own.transform_qkv(q, k, v, state, x), bias=None, scale=scale)

        return work

    return {
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v, scale=scale),
        "PaPE attention, 5 columns": minimal,
        "PaPE attention, 152 columns": reference,
        "PaPE layer part": layer("pape"),
        "PaPE-RI layer part": layer("pape_ri"),
    }


@torch.inference_mode()
def measure(tokens: int, batch: int, dtype: torch.dtype, device: str, turns: int) -> list[tuple[str, float, float]]:
    """Name, median milliseconds and median ratio to SDPA of each contender."""
    work = contenders(tokens, batch, dtype, device)
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(turns + 3):
        for name, call in work.items():
            spent = timed(call)
            if turn >= 3:
                times[name].append(spent)
    plain = times["SDPA"]
    return [
        (name, statistics.median(own), statistics.median(t / p for t, p in zip(own, plain, strict=True)))
        for name, own in times.items()
    ]


def main() -> None:
    """Print one table for each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", choices=sorted(GRIDS), default=sorted(GRIDS))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    for tokens in options.tokens:
        print(f"{tokens} tokens, batch {options.batch}, 12 heads x 64, {options.dtype}, {options.device}")
        for name, spent, ratio in measure(tokens, options.batch, dtype, options.device, options.turns):
            print(f"  {name:30s} {spent:9.2f} ms  {ratio:5.2f} x SDPA")


if __name__ == "__main__":
    main()
