"""train.py and evaluate.py as a user runs them: results, folders, mistakes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Done
from conftest import run_script as run
from families import tiny_model
from word_models import word_tokenizer

FEW = ["suites.superposition.limit=2", "suites.lambada.limit=4", "suites.perplexity.limit=2"]
QUICK = [
    "debug=one_step", "suites.superposition.wasserstein_positions=1", "trainer.accelerator=cpu",
]  # fmt: skip


def ok(script: str, *arguments: str, cwd: Path, **environment: str) -> Done:
    """A run that has to succeed."""
    return run(script, *arguments, cwd=cwd, **environment).check()


def process(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """A real process, for what happens at its end or in several of them."""
    settings = {"OMP_NUM_THREADS": "1", "COLUMNS": "140"}
    return subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        cwd=cwd, capture_output=True, text=True, env={**os.environ, **settings}, check=False,
    )  # fmt: skip


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The folder of one short run of the embedded default."""
    folder = tmp_path_factory.mktemp("train")
    ok("train.py", *QUICK, "trainer.max_steps=4", "trainer.val_check_interval=2",
       "trainer.log_every_n_steps=1", "hydra.run.dir=run", cwd=folder)  # fmt: skip
    return folder / "run"


def test_a_run_leaves_what_the_design_promises(trained):
    for name in (
        ".hydra/config.yaml", "checkpoints/last.ckpt", "export/config.json", "export/model.safetensors",
        "export/superpose.json", "metrics.csv", "results.json", "report.md", "status.json", "train.log",
    ):  # fmt: skip
        assert (trained / name).is_file(), name
    assert list((trained / "figures").glob("*.png"))
    results = json.loads((trained / "results.json").read_text())
    assert results["schema"] == 1
    assert results["suite"] == "train"
    for name in (
        "superposition.kl_ratio", "base.superposition.kl_ratio", "superposition.rank.top_10",
        "lambada.single.accuracy", "lambada.mixed.first_token_accuracy", "perplexity.nll_nats",
        "base.perplexity.nll_nats", "val.kl_nats",
    ):  # fmt: skip
        assert isinstance(results["metrics"][name], float), name
    provenance = json.loads((trained / "export" / "superpose.json").read_text())
    assert provenance["num_streams"] == 2
    assert provenance["teacher"] == "tiny"
    assert {"alpha", "beta", "guide"} <= set(provenance)
    assert json.loads((trained / "status.json").read_text())["status"] == "ok"


@pytest.mark.parametrize("place", ["", "export", "checkpoints/last.ckpt"])
def test_a_checkpoint_needs_no_other_argument(trained, tmp_path, place):
    suite = ["suite=perplexity", "suite.limit=3", "hydra.run.dir=out"]
    done = ok("evaluate.py", *suite, f"checkpoint={trained / place}", cwd=tmp_path)
    assert "perplexity.nll_nats" in done.stdout
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {"perplexity.nll_nats", "base.perplexity.nll_nats"} <= set(results["metrics"])
    assert results["data"]["name"] == "stories"


def test_evaluating_the_checkpoint_gives_what_training_reported(trained, tmp_path):
    reported = json.loads((trained / "results.json").read_text())["metrics"]
    ok("evaluate.py", "suite=perplexity", "suite.limit=2", f"checkpoint={trained}",
       "hydra.run.dir=out", cwd=tmp_path)  # fmt: skip
    measured = json.loads((tmp_path / "out" / "results.json").read_text())["metrics"]
    assert measured["perplexity.nll_nats"] == pytest.approx(
        reported["perplexity.nll_nats"], rel=1e-6
    )


@pytest.mark.parametrize("suite", ["superposition", "lambada", "perplexity", "attention_patching"])
@pytest.mark.parametrize("num_streams", [1, 3])
def test_every_suite_on_the_base_model(tmp_path, suite, num_streams):
    ok("evaluate.py", f"suite={suite}", "suite.limit=6", f"streams.num_streams={num_streams}",
       "hydra.run.dir=out", cwd=tmp_path)  # fmt: skip
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["suite"] == suite
    assert results["metrics"]
    assert (tmp_path / "out" / "report.md").is_file()


