"""Resized learned tables: timm, Hugging Face ViT family, SigLIP 2, NaFlex in all its forms."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos import Positions, create_encoding
from mmpos.checkpoints import axis_tables, learned_table
from mmpos.functional.resample import add_axis_tables, read_table, resample_grid, resample_table
from tests.golden.case import Case, Unknown


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-9 if reference.dtype == torch.float64 else 2e-2 if reference.dtype.itemsize == 2 else 1e-5


def run(case: Case) -> dict[str, Tensor]:
    if case.has_option("type"):
        return _naflex(case)
    if case.has("in.spatial_shapes"):
        return _mixed_batch(case)
    return _one_size(case)


def _one_size(case: Case) -> dict[str, Tensor]:
    mode = case.expect("interpolation", "bicubic", "bilinear") or "bicubic"
    antialias = bool(case.option("antialias"))
    num_prefix = case.option("num_prefix_tokens", 0)
    new = tuple(case.option("new_size"))
    offset = float(case.option("interpolate_offset", 0.0) or 0.0)  # DINO models
    table = case.input("pos_embed")
    old = case.option("old_size", None)
    state = learned_table(table, old, num_prefix)
    grid = tuple(state["table_grid"].tolist())
    out = resample_table(table, grid, new, mode, antialias, num_prefix=num_prefix, offset=offset)
    if not offset and table.dtype == torch.float32:
        _check_module(state["table"], grid, new, mode, antialias, num_prefix, out[0])
    return {"pos_embed": out}


def _check_module(
    table: Tensor, grid: tuple[int, ...], new: tuple[int, ...], mode: str, antialias: bool, num_prefix: int, out: Tensor
) -> None:
    """The encoding that was trained at the old grid, and one that loads the table at the new grid add the same rows."""
    x = torch.zeros(1, out.shape[0], table.shape[1])
    for train_grid in (grid, new):
        options = {"mode": mode, "antialias": antialias, "num_prefix": num_prefix, "train_grid": train_grid}
        stack = create_encoding("learned", table.shape[1], 1, **options)
        state = {"table": table, "table_grid": torch.tensor(grid)}
        stack.load_state_dict({f"shared.learned.{key}": value for key, value in state.items()})
        added = stack.add_to_tokens(x, Positions.grid(*new, num_prefix=num_prefix))[0]
        if not torch.allclose(added, out, rtol=0, atol=1e-6):
            raise AssertionError(f"the learned encoding of grid {train_grid} adds other rows than resample_table gives")


def _mixed_batch(case: Case) -> dict[str, Tensor]:
    mode = case.expect("interpolation", "bicubic", "bilinear")
    antialias = bool(case.option("antialias"))
    sizes = [(int(h), int(w)) for h, w in case.input("spatial_shapes")]
    positions = Positions.grids(sizes, length=case.option("max_length"))
    table = case.input("pos_embed")
    assert positions.extent is not None
    # padding tokens stand at the origin, so they read cell 0 as the reference says
    return {"pos_embed": read_table(table, positions.coords, positions.extent, mode, antialias)}


def _naflex(case: Case) -> dict[str, Tensor]:
    kind = case.expect("type", "learned", "factorized")
    keep_aspect = bool(case.option("ar_preserving"))
    single_places = bool(case.option("grid_sample"))
    mode = case.expect("interp", "bicubic", "bilinear")
    antialias = bool(case.option("antialias", True))
    case.expect("align_corners", False)
    grid = tuple(case.option("grid_size"))
    coords = case.input("patch_coord").float()
    sizes = [tuple(size) for size in case.option("sizes")]
    extent = coords.amax(1) + 1
    if extent.tolist() != [list(map(float, size)) for size in sizes]:
        raise Unknown(f"sizes {sizes} that are not those of patch_coord")
    if kind == "factorized":  # always linear and without antialias, whatever interp says
        tables = axis_tables(case.param("pos_embed_y"), case.param("pos_embed_x"))
        if tuple(len(table) for table in tables) != grid:
            raise Unknown(f"grid_size {grid} that is not that of the tables")
        added = add_axis_tables(tables, coords, extent, keep_aspect=keep_aspect)
        return {"added": added if single_places else _without_padding(added, sizes)}
    state = learned_table(case.param("pos_embed"), grid)
    values = state["table"].unflatten(0, grid)
    if single_places:
        return {"added": read_table(values, coords, extent, mode, antialias=False, keep_aspect=keep_aspect)}
    rows = []
    for size in sizes:
        # the reference returns the table itself at its own size, even a rectangle under the aspect rule
        resized = resample_grid(values, size, mode, antialias, keep_aspect=keep_aspect and size != grid)
        rows.append(resized.flatten(0, 1))
    dense = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    dense = torch.nn.functional.pad(dense, (0, 0, 0, coords.shape[1] - dense.shape[1]))
    if not keep_aspect or all(size != grid or len(set(grid)) == 1 for size in sizes):
        tokens = read_table(values, coords, extent, mode, antialias, keep_aspect=keep_aspect)
        if not torch.allclose(_without_padding(tokens, sizes), dense, rtol=0, atol=1e-5):
            raise AssertionError("reading single tokens differs from resizing the whole table")
    return {"added": dense}


def _without_padding(added: Tensor, sizes: list[tuple[int, ...]]) -> Tensor:
    """The dense paths of the reference leave padding at zero."""
    counts = torch.tensor([h * w for h, w in sizes])
    return added * (torch.arange(added.shape[1]) < counts[:, None])[..., None]
