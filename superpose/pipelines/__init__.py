"""Training and evaluation from a config: the only place that builds objects from it."""

from superpose.pipelines.evaluation import evaluate
from superpose.pipelines.settings import plain
from superpose.pipelines.training import train

__all__ = ["evaluate", "plain", "train"]
