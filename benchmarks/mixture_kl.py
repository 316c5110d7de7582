"""python benchmarks/mixture_kl.py --output RESULT.json --figure docs/figures/mixture_kl_memory.png

Time and memory of the distillation loss, head and both passes: fused against the plain formula.

Each variant runs in a process of its own; the processes take turns (ABCABC), two warm-up steps
first, and the median of the timed steps counts. Extra memory is the peak over a step above what lay
there before it: Linux, by /proc/self/clear_refs and VmHWM - VmRSS. It includes the gradient of the
head (V D float32), the floor of every variant. All variants must give the same gradients to 1e-5.

Peers are rows of their own where they are installed (`pip install --no-deps liger-kernel trl`).
They have no mixture target, so they run N times, once per stream: the same gradients, and a loss
that differs by a constant.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from superpose.losses.mixture_kl import mixture_kl

PACKAGES = {"liger": "liger_kernel", "trl": "trl"}  # rows that need a package
VARIANTS = ("fused", "plain", "liger", "trl")
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# (student hidden (P, D), student weight (V, D), teacher hidden (N, P, D), teacher weight (V, D))


def fused(temperature: float) -> Loss:
    """``superpose.losses.mixture_kl``."""

    def loss(hidden: Tensor, weight: Tensor, streams: Tensor, teacher_weight: Tensor) -> Tensor:
        heads = [
            SimpleNamespace(weight=w, bias=None, softcap=None, scale=1.0)
            for w in (weight, teacher_weight)
        ]
        mixture = torch.full((1, len(streams)), 1 / len(streams))
        result = mixture_kl(
            hidden[None], heads[0], streams[None], heads[1], mixture, temperature=temperature
        )
        return result.total / len(hidden)

    return loss


def plain(temperature: float) -> Loss:
    """Full logits, ``F.kl_div`` and autograd."""

    def loss(hidden: Tensor, weight: Tensor, streams: Tensor, teacher_weight: Tensor) -> Tensor:
        with torch.no_grad():
            logits = streams @ teacher_weight.t()
            probs = torch.softmax(logits / temperature, dim=-1).mean(dim=0)
        log_q = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
        return torch.nn.functional.kl_div(log_q, probs, reduction="batchmean")

    return loss


def liger(temperature: float, chunk_size: int = 256) -> Loss:
    """Liger's chunked loss, eager, at the best of the chunk sizes 128, 256, 512 and 1024."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    kernel = LigerFusedLinearJSDLoss(
        0.0, 1.0, beta=0.0, temperature=temperature, compiled=False, chunk_size=chunk_size
    )

    def loss(hidden: Tensor, weight: Tensor, streams: Tensor, teacher_weight: Tensor) -> Tensor:
        labels = torch.zeros(len(hidden), dtype=torch.long)
        terms = [kernel(hidden, weight, stream, teacher_weight, labels) for stream in streams]
        return torch.stack(terms).mean()

    return loss


def trl(temperature: float) -> Loss:
    """TRL's divergence in vocabulary tiles, at its default tile sizes."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def loss(hidden: Tensor, weight: Tensor, streams: Tensor, teacher_weight: Tensor) -> Tensor:
        terms = []
        for stream in streams:
            divergence, _ = ChunkedDivergenceFunction.apply(
                hidden, weight, None, stream, teacher_weight, None, 0.0, temperature
            )
            terms.append(divergence.mean())
        return torch.stack(terms).mean()

    return loss


def extra_peak_bytes(step: Callable[[], object]) -> int:
    """Highest resident memory during ``step`` above what is resident before it."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
    before = _status_bytes("VmRSS")
    step()
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}; this benchmark needs Linux")


