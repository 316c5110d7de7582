"""Revisions of one model: which are meant, one in memory at a time, and a run's trajectory."""

import gc
import json
import types
import weakref
from pathlib import Path

import pytest
import torch
from conftest import run_script as script
from word_models import word_model

from superpose.models import revisions
from superpose.models.loading import LanguageModel, load
from superpose.models.revisions import (
    OneAtATime,
    choose,
    hub_revisions,
    known_revisions,
    run_revisions,
    step_of,
)
from superpose.suites.trajectory import growth, trajectory_rows

CPU = torch.device("cpu")
FEW = ["suites.superposition.limit=2", "suites.lambada=null", "suites.perplexity.limit=2"]


def test_a_name_tells_its_step() -> None:
    names = ("step0", "step143000", "step_0000064", "stage1-step-1000-tokens3B", "main", "v1.0")
    assert [step_of(name) for name in names] == [0, 143000, 64, 1000, None, None]


def test_revisions_are_chosen_by_name_or_step() -> None:
    known = ["main", "step_0000010", "step_0000002", "step_0000000"]
    where = "model.path=x"
    assert choose("all", known, where) == ["step_0000000", "step_0000002", "step_0000010"]
    assert choose(["step10", "main", "step_0000000"], known, where) == [
        "step_0000010", "main", "step_0000000",
    ]  # fmt: skip
    assert choose("step2", known, where) == ["step_0000002"]
    assert choose(["anything"], None, where) == ["anything"]
    many = [f"step{number}" for number in range(100)]
    for asked, names, message in (
        (
            ["step7"],
            known,
            r"suite\.revisions: model\.path=x has no revision 'step7'; it has main,",
        ),
        (["step200"], many, r"step0, step1, .*, \.\.\., .*step99 \(100 in all\)"),
        ([], known, r"suite\.revisions=\[\] names no revision"),
        ("all", ["main"], "suite.revisions=all, but model.path=x names none by its training step"),
        ("all", None, "suite.revisions=all, but model.path=x cannot be reached"),
    ):
        with pytest.raises(ValueError, match=message):
            choose(asked, names, where)


def test_one_model_is_in_memory_at_a_time() -> None:
    loaded: list[str] = []
    alive: list[weakref.ref] = []

    def loader(name: str):
        def make() -> LanguageModel:
            gc.collect()
            assert not any(reference() for reference in alive)
            model = word_model()
            loaded.append(name)
            alive.append(weakref.ref(model.model))
            return model

        return make

    models = OneAtATime({name: loader(name) for name in "abc"}, CPU)
    assert (list(models), len(models), loaded) == (["a", "b", "c"], 3, [])
    assert [models[name].num_tokens for name in models] == [61, 61, 61]
    assert models["c"] is models["c"]
    assert loaded == ["a", "b", "c"]


def test_hub_revisions_that_exist_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    refs = types.SimpleNamespace(
        branches=[types.SimpleNamespace(name="main"), types.SimpleNamespace(name="step1000")],
        tags=[types.SimpleNamespace(name="v1")],
    )
    monkeypatch.setattr("huggingface_hub.list_repo_refs", lambda path: refs)
    assert known_revisions("a/b") == ["main", "step1000", "v1"]
    weights = {"path": "a/b", "revision": None, "dtype": "float32"}
    models = hub_revisions(weights, ["step1000", "v1"], CPU)
    assert list(models) == ["step1000", "v1"]
    with pytest.raises(ValueError, match="model.path=a/b has no revision 'step5'; it has main, "):
        hub_revisions(weights, ["step5"], CPU)
    asked: list[dict] = []
    monkeypatch.setattr(revisions, "load", lambda **arguments: asked.append(arguments))
    with pytest.raises(AttributeError):
        models["v1"]
    assert asked == [{"path": "a/b", "revision": "v1", "dtype": "float32"}]


def test_an_unreachable_hub_and_local_folders(tmp_path: Path) -> None:
    assert known_revisions("EleutherAI/pythia-70m") is None  # offline
    for path in ("tiny", str(tmp_path)):
        with pytest.raises(ValueError, match="is a local folder, which has no revisions"):
            hub_revisions({"path": path}, ["step0"], CPU)
    with pytest.raises(ValueError, match=r"has no trajectory/.*give a run of method=pretrain"):
        run_revisions(str(tmp_path), "all", CPU)


