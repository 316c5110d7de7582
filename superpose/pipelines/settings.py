"""A config as plain values, and what this machine cannot do."""

from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

PRECISIONS = ("32-true", "bf16-mixed")


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
