"""Training and evaluating Joint Contrastive and Two-Head models as a user does."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import run_script
from safetensors.torch import load_file

from superpose.models.loading import PACKAGED

QUICK = [
    "debug=one_step", "trainer.accelerator=cpu", "suites.superposition.limit=2",
    "suites.superposition.wasserstein_positions=1", "suites.lambada.limit=8",
    "suites.lambada.continuation_groups=2", "suites.lambada.continuation_tokens=3",
    "suites.perplexity.limit=2",
]  # fmt: skip
LAMBADA = ["suite=lambada", "suite.limit=8", "suite.continuation_groups=0"]
METHODS = {  # by run: its decoder, its overrides
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
    assert told["method"] == ("TwoHead" if name == "two_head" else "JointContrastive")
    assert told["num_streams"] == 2
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
    assert all(row[METHODS[name][0]] for row in rows)
    assert 0 <= found["metrics"]["generation.jaccard"] <= 1
    assert found["metrics"]["generation.nll_nats"] > 0


PROMPTS = ["Tom had a red ball.", "Anna saw the big dog in the garden."]


def test_generation_with_a_guide_that_nobody_trained(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    common = ["suite=generation", "suite.max_new_tokens=5"]
    run_script("evaluate.py", *common, "guide=tiny", "suite.path=prompts.txt", "hydra.run.dir=file",
               cwd=tmp_path).check()  # fmt: skip
    run_script("evaluate.py", *common, "guide=tiny", f"suite.prompts={json.dumps(PROMPTS)}",
               "hydra.run.dir=given", cwd=tmp_path).check()  # fmt: skip
    file, given = result_of(tmp_path / "file"), result_of(tmp_path / "given")
    assert file["metrics"] == given["metrics"]
    rows = file["tables"]["generation.continuations"]
    assert [row["prompt"] for row in rows] == PROMPTS
    assert rows[0]["guided"] != rows[1]["guided"]


def test_sampling_is_repeated_by_its_seed(tmp_path: Path) -> None:
    common = ["suite=generation", "guide=tiny", f"suite.prompts={json.dumps(PROMPTS)}",
              "suite.max_new_tokens=8", "suite.do_sample=true", "suite.top_p=0.95"]  # fmt: skip
    texts = []
    for seed in (1, 1, 2):
        run_script("evaluate.py", *common, f"suite.seed={seed}", "hydra.run.dir=out",
                   cwd=tmp_path).check()  # fmt: skip
        rows = result_of(tmp_path / "out")["tables"]["generation.continuations"]
        texts.append([row["guided"] for row in rows])
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["suite.prompts=[one]"], "needs at least 2 prompts, got 1"),
        (['suite.prompts=["one",""]'], "empty"),
        (["suite.path=none.txt"], "none.txt"),
        (["suite.max_new_tokens=4000"], "max_new_tokens"),
        (["suite.decoder=joint"], "suite.decoder=joint does not apply"),
        (["guide=truncated", "guide.path=FOLDER", "guide.num_blocks=2"], "method=pretrain"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, arguments: list[str], message: str) -> None:
    folder = str(PACKAGED["tiny"])
    arguments = [argument.replace("FOLDER", folder) for argument in arguments]
    prompts = [] if arguments[0].startswith(("suite.prompts", "suite.path")) else [
        f"suite.prompts={json.dumps(PROMPTS)}"
    ]  # fmt: skip
    done = run_script("evaluate.py", "suite=generation", *prompts, *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stdout


@pytest.mark.parametrize("name", METHODS)
def test_another_number_of_streams_is_refused(
    runs: dict[str, Path], tmp_path: Path, name: str
) -> None:
    done = run_script("evaluate.py", *LAMBADA, f"checkpoint={runs[name]}", "streams.num_streams=3",
                      cwd=tmp_path)  # fmt: skip
    assert done.returncode == 1
    assert "3" in done.stdout
    assert "num_streams" in done.stdout


def test_a_guide_whose_tokens_are_shuffled_is_refused(tmp_path: Path) -> None:
    shuffled = tmp_path / "guide"
    shutil.copytree(PACKAGED["tiny-guide"], shuffled)
    file = shuffled / "tokenizer.json"
    told = json.loads(file.read_text())
    vocab = told["model"]["vocab"]
    first, second = list(vocab)[100:102]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(told))
    done = run_script("train.py", "method=joint_contrastive", *QUICK, "guide=pretrained",
                      f"guide.path={shuffled}", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 1
    assert "token" in done.stdout


def test_a_truncated_guide_is_trained_once_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUPERPOSE_CACHE", str(tmp_path / "cache"))
    folder = str(PACKAGED["tiny"])
    few = ["suites.superposition=null", "suites.lambada=null"]
    run_script("train.py", "model=truncated", f"model.path={folder}", "model.num_blocks=2",
               "method=pretrain", "debug=one_step", "trainer.accelerator=cpu", *few,
               cwd=tmp_path).check()  # fmt: skip
    run_script("evaluate.py", *LAMBADA, "guide=truncated", "guide.num_blocks=2", f"guide.path={folder}",
               "hydra.run.dir=out", cwd=tmp_path).check()  # fmt: skip
    assert "lambada.guided.accuracy" in result_of(tmp_path / "out")["metrics"]
    done = run_script("evaluate.py", *LAMBADA, "guide=truncated", "guide.num_blocks=1",
                      f"guide.path={folder}", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 1
    assert "model.num_blocks=1" in done.stdout
