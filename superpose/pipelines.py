"""Training and evaluation from a config: the only place that builds objects from it."""

import itertools
import logging
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_method, instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import track

from superpose.data.datamodule import StreamsDataModule
from superpose.data.sources import DataSource
from superpose.decoding import Decoder, JointContrastive, Raw
from superpose.methods.base import Method
from superpose.methods.checkpoints import AtomicCheckpointIO, read_checkpoint
from superpose.methods.pretrain import Pretrain
from superpose.models.guides import load_guide, truncated_folder
from superpose.models.loading import LanguageModel, load
from superpose.models.revisions import OneAtATime, hub_revisions, run_revisions
from superpose.reports import live, report, results, tables
from superpose.reports.sweep import LOG_WIDTH
from superpose.runs import (
    Checkpoint,
    export,
    inherit,
    open_checkpoint,
    provenance,
    weights_of,
    with_absolute_paths,
)
from superpose.streams.mixing import stream_counts
from superpose.suites.generation import nobody
from superpose.suites.run import SuiteData, SuiteOutput

log = logging.getLogger(__name__)


EVALUATED = (
    "model",
    "guide",
    "data",
    "streams",
)  # what an evaluation takes over from the checkpoint's run
RESUMED = (*EVALUATED, "method", "trainer", "seed")  # and what a resumed run does
PRECISIONS = ("32-true", "bf16-mixed")


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


def evaluate(cfg: DictConfig, overrides: Iterable[str] = ()) -> dict[str, float]:
    """Measure a model or a checkpoint with one suite, and report.

    Args:
        cfg: the composed ``conf/evaluate.yaml``.
        overrides: what the user set by hand (``["data.length=32"]``); with a checkpoint, everything
            else of the groups model, data and streams comes from its run.

    Returns:
        The suite's metrics.

    Raises:
        ValueError: for a user's mistake, in one sentence.
    """
    checkpoint = open_checkpoint(cfg.checkpoint) if cfg.checkpoint else None
    if checkpoint is not None:
        cfg = inherit(cfg, checkpoint.provenance["config"], overrides, EVALUATED)
    cfg = with_absolute_paths(measuring_all(cfg, checkpoint, overrides))
    config = plain(cfg)
    lightning.seed_everything(config["seed"], workers=True, verbose=False)
    counts = stream_counts(config["streams"]["num_streams"])
    source: DataSource = instantiate(cfg.data)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    suites = chosen_suites(cfg)
    models = load_models(config, checkpoint, device)
    guide = load_guide(config["guide"]) if config["guide"] else None
    head = None if checkpoint is None else checkpoint.decoder(list(models.values())[-1], guide)
    terminal = Console(stderr=True)
    watch = live.SideBySide(terminal) if terminal.is_terminal else nobody
    told_apart = decoders(models, guide, head)
    data = SuiteData(source, *counts, decoders=told_apart, watch=watch)
    folder = Path(cfg.output_dir)
    found: list[results.Result] = []
    try:
        for name, node in suites.items():
            measured = revisions_of(config, checkpoint, node.get("revisions"), device) or models
            output, elapsed = run_suites({name: node}, measured, data, device)[name]
            found.append(
                results.build(
                    suite=name,
                    metrics=output.metrics,
                    tables=output.tables,
                    model=describe_all(measured),
                    data=output.data or source.describe(),
                    config=config,
                    counts=output.counts,
                    seed=config["seed"],
                    elapsed_seconds=elapsed,
                    command=command(),
                )
            )
            write_all(folder, found)  # after each suite: a later one that fails costs only itself
    finally:
        if isinstance(watch, live.SideBySide):
            watch.stop()
    show(folder, found)
    return {key: value for result in found for key, value in result["metrics"].items()}


def chosen_suites(cfg: DictConfig) -> dict[str, Any]:
    """The one of ``suite=NAME``, or those of ``suite=[NAME,NAME]``, by name."""
    if cfg.suite is not None:
        return {suite_name(cfg.suite): cfg.suite}
    return {name: node for name, node in cfg.suites.items() if node is not None}


