"""Several revisions of one model, loaded one at a time: hub branches, or a run's trajectory."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from superpose.models.loading import PACKAGED, LanguageModel, load

TRAJECTORY = "trajectory"  # of a run's folder: a Hugging Face folder a checkpoint


class OneAtATime(Mapping[str, LanguageModel]):
    """Models by name, each loaded when it is asked for and freed before the next one is.

    Whoever goes through them must not hold on to a model: ``for name in models: f(models[name])``.
    """

    def __init__(
        self, loaders: Mapping[str, Callable[[], LanguageModel]], device: torch.device
    ) -> None:
        """``loaders`` by name, in order; ``device`` is where a loaded model goes."""
        self._loaders, self._device = loaders, device
        self._name: str | None = None
        self._model: LanguageModel | None = None

    def __getitem__(self, name: str) -> LanguageModel:
        """The model of that name; the one asked for before is dropped."""
        if self._model is None or name != self._name:
            self._model = None  # before the next one takes its memory
            self._model, self._name = self._loaders[name](), name
            torch.nn.Module.to(self._model.model, self._device)
        return self._model

    def __iter__(self) -> Iterator[str]:
        """The names, in order."""
        return iter(self._loaders)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._loaders)


def step_folder(step: int) -> str:
    """Name of a trajectory's checkpoint after ``step`` optimizer steps."""
    return f"step_{step:07d}"


def step_of(revision: str) -> int | None:
    """The training step that a revision's name tells (``step1000``, ``step_0001000``), or None."""
    found = re.search(r"step[_-]?(\d+)", revision)
    return int(found.group(1)) if found else None


def run_revisions(run: str, asked: Any, device: torch.device) -> OneAtATime:
    """Checkpoints of the trajectory that a ``method=pretrain`` run keeps.

    Args:
        run: the run's folder, or a file or folder in it.
        asked: ``suite.revisions``: ``all``, or names such as ``step512``.
        device: where a loaded model goes.

    Raises:
        ValueError: if the run has no trajectory, or not what was asked for (names what it has).
    """
    place = Path(run).expanduser()
    homes = (place, place.parent, place.parent.parent)  # a run, its export/, a file of checkpoints/
    folder = next((home / TRAJECTORY for home in homes if (home / TRAJECTORY).is_dir()), None)
    if folder is None:
        raise ValueError(
            f"checkpoint={run} has no {TRAJECTORY}/ with the revisions that suite.revisions asks "
            "for; give a run of method=pretrain, which keeps them by default"
        )
    known = [path.name for path in sorted(folder.iterdir()) if (path / "config.json").is_file()]
    names = choose(asked, known, f"checkpoint={run}")
    return OneAtATime({name: _loader(path=str(folder / name)) for name in names}, device)


def hub_revisions(weights: Mapping[str, Any], asked: Any, device: torch.device) -> OneAtATime:
    """Revisions of a hub model.

    Args:
        weights: arguments of :func:`superpose.models.loading.load`.
        asked: ``suite.revisions``: names of branches or tags, or ``all`` that tell a step.
        device: where a loaded model goes.

    Raises:
        ValueError: for a local folder, or a revision that does not exist (names those that do).
    """
    path = weights["path"]
    if path in PACKAGED or Path(path).expanduser().exists():
        raise ValueError(
            f"suite.revisions={asked}, but model.path={path} is a local folder, which has no "
            "revisions; give a hub id, or checkpoint=RUN of a method=pretrain run"
        )
    names = choose(asked, known_revisions(path), f"model.path={path}")
    return OneAtATime({name: _loader(**{**weights, "revision": name}) for name in names}, device)


def choose(asked: Any, known: Sequence[str] | None, where: str) -> list[str]:
    """The revisions that ``suite.revisions`` asks for, by their own names, in its order.

    Args:
        asked: ``all`` (of those that tell a training step, by step), or one or several names; a
            name that tells a step stands for any that tells the same one.
        known: the names that exist, None if nobody can tell.
        where: key and value of what has them, for errors.

    Raises:
        ValueError: for a name that does not exist, or none.
    """
    steps = {step: name for name in known or () if (step := step_of(name)) is not None}
    if asked == "all":
        if not steps:
            reason = "names none by its training step" if known is not None else "cannot be reached"
            raise ValueError(f"suite.revisions=all, but {where} {reason}; list them by name")
        return [steps[step] for step in sorted(steps)]
    names = [asked] if isinstance(asked, str) else [str(name) for name in asked]
    if not names:
        raise ValueError(f"suite.revisions=[] names no revision of {where}; list some, or all")
    if known is None:
        return names
    found = []
    for name in names:
        same_step = steps.get(step) if (step := step_of(name)) is not None else None
        if name not in known and same_step is None:
            raise ValueError(
                f"suite.revisions: {where} has no revision {name!r}; it has {_listed(known)}"
            )
        found.append(name if name in known or same_step is None else same_step)
    return found


def known_revisions(path: str) -> list[str] | None:
    """Branches and tags of a hub model; None where the hub cannot be asked."""
    import httpx
    from huggingface_hub import list_repo_refs

    try:
        refs = list_repo_refs(path)
    except (OSError, ValueError, httpx.HTTPError):  # no network, no such model: loading will tell
        return None
    return [ref.name for ref in (*refs.branches, *refs.tags)]


def _loader(**weights: Any) -> Callable[[], LanguageModel]:
    return lambda: load(**weights)


def _listed(names: Sequence[str], most: int = 12) -> str:
    """Names for a sentence, the middle of a long list left out."""
    if len(names) <= most:
        return ", ".join(names)
    half = most // 2
    return f"{', '.join(names[:half])}, ..., {', '.join(names[-half:])} ({len(names)} in all)"