def work(variant: str, num_positions: int, options: argparse.Namespace) -> None:
    """A variant's process: one step and one line of JSON for each line on stdin."""
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    weight = (0.1 * normal(options.vocab, options.hidden)).requires_grad_()
    teacher_weight = 0.1 * normal(options.vocab, options.hidden)
    hidden = normal(num_positions, options.hidden).requires_grad_()
    streams = normal(options.num_streams, num_positions, options.hidden)
    loss: Loss = globals()[variant](options.temperature)
    inputs = (hidden, weight)

    def step() -> None:
        loss(hidden, weight, streams, teacher_weight).backward()

    for _ in sys.stdin:
        hidden.grad = weight.grad = None
        start, cpu_start = time.perf_counter(), time.process_time()
        extra = extra_peak_bytes(step)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        probes = [
            [x.grad.double().norm().item(), *x.grad.flatten()[:: x.numel() // 7].tolist()]
            for x in inputs
            if x.grad is not None
        ]
        answer = {"seconds": seconds, "cpu_seconds": cpu_seconds, "extra_bytes": extra}
        print(json.dumps(answer | {"grads": probes}), flush=True)


def measure(variants: list[str], num_positions: int, options: argparse.Namespace) -> list[dict]:
    """One row for each variant at P positions."""
    processes = {name: _start(name, num_positions, options) for name in variants}
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for _ in range(options.warmup + options.steps):
        for name, process in processes.items():  # in turns, so that a busy machine harms all alike
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("step\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the process of {name} at P = {num_positions} has died")
            steps[name].append(json.loads(line))
    for process in processes.values():
        process.communicate()
    rows = []
    for name, results in steps.items():
        _check_gradients(name, results[-1]["grads"], steps["plain"][-1]["grads"])
        timed = results[options.warmup :]
        median = {
            key: statistics.median(result[key] for result in timed)
            for key in ("seconds", "cpu_seconds", "extra_bytes")
        }
        row = {"variant": name, "positions": num_positions} | median
        rows.append(row | {"seconds_all": [result["seconds"] for result in timed]})
    return rows


def _start(variant: str, num_positions: int, options: argparse.Namespace) -> subprocess.Popen[str]:
    arguments = [sys.executable, __file__, "--worker", variant, str(num_positions)]
    for key in ("vocab", "hidden", "num_streams", "temperature", "threads"):
        arguments += [f"--{key.replace('_', '-')}", str(getattr(options, key))]
    return subprocess.Popen(
        arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},  # idle processes take no time
    )


def _check_gradients(name: str, actual: list[list[float]], expected: list[list[float]]) -> None:
    """Norm and seven entries of each gradient equal the plain formula's to 1e-5 of the largest."""
    for have, want in zip(actual, expected, strict=True):
        if abs(have[0] - want[0]) > 1e-5 * want[0]:
            raise RuntimeError(f"gradient norm of {name} is {have[0]}, plain formula {want[0]}")
        scale = max(abs(entry) for entry in want[1:])
        if max(abs(h - w) for h, w in zip(have[1:], want[1:], strict=True)) > 1e-5 * scale:
            raise RuntimeError(f"gradient of {name} is {have[1:]}, plain formula {want[1:]}")


def show(rows: list[dict], options: argparse.Namespace) -> None:
    """The table; "x fused" are multiples of the fused loss at the same number of positions.

    On a busy machine trust the CPU time, which leaves out what others took.
    """
    shape = f"V = {options.vocab}, D = {options.hidden}, N = {options.num_streams}"
    table = Table(
        title=f"mixture KL, head forward and backward: {shape}, {options.threads} threads"
    )
    table.add_column("positions", justify="right")
    table.add_column("variant")
    columns = {"seconds": "time (s)", "cpu_seconds": "CPU time (s)", "extra_bytes": "peak (MB)"}
    for title in columns.values():
        table.add_column(title, justify="right")
        table.add_column("x fused", justify="right")
    bases = {row["positions"]: row for row in rows if row["variant"] == "fused"}
    for row in rows:
        cells = [str(row["positions"]), row["variant"]]
        for key in columns:
            value, base = row[key], bases[row["positions"]][key]
            cells.append(f"{value / 1e6:.0f}" if key == "extra_bytes" else f"{value:.3f}")
            cells.append(f"{value / base:.2f}" if base else "-")
        table.add_row(*cells, end_section=row["variant"] == rows[-1]["variant"])
    Console(width=max(100, Console().width)).print(table)


def draw(report: dict[str, Any], path: Path) -> None:
    """Extra peak memory against positions, one line for each variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.0, 3.6), layout="constrained")
    rows, settings = report["rows"], report["settings"]
    for name in dict.fromkeys(row["variant"] for row in rows):
        points = [(r["positions"], r["extra_bytes"] / 1e6) for r in rows if r["variant"] == name]
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    floor = settings["vocab"] * settings["hidden"] * 4 / 1e6
    axes.axhline(floor, color="grey", linestyle=":", label="gradient of the head")
    axes.set(xlabel="positions in the batch", ylabel="extra peak memory [MB]", ylim=(0, None))
    axes.set_title(
        f"Distillation loss, V = {settings['vocab']}, D = {settings['hidden']}, "
        f"N = {settings['num_streams']}"
    )
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parse() -> argparse.Namespace:
    """The command line; the defaults are SmolLM2-135M's head."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=49152, help="V")
    parser.add_argument("--hidden", type=int, default=576, help="D")
    parser.add_argument("--num-streams", type=int, default=2, help="N")
    parser.add_argument("--positions", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="default: all installed")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--warmup", type=int, default=2, help="steps not counted")
    parser.add_argument("--steps", type=int, default=7, help="timed steps")
    parser.add_argument("--output", type=Path, default=Path("mixture_kl.json"))
    parser.add_argument("--figure", type=Path, help="PNG or PDF of memory against positions")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, print the table, write JSON and the figure."""
    options = parse()
    if options.worker:
        work(options.worker[0], int(options.worker[1]), options)
        return
    installed = [name for name in VARIANTS if importlib.util.find_spec(PACKAGES.get(name, "torch"))]
    variants = list(dict.fromkeys(["fused", "plain", *(options.variants or installed)]))
    packages = ["torch", *(PACKAGES[name] for name in variants if name in PACKAGES)]
    settings = {k: v for k, v in vars(options).items() if k not in ("output", "figure", "worker")}
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        "settings": settings | {"variants": variants},
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "load_average": {"before": os.getloadavg()},
        "rows": rows,
    }
    for num_positions in options.positions:
        rows += measure(variants, num_positions, options)
        report["load_average"]["after"] = os.getloadavg()
        options.output.write_text(json.dumps(report, indent=2) + "\n")  # kept if a later one fails
    show(rows, options)
    if options.figure:
        draw(report, options.figure)


if __name__ == "__main__":
    main()
