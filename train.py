"""Train: ``python train.py [GROUP=NAME ...] [key=value ...]``; ``--help`` lists both."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # before any tokenizer: workers fork

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from superpose import cli, config

config.register()


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Run one job; a sweep minimises the returned metric."""
    from superpose import pipelines  # after --help: torch and transformers take seconds to import

    overrides = list(HydraConfig.get().overrides.task)
    return cli.run_job(lambda: pipelines.train(cfg, overrides))


if __name__ == "__main__":
    main()
