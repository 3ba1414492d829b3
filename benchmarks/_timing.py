"""Timing for CPU benchmarks on machines that are not quiet: medians, ratios within one process, two orders of calls.

*Blocked* repeats each function in a row, so its buffers are warm; *round robin* calls all functions in turn, so each
finds cold buffers, as in a model. Ratios to a copy of the same bytes are comparable between machines, times are not.
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages

import torch  # noqa: E402

__all__ = ["blocked", "keep_freed_memory", "machine", "peak_bytes", "print_table", "round_robin"]

Functions = Mapping[str, Callable[[], object]]


def machine() -> str:
    """Processor, cores, torch: the kind of machine behind the numbers."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return (
        f"{cpu}, {torch.get_num_threads()} thread(s), {torch.backends.cpu.get_cpu_capability()}, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed memory instead of giving it back to the system; whether it did.

    Otherwise every result of a few megabytes is fresh memory, and the benchmark measures page faults.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(-3, 1 << 30)) and bool(libc.mallopt(-1, 1 << 30))  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        return False


def _time(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def blocked(functions: Functions, *, repeats: int = 60, rounds: int = 5) -> dict[str, float]:
    """Median seconds when each function is repeated in a row."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            times[name] += [_time(function) for _ in range(repeats)]
    return {name: statistics.median(values) for name, values in times.items()}


def round_robin(functions: Functions, *, rounds: int = 150) -> dict[str, float]:
    """Median seconds when the functions take turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(_time(function))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_bytes(function: Callable[[], object]) -> int:
    """Largest amount of CPU memory that torch held at once during one call, beyond what it held before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = function()
    del result
    held = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A plain aligned table."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    print(f"\n{title}")
    for row in [columns, ["-" * width for width in widths], *rows]:
        sized = enumerate(zip(row, widths, strict=True))
        cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in sized]
        print("  ".join(cells).rstrip())
