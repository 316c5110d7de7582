"""``train(cfg)``: fit, export, measure before and after, report."""

import logging
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, OmegaConf

from superpose.data.datamodule import StreamsDataModule
from superpose.data.sources import DataSource
from superpose.methods.base import Method
from superpose.methods.checkpoints import AtomicCheckpointIO, read_checkpoint
from superpose.methods.pretrain import Pretrain
from superpose.models.guides import load_guide, truncated_folder
from superpose.models.loading import LanguageModel, load
from superpose.pipelines.conclusion import command, show, write_all
from superpose.pipelines.measuring import decoders, describe, has_cloze, run_suites
from superpose.pipelines.settings import check_machine, plain
from superpose.reports import results
from superpose.runs import (
    export,
    inherit,
    open_checkpoint,
    provenance,
    weights_of,
    with_absolute_paths,
)
from superpose.suites.run import SuiteData

log = logging.getLogger(__name__)

# what a resumed run takes over from its checkpoint
RESUMED = ("model", "guide", "data", "streams", "method", "trainer", "seed")


def train(cfg: DictConfig, overrides: Iterable[str] = ()) -> float:
    """Train, export, measure before and after, and report.

    Args:
        cfg: the composed ``conf/train.yaml``.
        overrides: what the user set by hand. A resumed run takes everything else from its
            checkpoint; a run that starts from a checkpoint's weights takes its base model.

    Returns:
        The best value of ``method.monitor``, which a sweep minimises.

    Raises:
        ValueError: for a user's mistake, in one sentence.
    """
    checkpoint = open_checkpoint(cfg.checkpoint) if cfg.checkpoint else None
    if cfg.resume and (checkpoint is None or checkpoint.lightning_file is None):
        raise ValueError(
            "resume=true needs checkpoint=RUN with its checkpoints/ folder; got "
            f"checkpoint={cfg.checkpoint}"
        )
    if checkpoint is not None:
        groups = RESUMED if cfg.resume else ("model", "guide")
        cfg = inherit(cfg, checkpoint.provenance["config"], overrides, groups)
    cfg = with_absolute_paths(cfg)
    config = plain(cfg)
    check_machine(config["trainer"])
    started = time.perf_counter()
    lightning.seed_everything(config["seed"], workers=True, verbose=False)
    source: DataSource = instantiate(cfg.data)
    base = load(**weights_of(config))
    base.check_length(source.length, "data.length")
    guide = load_guide(config["guide"]) if config["guide"] else None
    if guide is not None:
        guide.check_length(source.length, "data.length")
    data = StreamsDataModule(source, base.tokenizer, seed=config["seed"], **config["streams"])
    # partial: a dataclass among the arguments of instantiate would be turned into a config
    make_method = instantiate(cfg.method, _partial_=True, _convert_="all")
    method: Method = make_method(model=base, guide=guide)
    method.provenance = provenance(config, base, guide, teacher="teacher" in method.frozen)
    if checkpoint is not None and not cfg.resume:
        checkpoint.load_into(method.trained)
        method.on_new_weights()
    resume_from = checkpoint.lightning_file if checkpoint is not None and cfg.resume else None
    best = fit(method, data, cfg, resume_from)
    finish_training(method, cfg, config, source, best, started)
    return best


def fit(
    method: Method, data: StreamsDataModule, cfg: DictConfig, resume_from: Path | None
) -> float:
    """Run Lightning's trainer, leave the best weights in ``method``, and return their score."""
    settings = OmegaConf.to_container(cfg.trainer, resolve=True)
    assert isinstance(settings, dict)
    # Users count optimizer steps, Lightning counts batches.
    settings["val_check_interval"] *= settings["accumulate_grad_batches"]
    failed = True
    try:
        loggers = [instantiate(node) for node in cfg.logger.values() if node is not None]
        for logger in loggers:
            if not isinstance(logger, CSVLogger):  # the run's folder has its config in .hydra/
                logger.log_hyperparams(method.provenance["config"])
        callbacks = [instantiate(node) for node in cfg.callbacks.values() if node is not None]
        trainer: lightning.Trainer = instantiate(
            settings,
            _convert_="all",
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,  # the data module shards by rank itself
            enable_progress_bar=False,  # its bar has no total for endless data; ours has
            enable_model_summary=False,
            logger=loggers,
            callbacks=callbacks,
            plugins=[AtomicCheckpointIO()],
            default_root_dir=cfg.output_dir,
        )
        trainer.fit(method, data, ckpt_path=resume_from, weights_only=True)
        failed = False
    finally:
        close_loggers(failed)
    saved = trainer.checkpoint_callback  # the first one, callbacks.best
    assert isinstance(saved, ModelCheckpoint)
    if saved.best_model_score is None:
        raise ValueError(
            f"no validation took place up to step {trainer.global_step}, so {method.monitor} was "
            f"never measured; trainer.max_steps={cfg.trainer.max_steps} must leave room for "
            f"trainer.val_check_interval={cfg.trainer.val_check_interval} steps"
        )
    state = read_checkpoint(Path(saved.best_model_path))
    method.load_state_dict(state["state_dict"], strict=False)  # the teacher is not in it
    return float(saved.best_model_score)


def close_loggers(failed: bool) -> None:
    """End a W&B run with the job, so that the next job of a sweep gets its own."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish(exit_code=int(failed))


def finish_training(
    method: Method,
    cfg: DictConfig,
    config: dict[str, Any],
    source: DataSource,
    best: float,
    started: float,
) -> None:
    """Export the trained model, measure it beside its base, write the report."""
    if not method.trainer.is_global_zero:
        return
    folder = Path(cfg.output_dir)
    base, trained = method.base, method.trained.eval()
    told = method.provenance | method.head_provenance()
    export(folder / "export", trained, base.tokenizer, told, method.head_state())
    if base.num_blocks is not None and isinstance(method, Pretrain):  # what guide=truncated reads
        export(truncated_folder(told["fingerprint"]), trained, base.tokenizer, told)
    exported = LanguageModel(trained, base.tokenizer, str(folder / "export"))
    names = method.model_names
    models = dict(zip(names, [base, exported][-len(names) :], strict=True))
    data = SuiteData(
        source,
        config["streams"]["num_streams"],
        decoders=decoders(models, method.guide_model, method.decoder(exported)),
    )
    suites = dict(cfg.suites)
    if suites.get("lambada") is not None and not has_cloze(suites["lambada"], source):
        log.info(
            "suite lambada is left out: the data has no cloze set; give suites.lambada.path or .dataset"
        )
        del suites["lambada"]
    outputs = run_suites(suites, models, data, method.trainer.strategy.root_device)
    parts = [output for output, _ in outputs.values()]
    result = results.build(
        suite="train",
        metrics={method.monitor.replace("/", "."): best}
        | {key: value for part in parts for key, value in part.metrics.items()},
        tables={key: rows for part in parts for key, rows in part.tables.items()},
        model=describe(*models.values()),
        data=source.describe(),
        config=config,
        counts={"steps": method.trainer.global_step}
        | {f"{name}.{k}": v for name, (part, _) in outputs.items() for k, v in part.counts.items()},
        seed=config["seed"],
        elapsed_seconds=time.perf_counter() - started,
        command=command(),
    )
    write_all(folder, [result])
    show(folder, [result])
