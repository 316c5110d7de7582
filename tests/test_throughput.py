"""Throughput: one loop for all modes, paired ratios under a scripted clock, limits by hand."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from test_decoding import huggingface
from word_models import MAX_LENGTH, NUM_WORDS, word_model

from superpose.config import ThroughputSettings
from superpose.data.groups import Group
from superpose.decoding import JointContrastive, Raw, TwoHead
from superpose.models.layout import blocks, output_head
from superpose.reports import throughput_plots
from superpose.suites import throughput as suite
from superpose.suites.peak_memory import peak_memory_bytes
from superpose.suites.throughput import MODES, decode, passes_of, prompts_of, rotated, throughput
from superpose.suites.throughput_result import ModeRuns, StepWork, ThroughputResult, interval

SHORT: dict[str, Any] = {"prompt_length": 6, "generation_length": 4, "repeats": 2, "warmup": 0}


def texts(num_streams: int = 2, count: int = 3, length: int = 10) -> list[Group]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(NUM_WORDS, (count, num_streams, length), generator=generator)
    return [Group(row, torch.ones_like(row)) for row in ids]


def guided_pair() -> tuple[Any, JointContrastive]:
    model = word_model()
    guide = word_model(seed=1).first_blocks(1)
    return model, JointContrastive(model, guide)


def ticking() -> Callable[[], float]:
    """A clock on which every interval lasts a second."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


def run(num_streams: int = 2, **settings: Any) -> ThroughputResult:
    model, guided = guided_pair()
    chosen = ThroughputSettings(**(SHORT | settings))
    return throughput(model, texts(num_streams), [Raw(), guided], chosen, clock=ticking())


def test_every_mode_decodes_the_same_prompts_to_the_same_length() -> None:
    model, guided = guided_pair()
    prompts = prompts_of(texts(), ThroughputSettings(**SHORT, groups=[3]))
    two_head = TwoHead(output_head(model.model), 2)
    made = {
        name: decode(passes, 4, ticking()).token_ids
        for name, passes in passes_of(model, prompts, two_head, guided).items()
    }
    assert set(made) == set(MODES)
    for name, parts in made.items():
        streams = [ids for part in parts for group in part for ids in group]
        assert [len(ids) for ids in streams] == [4] * 6, name
    expected = [huggingface(model, ids, 4) for group in prompts for ids in group]
    assert [group[0] for group in made["batch"][0]] == expected
    by_stream = [group[0] for part in made["sequential"] for group in part]
    assert by_stream == expected[0::2] + expected[1::2]
    assert all(a == b for a, b in made["raw"][0])  # shared argmax
    small = [huggingface(guided.guide, ids, 4) for group in prompts for ids in group]
    assert [group[0] for group in made["guide_batch"][0]] == small


def test_one_stream_raw_is_an_ordinary_batch() -> None:
    model = word_model()
    prompts = prompts_of(texts(1), ThroughputSettings(**SHORT, groups=[3]))
    passes = passes_of(model, prompts, None, None)
    tokens = {name: decode(passes[name], 4, ticking()).token_ids for name in passes}
    assert tokens["raw"] == tokens["batch"] == tokens["sequential"]


@pytest.mark.parametrize("num_streams", [1, 2, 3])
def test_cache_of_a_stream_is_one_nth(num_streams: int) -> None:
    runs = {row.mode: row for row in run(num_streams, groups=[2]).runs}
    single = runs["sequential"].cache_bytes_per_stream
    assert single == 2 * 2 * (6 + 3) * 16 * 4  # keys and values, blocks, positions, floats
    assert runs["batch"].cache_bytes_per_stream == single
    assert runs["raw"].cache_bytes_per_stream * num_streams == single
    assert runs["separate"].cache_bytes_per_stream * num_streams == single
    own = runs["guide_batch"].cache_bytes_per_stream
    assert runs["guided"].cache_bytes_per_stream * num_streams == single + num_streams * own


def test_speeds_and_ratios_under_a_clock_that_ticks() -> None:
    result = run(groups=[1, 3])
    metrics = result.metrics()
    for groups in (1, 3):
        name = f"throughput.groups_{groups}."
        assert metrics[name + "raw.tokens_per_second"] == 2 * groups * 4 / 2.0
        assert metrics[name + "sequential.tokens_per_second"] == 2 * groups * 4 / 4.0
        assert metrics[name + "raw.prefill_seconds"] == 1.0
        assert metrics[name + "raw.decode_ms_per_step"] == pytest.approx(1000 / 3)
        assert metrics[name + "sequential.decode_ms_per_step"] == pytest.approx(2000 / 3)
        assert metrics[name + "guided.speedup_sequential"] == 2.0
        assert metrics[name + "separate.speedup_batch"] == 1.0
        assert metrics[name + "batch.speedup_sequential"] == 2.0
    rows = result.tables()["throughput.ratios"]
    assert len(rows) == 2 * (5 + 4)
    assert all(row["low"] == row["ratio"] == row["high"] for row in rows)
    assert [row["streams"] for row in result.tables()["throughput.modes"]] == [2] * 6 + [6] * 6
    assert result.counts()["repeats"] == 2


