"""results.json, tables, figures and report.md: everything from the results alone."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from superpose.reports import plots, results, tables
from superpose.reports.glossary import MEANINGS, meaning_of
from superpose.reports.report import write_report

PNG = b"\x89PNG\r\n\x1a\n"


def suite_tables() -> dict:
    """Tables of the form of suite=superposition, two models."""
    models = {"base": 1.0, "checkpoint": 3.0}
    return {
        "superposition.summary": [
            {"model": name, "num_streams": 2, "kl_nats": 1.5 / scale, "kl_ratio": 0.45 / scale}
            for name, scale in models.items()
        ],
        "superposition.rank_cdf": [
            {"model": name, "k": k, "argmax": 1 - 1 / (1 + k * scale),
             "ground_truth": 1 - 1 / (1 + k), "control": None if k == 1 else k / 1000}
            for name, scale in models.items() for k in (1, 10, 100, 1000)
        ],
        "superposition.by_position": [
            {"model": name, "position": t, "total_variation": (1 - 0.8**t) / scale,
             "standard_error": None if t == 0 else 0.02, "kl_nats": 1.0}
            for name, scale in models.items() for t in range(32)
        ],
        "superposition.confidence": [
            {"model": name, "probability_from": b / 10, "probability_to": (b + 1) / 10,
             "count": 10 * (b + 1), "median_rank": 100.0 / (b + 1) / scale, "top_10": 0.5}
            for name, scale in models.items() for b in range(10)
        ],
        "superposition.control": [{"model": "base", "top_3": 0.01, "median": 900.0, "pairs": 12}],
        "superposition.degradation": [
            {"model": name, "num_streams": n, "kl_ratio": 0.2 * n / scale, "rank.top_10": 1 / n,
             "rank.content.top_10": None if n == 4 else 0.5 / n}
            for name, scale in models.items() for n in (2, 3, 4)
        ],
        "attention_patching.ranks": [
            {"setup": setup, "predictable.median_rank": rank / 10, "content.median_rank": rank}
            for setup, rank in (("mixing", 280.0), ("donor", 110.0), ("mixing_checkpoint", 5.0))
        ],
        "throughput.modes": [
            {"groups": s // 2, "streams": s, "mode": mode, "tokens_per_second": speed * s,
             "low": None if s == 2 else 0.9 * speed * s, "high": None if s == 2 else 1.2 * speed * s}
            for s in (2, 8) for mode, speed in (("raw", 20.0), ("batch", 15.0), ("sequential", 10.0))
        ],
        "throughput.ratios": [
            {"groups": s // 2, "streams": s, "mode": mode, "against": against, "ratio": ratio,
             "low": 0.9 * ratio, "high": 1.1 * ratio, "memory_limit": 2.0, "compute_limit": 1.8}
            for s in (2, 8) for mode, ratio in (("raw", 1.9), ("separate", 1.6))
            for against in ("sequential", "batch")
        ],
        "additivity.layers": [
            {"model": name, "layer": layer, "error": 0.1 * layer / scale}
            for name, scale in models.items() for layer in range(5)
        ],
        "additivity.trajectory": [
            {"revision": f"step{step}", "step": step, "mean": 0.1 + step / 100,
             "standard_error": 0.02}
            for step in (0, 1, 8)
        ],
        "layer_linearity.layers": [
            {"model": name, "layer": layer, "linearity": 1 - 0.1 * layer / scale,
             "linearity_increment": 0.5, "rank": 64, "condition_number": 1e4}
            for name, scale in models.items() for layer in range(4)
        ],
    }  # fmt: skip


def example(**changed) -> dict:
    fields = {
        "suite": "superposition",
        "metrics": {
            "base.superposition.kl_nats": 1.5,
            "base.superposition.rank.top_10": 0.4,
            "superposition.kl_nats": 0.5,
            "superposition.rank.top_10": 0.6,
            "superposition.kl_unrelated_nats": 3.4,
        },
        "tables": suite_tables(),
        "model": {"name": "tiny", "path": "export"},
        "data": {"name": "stories"},
        "config": {"suite": {"limit": None, "batch_size": 8}},
        "counts": {"groups": 128, "positions": 4096},
        "seed": 0,
        "elapsed_seconds": 12.25,
        "command": "python evaluate.py suite=superposition",
    }
    return results.build(**(fields | changed))


def test_results_round_trip(tmp_path):
    built = example()
    path = results.write(tmp_path, built)
    assert path == tmp_path / "results.json"
    assert results.read(path) == results.read(tmp_path) == built
    assert set(built) >= {
        "schema", "suite", "metrics", "tables", "model", "data", "config", "environment", "counts",
        "seed", "elapsed_seconds",
    }  # fmt: skip
    environment = built["environment"]
    assert environment["torch"] == torch.__version__
    assert environment["torch_threads"] == torch.get_num_threads()
    assert {"python", "transformers", "lightning", "superpose", "commit", "platform"} <= set(
        environment
    )


def test_numbers_of_other_libraries_become_plain():
    built = example(
        metrics={"a": np.float32(0.5), "b": torch.tensor(2)},
        config={"path": Path("data") / "x.txt", "sizes": (1, 2), "dtype": torch.float32},
    )
    assert built["metrics"] == {"a": 0.5, "b": 2}
    assert built["config"] == {"path": "data/x.txt", "sizes": [1, 2], "dtype": "torch.float32"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused_by_name(tmp_path, value):
    with pytest.raises(ValueError, match=r"^superposition\.kl_nats is .*expected a finite number"):
        example(metrics={"superposition.kl_nats": value})
    with pytest.raises(ValueError, match=r"^tables\.rows\[1\]\.x is"):
        example(tables={"rows": [{"x": 1.0}, {"x": value}]})
    built = example()
    built["metrics"]["superposition.js_nats"] = value
    with pytest.raises(ValueError, match=r"^superposition\.js_nats is"):
        results.write(tmp_path / "results.json", built)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = results.write(tmp_path, example(seed=1))

    def full_disk(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        results.write(tmp_path, example(seed=2))
    assert results.read(path)["seed"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "is no JSON"),
        ("[]", "has schema None, expected 1"),
        ('{"schema": 2}', "has schema 2, expected 1"),
    ],
)
def test_a_file_that_is_no_result(tmp_path, text, message):
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        results.read(tmp_path / "results.json")


def test_base_stands_beside_checkpoint_with_the_change():
    grid = tables.metrics_grid(example()["metrics"])
    assert grid.columns == ["metric", "base", "model", "change", "unit, better"]
    rows = {row[0]: row[1:] for row in grid.rows}
    assert rows["superposition.kl_nats"] == ["1.5000", "0.5000", "-1", "nats ↓"]
    assert rows["superposition.rank.top_10"][2] == "+0.2000"
    assert rows["superposition.kl_unrelated_nats"][0] == "-"
    assert tables.labels_of(example()) == ("base", "checkpoint")
    assert tables.labels_of(example(tables={})) == ("base", "model")
    single = tables.metrics_grid({"superposition.kl_nats": 0.5})
    assert single.columns == ["metric", "model", "unit, better"]


def test_names_of_models_and_data():
    assert tables.name_of({"names": ["tiny", "export"], "path": "run/export"}) == "tiny and export"
    assert tables.name_of({"name": "text", "path": "books/*.txt"}) == "text books/*.txt"
    assert tables.name_of("wikitext") == "wikitext"
    assert tables.name_of(None) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), ("x", "x"), (3, "3"), (4096.0, "4,096"), (4390.5, "4,390"), (231.25, "231.2"),
        (25.5, "25.50"), (0.45, "0.4500"), (0.00012, "1.20e-04"), (0.0, "0"), (True, "True"),
    ],
)  # fmt: skip
def test_cells(value, text):
    assert tables.format_cell(value) == text


def test_terminal_shows_every_metric():
    console = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        tables.print_results(console, [example()])
        text = console.export_text()
    for word in ("superposition tiny export on stories", "checkpoint", "kl_nats", "change"):
        assert word in text


def test_long_tables_are_thinned_and_keep_both_ends():
    rows = [{"position": t} for t in range(100)]
    grid = tables.rows_grid(rows, 12)
    assert len(grid.rows) == 12
    assert (grid.rows[0], grid.rows[-1]) == (["0"], ["99"])
    both = [{"model": name, "k": k} for name in ("base", "checkpoint") for k in range(40)]
    shown = tables.rows_grid(both, 20).rows
    assert [row[1] for row in shown[:10]] == [row[1] for row in shown[10:]]
    assert (shown[0], shown[-1]) == (["base", "0"], ["checkpoint", "39"])
    assert len(tables.rows_grid(both[:20], 20).rows) == 20


def test_figures_come_from_the_file_alone(tmp_path):
    path = results.write(tmp_path, example())
    written = plots.write_figures(tmp_path / "figures", json.loads(path.read_text()))
    assert set(written) == set(plots.FIGURES)
    for file in written.values():
        assert file.read_bytes().startswith(PNG)
    again = plots.write_figures(tmp_path / "again", json.loads(path.read_text()))
    for table, file in written.items():
        assert file.read_bytes() == again[table].read_bytes()


def test_rank_cdf_draws_the_numbers_of_its_table():
    rows = suite_tables()["superposition.rank_cdf"]
    axes = plots.rank_cdf(rows).axes[0]
    assert [line.get_label() for line in axes.lines] == [
        "base: argmax", "base: actual next token", "checkpoint: argmax",
        "checkpoint: actual next token", "control: another text's token",
    ]  # fmt: skip
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [row["argmax"] for row in rows[:4]])
    for figure in (kind.draw(suite_tables()[name]) for name, kind in plots.FIGURES.items()):
        assert figure.axes[0].get_xlabel()
        assert figure.axes[0].get_ylabel()


def test_training_curve_reads_metrics_csv(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text(
        "epoch,step,train/kl_nats,val/kl_nats,val/kl_ratio\n0,0,3.0,,\n0,10,2.0,,\n0,10,,2.5,0.4\n"
    )
    assert plots.read_series(file)["train/kl_nats"] == [(0.0, 3.0), (10.0, 2.0)]
    figure = plots.training_curve(file)
    assert figure is not None
    assert len(figure.axes) == 2
    file.write_text("epoch,step\n0,0\n")
    assert plots.training_curve(file) is None


def test_report_holds_command_tables_figures_and_meanings(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,train/kl_nats\n0,3.0\n1,2.0\n")
    built = example()
    path = write_report(tmp_path, [built, example(suite="perplexity", tables={}, metrics={})])
    text = path.read_text()
    assert path == tmp_path / "report.md"
    for table in built["tables"]:
        assert table in text
    for metric in built["metrics"]:
        assert metric.removeprefix("base.") in text
    for words in (built["command"], "tiny", "stories", "lower is better", "## perplexity", "4,096"):
        assert words in text
    images = [part.split(")")[0] for part in text.split("](")[1:]]
    assert len(images) == 1 + len(plots.FIGURES)
    for image in images:
        assert not image.startswith("/")
        assert (tmp_path / image).read_bytes().startswith(PNG)
    assert str(tmp_path) not in text


def test_meanings():
    assert meaning_of("base.superposition.kl_ratio").better == "lower"
    assert meaning_of("superposition.kl_ratio_standard_error").text.startswith("standard error")
    assert meaning_of("lambada.mixed.first_token_accuracy").better == "higher"
    assert meaning_of("val.kl_nats") == meaning_of("val/kl_nats")
    assert meaning_of("unheard.of").text == ""
    assert len(set(MEANINGS)) == len(MEANINGS)


def test_sweep_tables_with_means_over_seeds(tmp_path):
    from io import StringIO

    from rich.console import Console

    from superpose.reports import sweep

    for job, (overrides, value) in enumerate(
        [
            (["a=1", "seed=0"], 0.1),
            (["a=1", "seed=1"], 0.3),
            (["a=2", "seed=0"], 0.5),
            (["a=3"], None),
        ]
    ):
        folder = tmp_path / str(job)
        folder.mkdir()
        status = {"status": "ok" if value else "failed", "overrides": overrides}
        status |= {"metric": value} if value else {"error": "ValueError: no"}
        (folder / "status.json").write_text(json.dumps(status))
        if value:
            metrics = {"superposition.kl_ratio": value, "base.superposition.kl_ratio": 0.9}
            (folder / "results.json").write_text(json.dumps({"metrics": metrics}))
    rows = sweep.read_sweep(tmp_path)
    assert [row["job"] for row in rows] == ["0", "1", "2", "3"]
    (group,) = sweep.over_seeds(rows)  # a=2 has one seed, a=3 failed
    assert group["overrides"] == "a=1"
    mean, deviation = group["metrics"]["superposition.kl_ratio"]
    assert mean == pytest.approx(0.2)
    assert deviation == pytest.approx(0.02**0.5)
    out = StringIO()
    sweep.print_sweep(tmp_path, Console(file=out, width=150))
    text = out.getvalue()
    assert "0.2000 ± 0.1414" in text
    assert "(base model)" in text
    assert "ValueError: no" in text
    assert len(json.loads((tmp_path / "sweep.json").read_text())["jobs"]) == 4
