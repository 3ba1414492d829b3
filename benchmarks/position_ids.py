"""Position ids of a multimodal batch against transformers' own builder: ``python -m benchmarks.position_ids``.

A batch of 4 rows, 100,000 tokens in all, with 500 images of mixed sizes and 20 videos between text. Both builders run
in one process on the same token types, grids and mask, and must give the same ids.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from benchmarks._timing import blocked, keep_freed_memory, machine, print_table
from mmpos.multimodal import PositionLayout, scheme

ROWS, TOKENS, IMAGES, VIDEOS, MERGE = 4, 100_000, 500, 20, 2


def batch(tokens: int = TOKENS, images: int = IMAGES, videos: int = VIDEOS, seed: int = 0) -> dict[str, Tensor]:
    """Types, grids and mask of a left-padded batch; text fills what images and videos leave."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high + 1, (count,), generator=generator).tolist()

    most = max(2, int((tokens / (3 * images)) ** 0.5))  # a third of the tokens, more or less, are image tokens
    image_sizes = [(1, h, w) for h, w in zip(draw(2, 2 * most, images), draw(2, 2 * most, images), strict=True)]
    video_sizes = [
        (t, h, w) for t, h, w in zip(draw(4, 16, videos), draw(3, 9, videos), draw(3, 9, videos), strict=True)
    ]
    blocks = [(1, size) for size in image_sizes] + [(2, size) for size in video_sizes]
    order = torch.randperm(len(blocks), generator=generator).tolist()
    length = tokens // ROWS
    types = torch.zeros(ROWS, length, dtype=torch.long)
    mask = torch.zeros(ROWS, length, dtype=torch.long)
    grids: dict[int, list[list[int]]] = {1: [], 2: []}
    for row in range(ROWS):
        mine = [blocks[number] for number in order[row::ROWS]]
        visual = sum(t * h * w for _, (t, h, w) in mine)
        real = length - row * 7
        spare = real - visual - len(mine) - 1
        if spare < 0:
            raise ValueError(f"tokens: {visual} visual tokens and the text between them do not fit a row of {real}")
        at = length - real
        mask[row, at:] = 1
        for code, (t, h, w) in mine:
            at += 1 + spare // (len(mine) + 1)
            types[row, at : at + t * h * w] = code
            at += t * h * w
            grids[code].append([t, MERGE * h, MERGE * w])
    return {
        "mm_token_type_ids": types,
        "attention_mask": mask,
        "image_grid_thw": torch.tensor(grids[1]),
        "video_grid_thw": torch.tensor(grids[2]),
    }


def reference_model() -> Any:
    """The smallest Qwen2-VL, for its builder alone."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 8}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = Qwen2VLConfig(
        text_config={"vocab_size": 8, "hidden_size": 16, "rope_parameters": rope, **tokens, **small},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "spatial_merge_size": MERGE},
    )
    return Qwen2VLForConditionalGeneration(config).model


def ours(inputs: dict[str, Tensor]) -> PositionLayout:
    """The same rule by ``mmpos``."""
    return scheme("mrope_hf5").layout_from_types(
        inputs["mm_token_type_ids"],
        image_grids=inputs["image_grid_thw"],
        video_grids=inputs["video_grid_thw"],
        mask=inputs["attention_mask"],
        merge_size=MERGE,
    )


def main() -> None:
    """Print both times and their ratio."""
    parser = argparse.ArgumentParser(description="Position ids against transformers' get_rope_index.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    inputs, model = batch(), reference_model()
    theirs = lambda: model.get_rope_index(inputs["mm_token_type_ids"], **inputs)  # noqa: E731
    ids, _ = theirs()
    if not torch.equal(ours(inputs).position_ids(), ids):
        raise RuntimeError("the two builders disagree")
    slow = blocked({"transformers": theirs}, repeats=3, rounds=options.rounds)["transformers"]
    fast = blocked({"mmpos": lambda: ours(inputs)}, repeats=30, rounds=options.rounds)["mmpos"]
    print(machine())
    print_table(
        f"position ids of {TOKENS:,} tokens, {IMAGES} images, {VIDEOS} videos, batch {ROWS}",
        ["builder", "ms", "times faster"],
        [
            ["transformers get_rope_index", f"{slow * 1e3:.2f}", "1.0"],
            ["mmpos layout_from_types", f"{fast * 1e3:.2f}", f"{slow / fast:.1f}"],
        ],
    )


if __name__ == "__main__":
    main()