def test_ratios_are_paired_by_repeat() -> None:
    def runs(mode: str, *seconds: float) -> ModeRuns:
        half = tuple(second / 2 for second in seconds)
        return ModeRuns(mode, 2, 10, 4, half, half, None, 1, 1.0)

    slow_minute = [1.0, 3.0, 1.1]  # both modes suffer, their ratio does not
    works = {"raw": StepWork(1, 1), "sequential": StepWork(2, 2)}
    result = ThroughputResult(
        [runs("raw", *slow_minute), runs("sequential", *(2 * s for s in slow_minute))],
        works,
        {"num_streams": 2},
    )
    (row,) = result.tables()["throughput.ratios"]
    assert (row["mode"], row["against"], row["groups"]) == ("raw", "sequential", 1)
    for column in ("ratio", "low", "high", "memory_limit", "compute_limit"):
        assert row[column] == pytest.approx(2.0)
    raw = result.tables()["throughput.modes"][0]
    expected = [10 / second for second in slow_minute]
    low, high = stats.t.interval(0.95, 2, np.mean(expected), stats.sem(expected))
    assert raw["tokens_per_second"] == pytest.approx(np.mean(expected))
    assert (raw["low"], raw["high"]) == (pytest.approx(low), pytest.approx(high))
    assert (interval([3.0]).low, interval([3.0]).high) == (None, None)


def test_each_repeat_runs_every_mode_once_and_begins_one_further_on(monkeypatch: Any) -> None:
    assert [rotated("abc", r) for r in range(-1, 3)] == [
        list("cab"), list("abc"), list("bca"), list("cab"),
    ]  # fmt: skip
    seen: list[tuple[str, int]] = []
    real = suite.decode

    def watched(passes: Any, *rest: Any) -> Any:
        seen.append((passes[0].decoder.name, len(passes)))
        return real(passes, *rest)

    monkeypatch.setattr(suite, "decode", watched)
    run(modes=["raw", "sequential", "separate"], warmup=1)
    raw, separate, sequential = ("raw", 1), ("two_head", 1), ("raw", 2)
    assert seen == [
        sequential, raw, separate,  # warm-up
        raw, separate, sequential,
        separate, sequential, raw,
        raw, separate, sequential,  # memory
    ]  # fmt: skip


def test_limits_are_those_of_weights_read_and_multiplied() -> None:
    model = word_model()
    result = run(3)
    body = sum(p.numel() for p in blocks(model.model).parameters())
    small = body / 2
    head = output_head(model.model).weight.numel()
    n, p, q = 3, body + head, small + head
    separate = body + n * (head + 32**2)
    expected = {
        ("raw", "sequential"): (n, n),
        ("raw", "batch"): (1, n),
        ("separate", "sequential"): (n * p / separate, n * p / separate),
        ("separate", "batch"): (p / separate, n * p / separate),
        ("guided", "sequential"): (n * p / (p + q), n * p / (p + n * q)),
        ("guided", "batch"): (p / (p + q), n * p / (p + n * q)),
        ("batch", "sequential"): (n, 1),
        ("guide_batch", "sequential"): (n * p / q, p / q),
        ("guide_batch", "batch"): (p / q, p / q),
    }
    rows = result.tables()["throughput.ratios"]
    found = {
        (row["mode"], row["against"]): (row["memory_limit"], row["compute_limit"]) for row in rows
    }
    assert set(found) == set(expected)
    for key, limits in expected.items():
        assert found[key] == pytest.approx(limits), key


def test_weights_and_heads_follow_the_models_dtype() -> None:
    model = word_model()
    model.model.to(torch.bfloat16)
    result = throughput(model, texts(), [Raw()], ThroughputSettings(**SHORT), clock=ticking())
    runs = {row.mode: row for row in result.runs}
    assert runs["raw"].weight_bytes == 2 * model.num_parameters
    extra = 2 * (output_head(model.model).weight.numel() + 32**2)
    assert runs["separate"].weight_bytes == 2 * model.num_parameters + 2 * extra


def test_a_trained_head_and_a_trained_guide_are_measured(monkeypatch: Any) -> None:
    model, guided = guided_pair()
    joint = JointContrastive(model, guided.guide, 2.0, 1.0, num_streams=2, name="joint")
    trained = TwoHead(output_head(model.model), 2)
    used = []
    monkeypatch.setattr(suite, "passes_of", lambda *args: used.append(args) or passes_of(*args))
    throughput(model, texts(), [Raw(), guided, joint, trained], ThroughputSettings(**SHORT))
    assert used[0][2] is trained
    assert used[0][3] is joint


