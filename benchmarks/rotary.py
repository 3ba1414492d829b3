"""Cost of rotating queries and keys against a copy of the same bytes and against timm.

``python -m benchmarks.rotary [--threads 1] [--quick]``

All rows of a table are measured in one process. The unit is ``copy_`` of q and k into preallocated memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks._timing import blocked, keep_freed_memory, machine, peak_bytes, print_table, round_robin
from mmpos import Positions, create_encoding
from mmpos.functional.rotary import rotate, rotate_, rotate_plain

BATCH, HEADS, D = 8, 6, 64


def functions(tokens: int) -> dict[str, Callable[[], object]]:
    """What is compared at one sequence length, q and k together."""
    side = int((tokens - 1) ** 0.5)
    positions = Positions.grid(side, side, num_prefix=1)
    q, k = torch.randn(2, BATCH, HEADS, tokens, D).unbind(0)
    q, k = q.contiguous(), k.contiguous()
    out_q, out_k = torch.empty_like(q), torch.empty_like(k)
    low_q, low_k = q.bfloat16(), k.bfloat16()
    fused = torch.randn(BATCH, tokens, 3, HEADS, D).permute(2, 0, 3, 1, 4)
    tables = {
        layout: create_encoding("rope_axial", HEADS * D, HEADS, layout=layout).prepare(positions)[0].prepared[0]
        for layout in ("interleaved", "half")
    }
    table = tables["interleaved"]
    mixed = create_encoding("rope_mixed", HEADS * D, HEADS).prepare(positions)[0].prepared[0]

    def both(rotation_of: Callable[[Tensor], Tensor], left: Tensor = q, right: Tensor = k) -> Callable[[], object]:
        return lambda: (rotation_of(left), rotation_of(right))

    result: dict[str, Callable[[], object]] = {
        "memcpy": lambda: (out_q.copy_(q), out_k.copy_(k)),
        "clone": lambda: (q.clone(), k.clone()),
        "product of two tensors": lambda: (torch.mul(q, k, out=out_q), torch.mul(k, q, out=out_k)),
        "rotate": both(lambda x: rotate(x, table)),
        "rotate_ (in place)": both(lambda x: rotate_(x, table)),
        "rotate, per-head table": both(lambda x: rotate(x, mixed)),
        "rotate, views of a fused qkv": both(lambda x: rotate(x, table), fused[0], fused[1]),
        "rotate, half layout": both(lambda x: rotate(x, tables["half"])),
        "rotate, bfloat16": both(lambda x: rotate(x, table), low_q, low_k),
        "rotate_plain (the definition)": both(lambda x: rotate_plain(x, table)),
    }
    try:
        from timm.layers.pos_embed_sincos import apply_rot_embed_cat
    except ImportError:
        return result
    cos, sin = (part.repeat_interleave(2, -1)[0, 0] for part in (table.cos, table.sin))
    embedding = torch.cat([sin, cos], dim=-1)
    result["timm apply_rot_embed_cat"] = both(lambda x: apply_rot_embed_cat(x, embedding))
    return result


def tables(tokens: int) -> dict[str, Callable[[], object]]:
    """Making the tables of one forward pass of a 12-layer model."""
    side = int((tokens - 1) ** 0.5)
    axial, mixed = (create_encoding(name, HEADS * D, HEADS, depth=12) for name in ("rope_axial", "rope_mixed"))
    return {
        "rope_axial, one table": lambda: axial.prepare(Positions.grid(side, side, num_prefix=1)),
        "rope_mixed, 12 tables": lambda: mixed.prepare(Positions.grid(side, side, num_prefix=1)),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rotary", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kept = keep_freed_memory()
    print(machine() + ("" if kept else "; freed memory is given back to the system, expect noise"))
    for tokens in (197, 577, 1025):
        compared = functions(tokens)
        shrink = (4 if options.quick else 1) * (1 if tokens == 197 else 3)
        warm = blocked(compared, repeats=60 // shrink)
        turns = round_robin(compared, rounds=150 // shrink)
        size = 2 * BATCH * HEADS * tokens * D * 4
        rows = [
            [
                name,
                f"{warm[name] * 1e3:.3f}",
                f"{warm[name] / warm['memcpy']:.2f}",
                f"{turns[name] * 1e3:.3f}",
                f"{turns[name] / turns['memcpy']:.2f}",
                f"{peak_bytes(function) / size:.2f}",
            ]
            for name, function in compared.items()
        ]
        columns = ["", "blocked ms", "x memcpy", "round robin ms", "x memcpy", "memory / size of q, k"]
        print_table(f"q and k ({BATCH}, {HEADS}, {tokens}, {D}) float32", columns, rows)
        made = blocked(tables(tokens), repeats=20 // shrink or 2)
        print_table("tables of a forward pass", ["", "ms"], [[name, f"{t * 1e3:.3f}"] for name, t in made.items()])


if __name__ == "__main__":
    main()