def test_several_numbers_of_streams_in_one_run(trained, tmp_path):
    ok("evaluate.py", "suite.limit=2", "suite.wasserstein_positions=1", f"checkpoint={trained}",
       "streams.num_streams=[3,2]", "hydra.run.dir=out", cwd=tmp_path)  # fmt: skip
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    rows = results["tables"]["superposition.degradation"]
    measured = [(row["model"], row["num_streams"]) for row in rows]
    assert measured == [("base", 3), ("base", 2), ("checkpoint", 3), ("checkpoint", 2)]
    # the plain metrics are those of the first
    assert results["metrics"]["superposition.kl_ratio"] == rows[2]["kl_ratio"]
    for row in rows[2:]:
        ok("evaluate.py", "suite.limit=2", "suite.wasserstein_positions=1", f"checkpoint={trained}",
           f"streams.num_streams={row['num_streams']}", "hydra.run.dir=one", cwd=tmp_path)  # fmt: skip
        alone = json.loads((tmp_path / "one" / "results.json").read_text())
        assert alone["metrics"]["superposition.kl_ratio"] == row["kl_ratio"]
        assert "superposition.degradation" not in alone["tables"]
    assert (tmp_path / "out" / "figures" / "superposition_degradation.png").is_file()


def test_attention_patching_of_a_checkpoint(trained, tmp_path):
    ok("evaluate.py", "suite=attention_patching", "suite.limit=2", "suite.lambada.examples=4",
       f"checkpoint={trained}", "hydra.run.dir=out", cwd=tmp_path)  # fmt: skip
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    tables = results["tables"]
    assert [row["setup"] for row in tables["attention_patching.ranks"]] == [
        "mixing", "donor", "permutation", "mixing_checkpoint",
    ]  # fmt: skip
    assert len(tables["attention_patching.lambada"]) == 4
    assert results["counts"]["lambada_examples"] == 4
    assert (tmp_path / "out" / "figures" / "attention_patching_ranks.png").is_file()


def test_attention_patching_without_cloze_examples(place):
    (place / "long.txt").write_text(" w1 w2 w3 w4" * 20, encoding="utf-8")
    done = ok("evaluate.py", *MODEL, "suite=attention_patching", "data=text", "data.path=long.txt",
              "data.length=8", "suite.lambada.length=32", "hydra.run.dir=out", cwd=place)  # fmt: skip
    assert "the LAMBADA part is left out, for the data has no cloze set" in done.stdout
    results = json.loads((place / "out" / "results.json").read_text())
    assert results["counts"]["lambada_examples"] == 0
    assert "attention_patching.lambada" not in results["tables"]


def test_own_keys_lie_over_those_of_the_run(trained, tmp_path):
    ok("evaluate.py", "suite=superposition", "suite.limit=2", f"checkpoint={trained}",
       "data.length=32", "streams.num_streams=3", "hydra.run.dir=out", cwd=tmp_path)  # fmt: skip
    config = json.loads((tmp_path / "out" / "results.json").read_text())["config"]
    assert (config["data"]["length"], config["data"]["batch_size"]) == (32, 2)
    assert config["streams"]["num_streams"] == 3


