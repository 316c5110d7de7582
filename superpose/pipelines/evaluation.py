"""``evaluate(cfg)``: suites on a model, a checkpoint or revisions, and their report."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from superpose.data.sources import DataSource
from superpose.models.guides import load_guide
from superpose.models.loading import LanguageModel, load
from superpose.models.revisions import OneAtATime, hub_revisions, run_revisions
from superpose.pipelines.conclusion import command, show, write_all
from superpose.pipelines.measuring import decoders, describe_all, run_suites, suite_name
from superpose.pipelines.settings import plain
from superpose.reports import live, results
from superpose.runs import (
    Checkpoint,
    inherit,
    open_checkpoint,
    weights_of,
    with_absolute_paths,
)
from superpose.streams.mixing import stream_counts
from superpose.suites.generation import nobody
from superpose.suites.run import SuiteData

EVALUATED = ("model", "guide", "data", "streams")  # what is taken over from the checkpoint's run


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
    head = None
    if checkpoint is not None and models:  # a head belongs to the checkpoint, not to its revisions
        head = checkpoint.decoder(list(models.values())[-1], guide)
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
