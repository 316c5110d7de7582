"""Evaluate: ``python evaluate.py suite=NAME [checkpoint=RUN] [key=value ...]``; see ``--help``."""

import os
import sys

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # before any tokenizer: workers fork

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from superpose import cli, config

config.register()


@hydra.main(version_base="1.3", config_path="conf", config_name="evaluate")
def main(cfg: DictConfig) -> None:
    """Run one job."""
    from superpose import pipelines  # after --help: torch and transformers take seconds to import

    overrides = list(HydraConfig.get().overrides.task)
    cli.run_job(lambda: pipelines.evaluate(cfg, overrides))


if __name__ == "__main__":
    sys.argv[1:] = cli.several_suites(sys.argv[1:])
    main()
