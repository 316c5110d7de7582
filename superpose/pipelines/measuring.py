"""Suites on loaded models: what both commands share."""

import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from hydra.utils import get_method
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import track

from superpose.data.sources import DataSource
from superpose.decoding import Decoder, JointContrastive, Raw
from superpose.models.loading import LanguageModel
from superpose.models.revisions import OneAtATime
from superpose.suites.run import SuiteData, SuiteOutput

log = logging.getLogger(__name__)


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