def test_a_run_can_be_resumed(trained, tmp_path):
    # everything but the new end comes from the run
    ok("train.py", f"checkpoint={trained}", "resume=true", "trainer.max_steps=6", *FEW,
       "hydra.run.dir=on", cwd=tmp_path)  # fmt: skip
    state = torch.load(tmp_path / "on" / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["global_step"] == 6
    assert state["superpose"]["config"]["data"]["batch_size"] == 2
    done = run("train.py", f"checkpoint={trained}", "resume=true", *FEW, cwd=tmp_path)
    assert done.returncode == 1
    assert "no validation took place up to step 4" in done.stdout


def test_a_run_can_start_from_a_checkpoint(trained, tmp_path):
    ok("train.py", *QUICK, f"checkpoint={trained}", "hydra.run.dir=on", cwd=tmp_path)
    state = torch.load(tmp_path / "on" / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["global_step"] == 1


def test_the_same_command_gives_the_same_numbers(trained, tmp_path):
    ok("train.py", *QUICK, "trainer.max_steps=4", "trainer.val_check_interval=2",
       "trainer.log_every_n_steps=1", "hydra.run.dir=run", cwd=tmp_path)  # fmt: skip
    first, again = (
        json.loads((folder / "results.json").read_text())["metrics"]
        for folder in (trained, tmp_path / "run")
    )
    assert first == again


def test_pretraining_from_scratch(tmp_path):
    ok("train.py", "experiment=tiny", *QUICK, "hydra.run.dir=run", cwd=tmp_path)
    metrics = json.loads((tmp_path / "run" / "results.json").read_text())["metrics"]
    assert metrics["val.nll_nats"] == pytest.approx(
        7.36, abs=0.4
    )  # log of the vocabulary: untrained
    assert not any(name.startswith("base.") for name in metrics)
    ok("evaluate.py", "suite=perplexity", "suite.limit=2", "checkpoint=run", cwd=tmp_path)


@pytest.mark.parametrize("num_streams", [1, 2, 3, 4, 8])
def test_any_number_of_streams_trains(tmp_path, num_streams):
    ok("train.py", *QUICK, f"streams.num_streams={num_streams}", "suites.lambada=null",
       "suites.superposition=null", "hydra.run.dir=run", cwd=tmp_path)  # fmt: skip


@pytest.mark.parametrize("experiment", ["paper_pythia_2.8b", "paper_llama_3.2_3b", "paper_qwen2.5_3b",
                                        "smollm2_novels", "paper_recipe"])  # fmt: skip
def test_every_experiment_runs_one_step_on_the_embedded_default(tmp_path, experiment):
    override = ["model.path=tiny", "data.path=x"] if experiment == "smollm2_novels" else []
    (tmp_path / "x.txt").write_text(
        ("Once upon a time there was a king. " * 30 + "\n") * 40, encoding="utf-8"
    )
    if experiment == "smollm2_novels":
        override = ["model.path=tiny", "data.path=x.txt"]
    else:
        override = ["model=tiny", "data=stories"]
    ok("train.py", f"experiment={experiment}", *override, "trainer=cpu", "trainer.devices=1",
       "trainer.strategy=auto", "trainer.precision=32-true", "trainer.max_steps=1",
       "trainer.val_check_interval=1", "trainer.accumulate_grad_batches=1", "data.batch_size=2",
       "data.validation_groups=2", "data.length=32", "suites.superposition=null", "suites.lambada=null",
       "suites.perplexity.limit=2", "hydra.run.dir=run", cwd=tmp_path)  # fmt: skip


def test_a_sweep_ends_with_a_table_of_all_jobs_failed_ones_included(tmp_path):
    done = process(
        "train.py", "-m", *QUICK, "streams.num_streams=2,0", "hydra.sweep.dir=sweep", cwd=tmp_path
    )
    assert done.returncode == 1
    table = done.stdout[done.stdout.index("2 jobs in sweep") :]
    assert re.search(r"0 +│ streams.num_streams=2 +│ ok", table)
    assert re.search(r"1 +│ streams.num_streams=0 +│ failed", table)
    assert json.loads((tmp_path / "sweep" / "0" / "status.json").read_text())["status"] == "ok"
    failed = json.loads((tmp_path / "sweep" / "1" / "status.json").read_text())
    assert failed["status"] == "failed"
    assert "streams.num_streams must be at least 1, got 0" in failed["error"]
    assert "streams.num_streams" in (tmp_path / "sweep" / "1" / "train.log").read_text()
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_jobs_of_a_sweep_do_not_touch_each_other(tmp_path):
    shared = [*QUICK, "suites.superposition=null", "suites.lambada=null"]
    ok("train.py", "-m", *shared, "seed=0,1", "hydra.sweep.dir=sweep", cwd=tmp_path)
    ok("train.py", *shared, "seed=1", "hydra.run.dir=alone", cwd=tmp_path)
    in_sweep, alone = (
        torch.load(tmp_path / p / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for p in ("sweep/1", "alone")
    )
    assert all(torch.equal(in_sweep[key], alone[key]) for key in alone)


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    shared = ["suites.superposition=null", "suites.lambada=null", "suites.perplexity.limit=2",
              "streams.retention=0", "trainer.max_steps=2", "trainer.val_check_interval=2",
              "data.validation_groups=4", "trainer.accelerator=cpu"]  # fmt: skip
    ok("train.py", *shared, "data.batch_size=4", "hydra.run.dir=one", cwd=tmp_path)
    done = process("train.py", *shared, "data.batch_size=2", "trainer.devices=2", "trainer.strategy=ddp",
       "hydra.run.dir=two", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = (
        torch.load(tmp_path / p / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for p in ("one", "two")
    )
    for key in one:
        torch.testing.assert_close(two[key], one[key], rtol=1e-4, atol=1e-6)
    metrics = [
        json.loads((tmp_path / p / "results.json").read_text())["metrics"]["val.kl_nats"]
        for p in ("one", "two")
    ]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)


@pytest.mark.parametrize("logger", ["wandb", "tensorboard"])
def test_other_loggers_work_offline(tmp_path, logger):
    ok("train.py", *QUICK, f"logger=[csv,{logger}]", "suites.superposition=null", "suites.lambada=null",
       "hydra.run.dir=run", cwd=tmp_path, WANDB_SILENT="true", WANDB_API_KEY="")  # fmt: skip
    assert (tmp_path / "run" / "metrics.csv").is_file()
    found = "offline-run*" if logger == "wandb" else "events*"
    assert list((tmp_path / "run").rglob(found))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a word model, texts and broken files."""
    folder = tmp_path_factory.mktemp("mistakes")
    tiny_model("llama").save_pretrained(folder / "model")
    word_tokenizer().save_pretrained(folder / "model")
    shutil.copytree(folder / "model", folder / "bare")
    (folder / "bare" / "model.safetensors").unlink()
    (folder / "empty.txt").write_bytes(b"")
    (folder / "latin.txt").write_bytes("caf\xe9 ".encode("latin1") * 100)
    (folder / "short.txt").write_text(" w1 w2 w3", encoding="utf-8")
    (folder / "cut.ckpt").write_bytes(b"PK\x03\x04 cut")
    (folder / "lambada.jsonl").write_text('{"text": "a b c"}\n{"words": 1}\n', encoding="utf-8")
    return folder


MODEL = ["model=pretrained", "model.path=model"]
MISTAKES = {
    "streams": (["streams.num_streams=0"], "streams.num_streams must be at least 1, got 0"),
    "glob": ([*MODEL, "data=text", "data.path=none/*.txt"], "data.path=none/*.txt matches no"),
    "empty": ([*MODEL, "data=text", "data.path=empty.txt"], "empty.txt is empty"),
    "utf8": ([*MODEL, "data=text", "data.path=latin.txt"], "latin.txt is not UTF-8"),
    "blocks": (
        [*MODEL, "data=text", "data.path=short.txt", "data.length=2"],
        "fewer than the 2 texts of a group",
    ),
    "weights": (["model=pretrained", "model.path=bare"], "no weights (*.safetensors)"),
    "missing": (["checkpoint=nowhere"], "checkpoint=nowhere does not exist"),
    "truncated": (
        ["checkpoint=cut.ckpt"],
        "checkpoint=cut.ckpt (8 bytes) cannot be read, it is truncated",
    ),
    "length": (["data.length=257"], "data.length=257 is above the 256 positions of tiny"),
    "gpu": (["trainer=gpu"], "this machine has no GPU"),
    "fsdp": (["trainer.strategy=fsdp"], "use trainer=ddp"),
    "precision": (["trainer.precision=bf16-true"], "trainer.precision must be one of 32-true"),
    "batch": (["data.batch_size=0"], "data.batch_size must be at least 1, got 0"),
    "packing": (["data.packing=rows"], "data.packing must be one of document, concat"),
    "lines": (["callbacks.progress.every_steps=0"], "callbacks.progress.every_steps must be"),
    "steps": (["trainer.max_steps=0"], "trainer.max_steps must be at least 1, got 0"),
    "resume": (["resume=true"], "resume=true needs checkpoint=RUN"),
    "interval": (
        ["trainer.max_steps=1", "trainer.val_check_interval=2"],
        "no validation took place",
    ),
    "unset": (["model=pretrained"], "missing: model.path"),
}


@pytest.mark.parametrize("name", sorted(MISTAKES))
def test_mistakes_in_training_end_with_one_sentence(place, name):
    if name == "gpu" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    arguments, message = MISTAKES[name]
    done = run("train.py", *arguments, "hydra.run.dir=out", cwd=place)
    assert done.returncode == 1
    assert f"error: {message}" in done.stdout or message in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_an_unknown_key_is_named(place):
    done = run("train.py", "data.lenght=3", cwd=place)
    assert done.returncode == 1
    assert "lenght" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["suite=lambada", "suite.path=lambada.jsonl"], "lambada.jsonl, line 2 has no text"),
        (["suite=lambada", "suite.path=none.jsonl"], "suite.path=none.jsonl is not a file"),
        (
            ["suite=superposition", "suite.limit=0"],
            "suite.limit must be at least 1, or null for all, got 0",
        ),
        (["checkpoint=model"], "checkpoint=model has neither superpose.json"),
        (["streams.num_streams=[2,2]"], "a list of different ones such as [2,3,4], got [2, 2]"),
        (["streams.num_streams=[2,0]"], "streams.num_streams must be at least 1, got 0"),
        (["streams.num_streams=two"], "streams.num_streams must be a number of texts, or a list"),
        (
            ["suite=lambada", "streams.num_streams=[2,3]"],
            "streams.num_streams=[2, 3] is for suite=superposition, other suites measure one",
        ),
        (
            [
                *MODEL,
                "suite=attention_patching",
                "data=text",
                "data.path=short.txt",
                "data.length=2",
            ],
            "fewer than the 3 texts of a group",
        ),
        (
            ["suite=attention_patching", "suite.lambada.path=none.jsonl", "suite.limit=1"],
            "suite.lambada.path=none.jsonl is not a file",
        ),
    ],
)
def test_mistakes_in_evaluation_end_with_one_sentence(place, arguments, message):
    done = run("evaluate.py", *arguments, "hydra.run.dir=out", cwd=place)
    assert done.returncode == 1
    assert message in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_checkpoint_of_another_base_is_refused(trained, place):
    done = run("evaluate.py", f"checkpoint={trained}", *MODEL, "hydra.run.dir=out", cwd=place)
    assert done.returncode == 1
    assert "give the base model of that run" in done.stdout


def test_a_sweep_over_several_devices_is_refused(tmp_path):
    done = run(
        "train.py", "-m", "trainer.devices=2", "seed=0", "hydra.sweep.dir=sweep", cwd=tmp_path
    )
    assert done.returncode == 1
    assert "would start the whole sweep again" in done.stdout


def test_nan_loss_keeps_the_last_good_checkpoint(tmp_path):
    done = run("train.py", *QUICK, "trainer.max_steps=40", "trainer.val_check_interval=1",
               "method.optimizer.lr=1e30", "trainer.gradient_clip_val=null",
               "method.scheduler.warmup_steps=0", "hydra.run.dir=run", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 1
    assert re.search(r"error: the (loss|student's output) became \w+ at step \d+", done.stdout), (
        done.stdout + done.stderr
    )
    state = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(torch.isfinite(value).all() for value in state["state_dict"].values())


@pytest.mark.parametrize("script", ["train.py", "evaluate.py"])
def test_help_tells_groups_examples_and_keys(tmp_path, script):
    text = ok(script, "--help", cwd=tmp_path).stdout
    assert "superpose:" in text
    for part in ("== Groups", "== Examples", "== Keys", "smollm2-135m", "num_streams: 2"):
        assert part in text