def measuring_all(
    cfg: DictConfig, checkpoint: Checkpoint | None, overrides: Iterable[str]
) -> DictConfig:
    """Hold out all of the user's own texts: nothing was trained on them, so all are measured."""
    keys = {override.split("=", 1)[0] for override in overrides}
    own = checkpoint is None or "data" in keys
    if own and "validation_fraction" in cfg.data and "data.validation_fraction" not in keys:
        cfg = cfg.copy()
        cfg.data.validation_fraction = 1.0
    return cfg


def write_all(folder: Path, found: list[results.Result]) -> None:
    """Write results.json, of several suites as one, the figures and report.md."""
    results.write(folder / results.FILE_NAME, results.merged(found))
    report.write_report(folder, found)


def show(folder: Path, found: list[results.Result]) -> None:
    """Show the tables and where everything lies."""
    width = None if sys.stdout.isatty() else LOG_WIDTH
    console = Console(width=width)
    tables.print_results(console, found)
    for result in found:
        if rows := result["tables"].get("generation.continuations"):
            console.print(live.continuations_table(rows))
    for name, what in (
        ("checkpoints", "best and last checkpoint"),
        ("export", "the trained model as a Hugging Face folder"),
        ("report.md", "report with figures"),
    ):
        if (folder / name).exists():
            print(f"{folder / name}  {what}")


def command() -> str:
    """What the user typed, before :func:`superpose.cli.several_suites`."""
    typed = sys.orig_argv
    start = typed.index(sys.argv[0]) if sys.argv[0] in typed else None
    words = sys.argv if start is None else typed[start:]
    return shlex.join(["python", Path(words[0]).name, *words[1:]])


def load_models(
    config: dict[str, Any], checkpoint: Checkpoint | None, device: torch.device
) -> Mapping[str, LanguageModel]:
    """The models to measure, the reference first; none if all suites measure revisions."""
    suites = [config["suite"]] if config["suite"] is not None else config["suites"].values()
    if all(suite.get("revisions") is not None for suite in suites if suite is not None):
        return {}
    if checkpoint is None:
        return {"base": load(**weights_of(config))}
    if not checkpoint.has_reference:
        return {"checkpoint": checkpoint.load()}
    base = load(**weights_of(config))
    checkpoint.check_base(base)
    return {"base": base, "checkpoint": checkpoint.load(base)}


def revisions_of(
    config: dict[str, Any], checkpoint: Checkpoint | None, asked: Any, device: torch.device
) -> OneAtATime | None:
    """The revisions that a suite asks for, the earliest first, or None if it asks for none."""
    if asked is None:
        return None
    asked = OmegaConf.to_container(asked) if OmegaConf.is_config(asked) else asked
    if checkpoint is None:
        return hub_revisions(weights_of(config), asked, device)
    return run_revisions(checkpoint.path, asked, device)


def decoders(
    models: Mapping[str, LanguageModel], guide: LanguageModel | None, head: Decoder | None
) -> dict[str, list[Decoder]]:
    """Every way to tell the streams of each model apart; a trained ``head`` is the last model's."""
    found: dict[str, list[Decoder]] = {}
    for name, model in models.items():
        found[name] = [Raw()] if guide is None else [Raw(), JointContrastive(model, guide)]
    if head is not None:
        found[name].append(head)
    return found


