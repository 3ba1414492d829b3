"""Run golden cases: ``python -m tests.golden DIR [--only rope_axial,rope_mixed]``.

Prints one line per case, ``method/case  max error  tolerance  ok|FAIL|no runner``, and last
``N passed, N failed, N without a runner``. The exit status is 0 only if nothing failed and nothing lacked a runner.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.golden.case import Case, Unknown


@dataclass(frozen=True)
class Result:
    """Outcome of one case; ``verdict`` is ``ok``, ``FAIL`` or ``no runner``, with a reason behind it."""

    case: str
    verdict: str
    error: float = float("nan")
    tolerance: float = float("nan")
    reason: str = ""

    def line(self) -> str:
        """As printed."""
        numbers = f"{self.error:.2e}  {self.tolerance:.0e}" if self.error == self.error else "-  -"
        return f"{self.case}  {numbers}  {self.verdict}" + (f" ({self.reason})" if self.reason else "")


def run_case(path: Path) -> Result:
    """Rebuild the method from the case, feed its inputs and compare every output."""
    label = f"{path.parent.name}/{path.stem}"
    try:
        case = Case(path)
    except Exception as error:  # a damaged file must not hide the other cases
        return Result(label, "FAIL", reason=f"unreadable: {error}".splitlines()[0])
    module = f"tests.golden.runners.{case.method}"
    if importlib.util.find_spec(module) is None:
        return Result(label, "no runner")
    try:
        runner = importlib.import_module(module)
        produced = runner.run(case)
    except Unknown as unknown:
        return Result(label, "no runner", reason=f"unknown: {unknown}")
    except Exception as error:  # a crash of our code on a case is a failure of the case, and the others still run
        return Result(label, "FAIL", reason=f"{type(error).__name__}: {error}".splitlines()[0])
    expected = case.outputs()
    if not expected:
        return Result(label, "FAIL", reason="the case stores no output to compare")
    missing = [f"out.{name}" for name in expected if name not in produced]
    unread = case.unread() + missing
    if unread:
        return Result(label, "no runner", reason=f"unknown: {', '.join(unread)}")
    worst, worst_tolerance, worst_name, failed = -1.0, 0.0, "", []
    for name, reference in expected.items():
        ours = produced[name].detach()
        # tolerance(name, reference, case): absolute error allowed for one output
        tolerance = float(runner.tolerance(name, reference, case))
        if ours.shape != reference.shape:
            failed.append(f"{name} has shape {tuple(ours.shape)}, expected {tuple(reference.shape)}")
            continue
        if reference.is_floating_point() or reference.is_complex():
            wide = torch.complex128 if reference.is_complex() else torch.float64
            ours, reference = ours.to(wide), reference.to(wide)
            # infinities and NaN must stand in the same places
            finite = torch.isfinite(reference)
            same = torch.equal(torch.isfinite(ours), finite) and torch.equal(
                torch.nan_to_num(ours[~finite].real), torch.nan_to_num(reference[~finite].real)
            )
            error = float((ours - reference)[finite].abs().max()) if finite.any() else 0.0
            error = error if same else float("inf")
        else:
            error = float((ours.long() - reference.long()).abs().max()) if reference.numel() else 0.0
        if not error <= tolerance:
            failed.append(f"{name} off by {error:.2e}")
        ratio = error / tolerance if tolerance else (float("inf") if error else 0.0)
        if ratio >= worst:
            worst, worst_tolerance, worst_name, worst_error = ratio, tolerance, name, error
    if failed:
        return Result(label, "FAIL", worst_error if worst_name else float("inf"), worst_tolerance, "; ".join(failed))
    return Result(label, "ok", worst_error if worst_name else 0.0, worst_tolerance)


def find_cases(root: Path, only: list[str] | None = None) -> list[Path]:
    """All ``*.safetensors`` one folder below ``root`` (or in ``root`` itself when it is a method folder)."""
    paths = sorted(root.glob("*/*.safetensors")) or sorted(root.glob("*.safetensors"))
    return [path for path in paths if not only or path.parent.name in only]


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("dir", type=Path, help="folder with one sub-folder of .safetensors files per method")
    parser.add_argument("--only", default="", help="comma-separated methods")
    options = parser.parse_args(arguments)
    only = [name for name in options.only.split(",") if name]
    paths = find_cases(options.dir, only)
    if not paths:
        print(f"no golden cases under {options.dir}" + (f" for {', '.join(only)}" if only else ""), file=sys.stderr)
        return 2
    results = []
    for path in paths:
        results.append(run_case(path))
        print(results[-1].line(), flush=True)
    passed = sum(result.verdict == "ok" for result in results)
    failed = sum(result.verdict == "FAIL" for result in results)
    without = len(results) - passed - failed
    print(f"{passed} passed, {failed} failed, {without} without a runner")
    return 0 if passed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
