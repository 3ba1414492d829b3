"""Every golden case under this folder, and the runner itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tests.golden.__main__ import find_cases, main, run_case
from tests.golden.case import Case, Unknown

HERE = Path(__file__).parent
CASES = find_cases(HERE)


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_case(path: Path) -> None:
    result = run_case(path)
    assert result.verdict == "ok", result.line()


def test_foundation_cases_are_here() -> None:
    methods = {path.parent.name for path in CASES}
    assert {"rope_axial", "rope_mixed", "rope_scaling", "sincos_nd", "ape_resample"} <= methods


# -- the runner --------------------------------------------------------------------------------------------------------


def read(path: Path) -> tuple[dict[str, Tensor], dict]:
    with safe_open(str(path), framework="pt") as file:
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, json.loads(file.metadata()["spec"])


def write(folder: Path, method: str, tensors: dict[str, Tensor], spec: dict) -> Path:
    path = folder / method / "case.safetensors"
    path.parent.mkdir(exist_ok=True, parents=True)
    save_file(tensors, str(path), metadata={"spec": json.dumps(spec)})
    return path


def float_outputs() -> list[tuple[Path, str]]:
    """One output of each kind of case of the foundation."""
    chosen = []
    for method in ("rope_axial", "rope_mixed", "rope_scaling", "sincos_nd", "ape_resample"):
        for path in find_cases(HERE / method):
            tensors, _ = read(path)
            chosen += [(path, name) for name in sorted(tensors) if name.startswith("out.")]
    return chosen


@pytest.mark.parametrize(("path", "name"), float_outputs(), ids=lambda value: getattr(value, "stem", value))
def test_a_changed_number_fails(path: Path, name: str, tmp_path: Path) -> None:
    tensors, spec = read(path)
    if spec["method"] == "ape_resample" and name == "out.added":
        index = (0, 0, 0)  # padding further back is undefined
    else:
        index = tuple(size // 2 for size in tensors[name].shape)
    changed = tensors[name].clone()
    changed[index] += 1e-2 * max(1.0, float(changed.abs().max()))
    result = run_case(write(tmp_path, spec["method"], tensors | {name: changed}, spec))
    assert result.verdict == "FAIL"
    assert name.removeprefix("out.") in result.reason


@pytest.mark.parametrize(
    "method", ["rope_axial", "rope_mixed", "rope_scaling", "sincos_nd", "ape_resample", "tpe_2d", "reading_order"]
)
def test_unknown_options_and_tensors_have_no_runner(method: str, tmp_path: Path) -> None:
    for path in find_cases(HERE / method):
        tensors, spec = read(path)
        more = spec | {"config": spec["config"] | {"unheard_of": 3}}
        result = run_case(write(tmp_path, method, tensors, more))
        assert (result.verdict, result.reason) == ("no runner", "unknown: config.unheard_of"), path
        result = run_case(write(tmp_path, method, tensors | {"in.unheard_of": torch.ones(2)}, spec))
        assert (result.verdict, result.reason) == ("no runner", "unknown: in.unheard_of"), path
        result = run_case(write(tmp_path, method, tensors | {"param.unheard_of": torch.ones(2)}, spec))
        assert result.verdict == "no runner", path
        result = run_case(write(tmp_path, method, tensors | {"out.unheard_of": torch.ones(2)}, spec))
        assert result.verdict == "no runner", path
        assert "unheard_of" in result.reason


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("rope_axial/ropevit_4x4_cls", {"layout": "spiral"}),
        ("rope_axial/ropevit_4x4_cls", {"coords": "centred"}),
        ("rope_axial/timm_xy_theta100_3x5", {"grid_type": "hexagonal"}),
        ("rope_mixed/depth3_3x5", {"axis_order": "zx"}),
        ("rope_scaling/axial2d_yarn_train4x4_to_6x8", {"kind": "longrope"}),
        ("rope_scaling/axial2d_yarn_train4x4_to_6x8", {"scale": "max over axes"}),
        ("rope_scaling/ultraflux_2d_grid6x9_train4x8", {"method": "ntk"}),
        ("ape_resample/timm_cls_7x7_to_10x5", {"interpolation": "lanczos"}),
        ("ape_resample/naflex_learned_mixed", {"type": "rotary"}),
        ("sincos_nd/timm_2d_3x5", {"default": {"normalise": True}}),
        ("tpe_2d/attn_prefill", {"hidden_size": 64}),
        ("tpe_2d/decode", {"decode_steps": 2}),
        ("reading_order/rope_codes", {"include_self": False}),
        ("reading_order/tuta_tree", {"attn_method": "mean"}),
    ],
)
def test_unknown_values_have_no_runner(case: str, change: dict, tmp_path: Path) -> None:
    tensors, spec = read(HERE / f"{case}.safetensors")
    result = run_case(write(tmp_path, case.split("/")[0], tensors, spec | {"config": spec["config"] | change}))
    assert result.verdict == "no runner", result.line()


def test_a_wrong_shape_fails(tmp_path: Path) -> None:
    tensors, spec = read(HERE / "sincos_nd" / "pape_absolute_2d.safetensors")
    result = run_case(write(tmp_path, "sincos_nd", tensors | {"out.pe": tensors["out.pe"][:, :-1]}, spec))
    assert result.verdict == "FAIL"
    assert "shape" in result.reason


def test_not_a_number_fails(tmp_path: Path) -> None:
    tensors, spec = read(HERE / "sincos_nd" / "pape_absolute_2d.safetensors")
    broken = tensors["out.pe"].clone()
    broken[0, 0, 0] = float("nan")
    assert run_case(write(tmp_path, "sincos_nd", tensors | {"out.pe": broken}, spec)).verdict == "FAIL"


def test_a_case_without_outputs_does_not_pass(tmp_path: Path) -> None:
    tensors, spec = read(HERE / "sincos_nd" / "pape_absolute_2d.safetensors")
    del tensors["out.pe"]
    assert run_case(write(tmp_path, "sincos_nd", tensors, spec)).verdict == "FAIL"


def test_exit_status_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors, spec = read(HERE / "sincos_nd" / "pape_absolute_2d.safetensors")
    write(tmp_path, "sincos_nd", tensors, spec)
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("sincos_nd/case  ")
    assert lines[0].endswith("  ok")
    assert lines[-1] == "1 passed, 0 failed, 0 without a runner"

    write(tmp_path, "no_such_method", tensors, spec)
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed, 1 without a runner"
    assert main([str(tmp_path), "--only", "sincos_nd"]) == 0
    capsys.readouterr()

    damaged = tmp_path / "rope_axial" / "damaged.safetensors"
    damaged.parent.mkdir()
    damaged.write_bytes(b"nonsense")
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 1 failed, 1 without a runner"

    assert main([str(tmp_path), "--only", "misspelt"]) == 2
    assert "no golden cases" in capsys.readouterr().err


def test_case_bookkeeping(tmp_path: Path) -> None:
    path = write(tmp_path, "m", {"in.x": torch.ones(2), "out.y": torch.ones(2)}, {"config": {"a": 1, "b": "two"}})
    case = Case(path)
    assert case.unread() == ["config.a", "config.b", "in.x"]
    assert case.option("a") == 1
    assert case.option("c", 5) == 5
    assert case.expect("c", 1) is None
    with pytest.raises(Unknown, match="config without c"):
        case.option("c")
    with pytest.raises(Unknown, match="config.b='two'"):
        case.expect("b", "one")
    with pytest.raises(Unknown, match=r"in\.z"):
        case.input("z")
    case.describe("b")
    assert case.input("x", torch.float64).dtype == torch.float64
    assert case.unread() == []