def run_suites(
    suites: Mapping[str, Any],
    models: Mapping[str, LanguageModel],
    data: SuiteData,
    device: torch.device,
) -> dict[str, tuple[SuiteOutput, float]]:
    """Run suites one after the other; returns output and seconds by name."""
    lazy = isinstance(models, OneAtATime)  # those go to the device when they are loaded
    modules: list[Any] = [] if lazy else [model.model for model in models.values()]
    for decoder in itertools.chain(*data.decoders.values()):
        modules += [decoder.guide.model] if decoder.guide is not None else []
        modules += [decoder] if isinstance(decoder, torch.nn.Module) else []
    for module in modules:
        module.to(device).eval()
    outputs = {}
    for name, node in suites.items():
        if node is None:
            continue
        settings: Any = OmegaConf.to_object(node)
        started = time.perf_counter()
        function = get_method(settings._target_)
        outputs[name] = (
            function(models, data, settings, show_progress),
            time.perf_counter() - started,
        )
    return outputs


def has_cloze(settings: Any, source: DataSource) -> bool:
    """Whether the LAMBADA suite was given examples, or the data brings its own."""
    named = settings.path is not None or settings.dataset is not None
    return named or source.cloze_examples(1) is not None


def show_progress(iterable: Iterable[Any], description: str, total: int) -> Iterator[Any]:
    """A bar on a terminal; elsewhere a line at the start and at each quarter."""
    console = Console(stderr=True)
    if console.is_terminal:
        yield from track(iterable, description, total, console=console, transient=True)
        return
    quarter = max(1, total // 4)
    for number, item in enumerate(iterable, start=1):
        yield item
        if number % quarter == 0 or number == total:
            log.info("%s: %d/%d batches", description, number, total)


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values.

    Raises:
        ValueError: naming every key that is still missing.
    """
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise ValueError(
            f"missing: {', '.join(missing)}; set it on the command line, {missing[0]}=..."
        )
    config = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def check_machine(trainer: dict[str, Any]) -> None:
    """Refuse what this machine or a sweep cannot do, before any model is loaded."""
    if trainer["accelerator"] in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"trainer.accelerator={trainer['accelerator']} but this machine has no GPU that torch "
            "can use; run with trainer=cpu"
        )
    for key in ("max_steps", "val_check_interval", "accumulate_grad_batches", "devices"):
        if trainer[key] < 1:
            raise ValueError(f"trainer.{key} must be at least 1, got {trainer[key]}")
    if "fsdp" in str(trainer["strategy"]) or "deepspeed" in str(trainer["strategy"]):
        raise ValueError(
            f"trainer.strategy={trainer['strategy']} would shard the frozen teacher together with "
            "the student, which is not supported; use trainer=ddp"
        )
    if trainer["precision"] not in PRECISIONS:
        raise ValueError(
            f"trainer.precision must be one of {', '.join(PRECISIONS)}, got {trainer['precision']}: "
            "lower ones would round the student's small updates away"
        )
    multirun = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    if (
        multirun
        and trainer["devices"] > 1
        and "basic" in HydraConfig.get().launcher._target_.lower()
    ):
        raise ValueError(
            f"trainer.devices={trainer['devices']} in a sweep: every process of a job would start "
            "the whole sweep again; use one device a job, or hydra/launcher=submitit_slurm with one "
            "task a device"
        )


def close_loggers(failed: bool) -> None:
    """End a W&B run with the job, so that the next job of a sweep gets its own."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish(exit_code=int(failed))


def suite_name(node: Any) -> str:
    """``lambada`` of ``superpose.suites.run.lambada``."""
    return str(node._target_).rsplit(".", 1)[-1]


def describe_all(models: Mapping[str, LanguageModel]) -> dict[str, Any]:
    """:func:`describe`; of revisions the last, which is loaded, with the names of all."""
    if isinstance(models, OneAtATime):
        return describe(models[list(models)[-1]]) | {"names": list(models)}
    return describe(*models.values())


def describe(*models: LanguageModel) -> dict[str, Any]:
    """What results.json says of the models."""
    last = models[-1]
    return {
        "names": [model.name for model in models],
        "path": last.path,
        "revision": last.revision,
        "type": last.model.config.model_type,
        "parameters": last.num_parameters,
        "dtype": str(last.model.dtype).removeprefix("torch."),
        "fingerprints": [model.fingerprint() for model in models],
    }
