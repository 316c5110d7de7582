"""Every shipped YAML composes and resolves; typos and wrong types fail and name their key."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from superpose import config
from superpose.pipelines import plain

CONF = Path(__file__).parents[1] / "conf"
GROUPS = [
    "model", "guide", "streams", "data", "method", "method/optimizer", "method/scheduler", "trainer",
    "logger", "callbacks", "suite", "experiment", "debug",
]  # fmt: skip


def entries(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


@pytest.fixture(autouse=True)
def hydra():
    config.register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def composed(name: str, *overrides: str):
    return compose(name, overrides=[*overrides, "output_dir=/tmp/nowhere"])


@pytest.mark.parametrize(
    ("group", "entry"), [(group, entry) for group in GROUPS for entry in entries(group)]
)
def test_every_yaml_composes_and_resolves(group, entry):
    filled = ["model.path=x"] if entry in ("pretrained", "truncated", "smollm2_novels") else []
    filled += ["guide.path=x"] if (group, entry) == ("guide", "pretrained") else []
    filled += ["data.path=x"] if entry in ("text", "streamed", "smollm2_novels") else []
    if group == "suite":
        assert plain(composed("evaluate", f"suite={entry}", *filled))["suite"]["_target_"]
        return
    resolved = plain(composed("train", f"{group}={entry}", *filled))
    assert resolved["output_dir"] == "/tmp/nowhere"


@pytest.mark.parametrize("entry", [e for e in entries("sweep") if e != "optuna"])
def test_every_sweep_composes(entry):
    cfg = compose("train", overrides=[f"sweep={entry}"], return_hydra_config=True)
    keys = cfg.hydra.sweeper.params
    assert keys
    for key in keys:
        assert OmegaConf.select(cfg, key) is not None


def test_optuna_sweep_names_keys_that_exist():
    node = OmegaConf.load(CONF / "sweep" / "optuna.yaml")
    cfg = composed("train")
    for key in node.hydra.sweeper.params:
        assert OmegaConf.select(cfg, key) is not None


def test_launchers_are_files_that_load():
    node = OmegaConf.load(CONF / "hydra" / "launcher" / "slurm.yaml")
    launcher = OmegaConf.to_container(node, resolve=False)
    cfg = composed("train")
    for key in ("nodes", "tasks_per_node", "gpus_per_node"):  # interpolations of existing keys
        assert OmegaConf.select(cfg, launcher[key].strip("${}")) == 1


def test_several_loggers():
    loggers = composed("train", "logger=[csv,wandb,tensorboard]").logger
    assert loggers.csv is not None
    assert loggers.wandb is not None
    assert loggers.tensorboard is not None
    assert composed("train").logger.wandb is None


def test_experiments_hold_differences_only_and_their_command():
    for entry in entries("experiment"):
        text = (CONF / "experiment" / f"{entry}.yaml").read_text()
        assert f"# python train.py experiment={entry}" in text
        assert len(text.splitlines()) < 30


def test_paper_experiments_hold_the_papers_settings():
    cfg = composed("train", "experiment=paper_llama_3.2_3b")
    assert cfg.method.temperature == 2.0
    assert cfg.streams.retention == 0.0
    assert cfg.data.length == 128
    assert cfg.data.batch_size * cfg.trainer.devices * cfg.trainer.accumulate_grad_batches == 32
    assert (cfg.method.scheduler.patience, cfg.method.scheduler.factor) == (10, 0.5)
    assert cfg.method.optimizer.lr == 1e-4
    assert cfg.trainer.gradient_clip_val == 1.0


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("modle.path=x", "modle"),
        ("model.pathh=x", "pathh"),
        ("data.lenght=3", "lenght"),
        ("method.optimizer.learning_rate=1", "learning_rate"),
        ("method.scheduler.patience=3", "patience"),
        ("trainer.max_epochs=3", "max_epochs"),
        ("suites.lambada.limmit=3", "limmit"),
        ("streams.num_streams=two", "num_streams"),
        ("data.batch_size=1.5", "batch_size"),
        ("trainer.max_steps=many", "max_steps"),
    ],
)
def test_a_wrong_override_names_its_key(override, key):
    with pytest.raises(ConfigCompositionException) as caught:
        composed("train", override)
    assert key in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize(
    ("group", "text", "key"),
    [
        ("model", "pathh: x", "pathh"),
        ("data", "defaults: [base_stories, _self_]\nlenght: 3", "lenght"),
        ("method", "defaults: [base_self_distillation, _self_]\ntemprature: 2.0", "temprature"),
        ("trainer", "max_step: 3", "max_step"),
        ("streams", "num_streams: two", "num_streams"),
        ("guide", "num_block: 3", "num_block"),
        ("method", "defaults: [base_joint_contrastive, _self_]\nalpha: 2.0", "alpha"),
    ],
)
def test_a_typo_in_a_yaml_file_fails_and_names_its_key(tmp_path, group, text, key):
    (tmp_path / group).mkdir()
    (tmp_path / group / "mine.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(Exception, match=key):
        composed("train", f"hydra.searchpath=[file://{tmp_path}]", f"{group}=mine")


def test_missing_keys_are_listed():
    cfg = composed("train", "model=pretrained", "data=text")
    with pytest.raises(ValueError, match=r"missing: data.path, model.path; set it"):
        plain(cfg)
