"""Training and evaluating Joint Contrastive and Two-Head models as a user does."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import run_script
from safetensors.torch import load_file, save_file

from superpose.models.loading import PACKAGED

QUICK = [
    "debug=one_step", "trainer.accelerator=cpu", "suites.superposition.limit=2",
    "suites.superposition.wasserstein_positions=1", "suites.lambada.limit=8",
    "suites.lambada.continuation_groups=2", "suites.lambada.continuation_tokens=3",
    "suites.perplexity.limit=2",
]  # fmt: skip
LAMBADA = ["suite=lambada", "suite.limit=8", "suite.continuation_groups=0"]
METHODS = {
    "joint_contrastive": ("joint", []),
    "posthoc": ("joint", ["method.freeze_backbone=true"]),
    "two_head": ("two_head", []),
}


def train(folder: Path, name: str, *more: str) -> Path:
    """The folder of a short run."""
    method = "joint_contrastive" if name == "posthoc" else name
    run_script("train.py", f"method={method}", *METHODS[name][1], *QUICK, "trainer.max_steps=3",
               *more, f"hydra.run.dir={name}", cwd=folder).check()  # fmt: skip
    return folder / name


def result_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A short run of each method."""
    folder = tmp_path_factory.mktemp("runs")
    return {name: train(folder, name) for name in METHODS}


@pytest.mark.parametrize("name", METHODS)
def test_a_run_reports_its_decoder(runs: dict[str, Path], name: str) -> None:
    decoder = METHODS[name][0]
    found = result_of(runs[name])
    assert "val.nll_nats" in found["metrics"]
    assert f"lambada.{decoder}.accuracy" in found["metrics"]
    assert f"lambada.{decoder}.stream_2.first_token_accuracy" in found["metrics"]
    assert ("lambada.guided.accuracy" in found["metrics"]) == (decoder == "joint")
    told = json.loads((runs[name] / "export" / "superpose.json").read_text())
    assert (told["method"], told["num_streams"]) == (METHODS[name][0].replace("joint", "joint_contrastive"), 2)  # fmt: skip
    header = (runs[name] / "metrics.csv").read_text().splitlines()[0]
    if decoder == "joint":
        assert {"fingerprint", "path"} <= set(told["guide"])
        assert told["alpha"] != 1.0
        assert told["beta"] != 1.0
        assert "train/alpha" in header
        assert "train/beta" in header


def test_the_guide_is_in_no_checkpoint(runs: dict[str, Path]) -> None:
    state = torch.load(runs["joint_contrastive"] / "checkpoints" / "last.ckpt", weights_only=True)
    weights = state["state_dict"]
    assert not [name for name in weights if "guide" in name]
    backbone = load_file(PACKAGED["tiny"] / "model.safetensors")
    stored = sum(value.numel() for value in weights.values())
    assert stored <= sum(value.numel() for value in backbone.values()) * 1.3


def test_a_frozen_backbone_stays_as_it_was(runs: dict[str, Path]) -> None:
    before = load_file(PACKAGED["tiny"] / "model.safetensors")
    after = load_file(runs["posthoc"] / "export" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    trained = load_file(runs["joint_contrastive"] / "export" / "model.safetensors")
    assert not all(torch.equal(before[name], trained[name]) for name in before)


@pytest.mark.parametrize("name", METHODS)
def test_every_form_of_a_checkpoint_decodes_alike(
    runs: dict[str, Path], tmp_path: Path, name: str
) -> None:
    key = f"lambada.{METHODS[name][0]}.accuracy"
    found = {}
    for place in ("", "export", "checkpoints/last.ckpt"):
        out = tmp_path / (place.replace("/", "_") or "run")
        run_script("evaluate.py", *LAMBADA, f"checkpoint={runs[name] / place}",
                   f"hydra.run.dir={out}", cwd=tmp_path).check()  # fmt: skip
        found[place] = result_of(out)["metrics"]
    assert found[""] == found["export"]
    assert key in found["checkpoints/last.ckpt"]
    assert found[""][key] == result_of(runs[name])["metrics"][key]


@pytest.mark.parametrize("name", ["joint_contrastive", "two_head"])
def test_generation_of_a_checkpoint(runs: dict[str, Path], tmp_path: Path, name: str) -> None:
    prompts = 'suite.prompts=["Tom had a red ball.","Anna saw the big dog in the garden."]'
    run_script("evaluate.py", "suite=generation", prompts, "suite.max_new_tokens=6",
               f"checkpoint={runs[name]}", "hydra.run.dir=out", cwd=tmp_path).check()  # fmt: skip
    found = result_of(tmp_path / "out")
    rows = found["tables"]["generation.continuations"]
    assert [row["stream"] for row in rows] == [1, 2]
    assert all(row["continuation"] for row in rows)
    assert 0 <= found["metrics"]["generation.jaccard"] <= 1
    assert found["metrics"]["generation.nll_nats"] > 0


@pytest.mark.parametrize("name", ["joint_contrastive", "two_head"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_resuming_is_the_straight_run_to_the_bit(
    tmp_path: Path, name: str, accumulate: int
) -> None:
    common = [f"trainer.accumulate_grad_batches={accumulate}", "trainer.val_check_interval=2"]
    straight = train(tmp_path, name, *common, "trainer.max_steps=4")
    shutil.move(straight, tmp_path / "straight")
    # the schedule is the whole run's, which stops in the middle
    half = train(tmp_path, name, *common, "trainer.max_steps=4", "+trainer.limit_train_batches=1.0",
                 "callbacks.stop={_target_: superpose_test_callbacks.StopAt, step: 2}") \
        if False else train(tmp_path, name, *common, "trainer.max_steps=2",
                            "method/scheduler=constant")  # fmt: skip
    shutil.move(half, tmp_path / "half")
    del straight, half