def test_one_new_token_has_no_decoding_step() -> None:
    result = run(generation_length=1, repeats=1)
    assert "throughput.groups_1.raw.decode_ms_per_step" not in result.metrics()
    row = result.tables()["throughput.modes"][0]
    assert (row["low"], row["decode_ms_per_step"]) == (None, None)
    for table, draw in (
        ("throughput.modes", throughput_plots.tokens_per_second),
        ("throughput.ratios", throughput_plots.speedups),
    ):
        assert draw(result.tables()[table]).axes[0].get_ylabel()


def test_peak_memory_counts_what_was_held_at_once() -> None:
    size = 64 * 2**20

    def work() -> None:
        for _ in range(3):
            torch.ones(size, dtype=torch.uint8)

    peak = peak_memory_bytes(work, torch.device("cpu"))
    assert peak is None or 0.9 * size <= peak <= 1.5 * size


def test_peak_memory_is_unknown_elsewhere(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr("superpose.suites.peak_memory.PROCESS", tmp_path / "none")
    done: list[int] = []
    assert peak_memory_bytes(lambda: done.append(1), torch.device("cpu")) is None
    assert done == [1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": [0]}, r"suite\.groups must be different numbers of at least 1.*got \[0\]"),
        ({"groups": []}, r"suite\.groups must be different numbers"),
        ({"groups": [2, 2]}, r"suite\.groups must be different numbers"),
        ({"groups": [9]}, r"suite\.groups=\[9\] needs 9 groups of texts, but the data gives 3"),
        ({"prompt_length": 0}, r"suite\.prompt_length must be at least 1, got 0"),
        ({"generation_length": 0}, r"suite\.generation_length must be at least 1, got 0"),
        ({"repeats": 0}, r"suite\.repeats must be at least 1, got 0"),
        ({"warmup": -1}, r"suite\.warmup must be at least 0, got -1"),
        ({"prompt_length": 11}, r"as few as 10 tokens; set data\.length=11 data\.packing=concat"),
        ({"generation_length": 44}, rf"than the {MAX_LENGTH} positions of tiny-llama; .* be 49"),
        ({"modes": ["fast"]}, r"suite\.modes has 'fast', expected some of raw, separate"),
        ({"modes": []}, r"suite\.modes is empty"),
    ],
)
def test_bad_settings_are_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**settings)


def test_modes_that_do_not_apply_are_refused() -> None:
    model = word_model()
    chosen = ThroughputSettings(**SHORT, modes=["guided"])
    with pytest.raises(ValueError, match=r"'guided', which needs a guide; add guide=NAME"):
        throughput(model, texts(), [Raw()], chosen)
    trained = TwoHead(output_head(model.model), 3)
    with pytest.raises(ValueError, match="trained for 3 streams"):
        throughput(model, texts(), [Raw(), trained], ThroughputSettings(**SHORT))


def test_the_longest_possible_run_fits() -> None:
    result = run(prompt_length=6, generation_length=MAX_LENGTH - 6 + 1, repeats=1, modes=["raw"])
    assert result.runs[0].new_tokens == 2 * 43
    assert result.tables()["throughput.ratios"] == []


def test_command_writes_a_report_with_figures(script: Any, tmp_path: Path) -> None:
    script(
        "evaluate.py", "suite=throughput", "suite.prompt_length=8", "suite.generation_length=4",
        "suite.repeats=2", "suite.groups=[1,2]", "data.length=8", "data.packing=concat",
        "guide=tiny", "hydra.run.dir=out", cwd=tmp_path,
    ).check()  # fmt: skip
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {row["mode"] for row in result["tables"]["throughput.modes"]} == set(MODES)
    metrics = result["metrics"]
    for name in ("tokens_per_second", "speedup_sequential", "speedup_batch"):
        assert metrics[f"throughput.groups_2.guided.{name}"] > 0
    single = metrics["throughput.groups_1.batch.cache_bytes_per_stream"]
    assert 2 * metrics["throughput.groups_1.raw.cache_bytes_per_stream"] == single
    report = (tmp_path / "out" / "report.md").read_text()
    assert "throughput_modes.png" in report
    assert "throughput_ratios.png" in report
    short = script(
        "evaluate.py", "suite=throughput", "suite.prompt_length=64", "data.length=32", cwd=tmp_path
    )
    assert short.returncode == 1
    assert (
        "suite.prompt_length=64, but the data's texts have as few as" in short.stdout + short.stderr
    )
