"""``suite=[A,B]``: one command, the model loaded once, one report with the papers' figures."""

import json
from pathlib import Path

import pytest
from conftest import run_script

from superpose.cli import several_suites
from superpose.models import loading
from superpose.reports.paper import paper_figures

SMALL = ["suites.superposition.limit=4", "suites.superposition.wasserstein_positions=1",
         "suites.additivity.limit=4"]  # fmt: skip


def test_a_list_becomes_a_node_each() -> None:
    given = ["-m", "suite=[superposition, additivity]", "seed=1"]
    assert several_suites(given) == [
        "-m", "~suite", "+suite@suites.superposition=superposition",
        "+suite@suites.additivity=additivity", "seed=1",
    ]  # fmt: skip
    assert several_suites(["suite=lambada", "suite.limit=3"]) == ["suite=lambada", "suite.limit=3"]


@pytest.mark.parametrize(
    "arguments",
    [["suite=[superposition,additivity]", "suite.limit=3"], ["suite=[a,a]"], ["suite=[]"]],
)
def test_ambiguous_keys_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"suites\.\w+\.KEY=VALUE"):
        several_suites(arguments)


def test_two_suites_in_one_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    real = loading.load
    monkeypatch.setattr(
        "superpose.pipelines.load", lambda **given: loaded.append(given) or real(**given)
    )
    run_script("evaluate.py", "suite=[superposition,additivity]", *SMALL, "hydra.run.dir=both",
               cwd=tmp_path).check()  # fmt: skip
    assert len(loaded) == 1
    found = json.loads((tmp_path / "both" / "results.json").read_text())
    assert found["suite"] == "superposition, additivity"
    assert "superposition.groups" in found["counts"]
    report = (tmp_path / "both" / "report.md").read_text()
    assert "0.31-0.42 (Pythia-160M to Llama-3.1-8B)" in report
    for suite in ("superposition", "additivity"):
        assert f"\n## {suite}\n" in report
        keys = [key.replace("suites.", "", 1) for key in SMALL if f".{suite}." in key]
        single = [key.replace(f"{suite}.", "suite.", 1) for key in keys]
        run_script("evaluate.py", f"suite={suite}", *single, f"hydra.run.dir={suite}",
                   cwd=tmp_path).check()  # fmt: skip
        alone = json.loads((tmp_path / suite / "results.json").read_text())
        assert {k: v for k, v in found["metrics"].items() if k.startswith(f"{suite}.")} == (
            alone["metrics"]
        )


def test_a_suite_that_fails_costs_only_itself(tmp_path: Path) -> None:
    done = run_script("evaluate.py", "suite=[additivity,attention_patching]",
                      "suites.additivity.limit=4", "suites.attention_patching.lambada.path=none.jsonl",
                      "hydra.run.dir=out", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 1
    assert "none.jsonl" in done.stdout
    assert json.loads((tmp_path / "out" / "results.json").read_text())["suite"] == "additivity"


def test_figures_of_the_paper_depend_on_the_number_of_streams() -> None:
    two, three = (paper_figures({"streams": {"num_streams": n}}) for n in ([2, 3], 3))
    assert two["superposition.kl_ratio"].startswith("0.31-0.42")
    assert three["superposition.kl_ratio"] == "0.36-0.47 (Pythia-160M to Llama-3.1-8B)"
    assert "attention_patching.donor.content.median_rank" in two
    assert "attention_patching.donor.content.median_rank" not in three
    assert "superposition.kl_ratio" not in paper_figures({"streams": {"num_streams": 8}})