def test_growth_along_training() -> None:
    rows = trajectory_rows(
        {
            "main": {"mean": 0.0},
            **{f"step{s}": {"mean": m} for s, m in ((0, 0.2), (1, 0.1), (8, 0.4))},
        }
    )
    assert rows[1] == {"revision": "step0", "step": 0, "mean": 0.2}
    assert growth(rows, "mean") == {"lowest_step": 1.0, "rank_correlation": pytest.approx(0.5)}
    assert growth(rows[:2], "mean") == {}
    assert growth(rows[:3], "mean") == {"lowest_step": 1.0}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    """A short run of method=pretrain from fresh weights."""
    folder = tmp_path_factory.mktemp("pretrain")
    script("train.py", "method=pretrain", "model.random_init=true", "trainer.accelerator=cpu",
           "data.batch_size=2", "data.length=24", "data.validation_groups=2", "trainer.max_steps=6",
           "trainer.val_check_interval=3", *FEW, "hydra.run.dir=run", cwd=folder).check()  # fmt: skip
    return folder / "run"


def result_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def test_pretraining_keeps_a_log_spaced_trajectory(pretrained: Path) -> None:
    folders = sorted(path.name for path in (pretrained / "trajectory").iterdir())
    assert folders == [f"step_000000{step}" for step in (0, 1, 2, 4, 6)]
    weights = {name: load(str(pretrained / "trajectory" / name)).fingerprint() for name in folders}
    assert len(set(weights.values())) == 5


@pytest.fixture(scope="module")
def distilled(tmp_path_factory) -> Path:
    """One step of method=self_distillation."""
    folder = tmp_path_factory.mktemp("distil")
    script("train.py", "debug=one_step", "trainer.accelerator=cpu", *FEW,
           "suites.superposition.wasserstein_positions=0", "hydra.run.dir=run",
           cwd=folder).check()  # fmt: skip
    return folder / "run"


def test_only_pretraining_keeps_one(distilled: Path) -> None:
    assert (distilled / "export").is_dir()
    assert not (distilled / "trajectory").exists()


@pytest.mark.parametrize("suite", ["additivity", "layer_linearity"])
def test_a_suite_over_the_trajectory(pretrained: Path, tmp_path: Path, suite: str) -> None:
    common = [f"suite={suite}", "suite.limit=12", "streams.num_streams=2", "data.length=48"]
    script("evaluate.py", *common, f"checkpoint={pretrained}", "suite.revisions=all",
           "hydra.run.dir=out", cwd=tmp_path).check()  # fmt: skip
    found = result_of(tmp_path / "out")
    rows = found["tables"][f"{suite}.trajectory"]
    assert [row["step"] for row in rows] == [0, 1, 2, 4, 6]
    assert rows[-1]["mean"] == found["metrics"][f"{suite}.mean"]
    assert f"{suite}.trajectory.lowest_step" in found["metrics"]
    assert not any(name.startswith("base.") for name in found["metrics"])
    assert found["model"]["names"] == [row["revision"] for row in rows]
    layers = found["tables"][f"{suite}.layers"]
    assert {row["model"] for row in layers} == {row["revision"] for row in rows}
    drawn = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert f"{suite}_layers.png" in drawn
    assert ("additivity_trajectory.png" in drawn) == (suite == "additivity")
    # a revision is measured as if it were given alone
    alone = ["model=pretrained", f"model.path={pretrained / 'trajectory' / 'step_0000002'}"]
    script("evaluate.py", *common, *alone, "data.batch_size=2", "hydra.run.dir=alone",
           cwd=tmp_path).check()  # fmt: skip
    assert result_of(tmp_path / "alone")["metrics"][f"{suite}.mean"] == rows[2]["mean"]
    done = script("evaluate.py", *common, f"checkpoint={pretrained}",
                  "suite.revisions=[step0,step3]", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 1
    assert "has no revision 'step3'; it has step_0000000, step_0000001" in done.stdout


def test_base_and_checkpoint_side_by_side(distilled: Path, tmp_path: Path) -> None:
    for suite in ("additivity", "layer_linearity"):
        script("evaluate.py", f"suite={suite}", "suite.limit=12", f"checkpoint={distilled}",
               f"hydra.run.dir={suite}", cwd=tmp_path).check()  # fmt: skip
        found = result_of(tmp_path / suite)
        assert {f"{suite}.mean", f"base.{suite}.mean"} <= set(found["metrics"])
        rows = found["tables"][f"{suite}.layers"]
        assert {row["model"] for row in rows} == {"base", "checkpoint"}
        assert (tmp_path / suite / "figures" / f"{suite}_layers.png").is_file()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["suite.revisions=all"], "has no trajectory/"),
        (["streams.num_streams=1"], "streams.num_streams=1, but suite=additivity"),
        (["data=text", "data.path=short.txt", "data.length=8"], "of a group (streams.num_streams"),
    ],
)
def test_mistakes_are_one_sentence(
    distilled: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    (tmp_path / "short.txt").write_text("Tom had a red ball.")
    arguments = ["suite=additivity", f"checkpoint={distilled}", *overrides]
    done = script("evaluate.py", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stdout
