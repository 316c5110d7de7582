"""The most memory that a piece of work takes, above what was in use before it."""

import contextlib
import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import torch

PROCESS = Path("/proc/self")  # Linux
RESET_PEAK = "5"  # written to clear_refs: the peak resident size starts again from the present one


def peak_memory_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Do ``work``, and say how far memory rose above its level before.

    Args:
        work: what to do.
        device: where it is done. On CUDA allocated tensors are counted, on a CPU the resident pages
            of the process, which is coarser.

    Returns:
        bytes, or None where the system does not say.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - allocated
    counting = device.type == "cpu" and _reset_peak()
    before = _status_bytes("VmRSS") if counting else None
    work()
    after = _status_bytes("VmHWM") if counting else None
    return None if before is None or after is None else max(0, after - before)


def _reset_peak() -> bool:
    """Give freed pages back, lest reused ones go uncounted, and forget the peak so far."""
    with contextlib.suppress(
        OSError, AttributeError, TypeError
    ):  # not glibc: it may hold some back
        ctypes.CDLL(None).malloc_trim(0)
    try:
        (PROCESS / "clear_refs").write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int | None:
    try:
        status = (PROCESS / "status").read_text()
    except OSError:
        return None
    found = re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)
    return 1024 * int(found[1]) if found else None
