"""The guide: the small model of Joint Contrastive decoding, and the truncated one that we train.

A backbone without a smaller sibling of the same tokens gets one from its own first blocks, with its
own final norm and head, trained briefly on next-token loss: ``python train.py method=pretrain
model=truncated``. Such a run leaves its model in a cache, under the fingerprint of what it started
from, and ``guide=truncated`` finds it there.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from superpose.models.loading import LanguageModel, load

CACHE_VARIABLE = "SUPERPOSE_CACHE"  # a folder; ~/.cache/superpose without


def truncated_folder(fingerprint: str) -> Path:
    """Where the trained form of a truncated model lies, by the fingerprint of its untrained form."""
    cache = os.environ.get(CACHE_VARIABLE, "~/.cache/superpose")
    return Path(cache).expanduser() / "truncated" / fingerprint


def load_guide(settings: dict[str, Any]) -> LanguageModel:
    """Load a guide; with ``num_blocks`` the trained form of a truncated backbone, from the cache.

    Args:
        settings: the config's group ``guide``, arguments of :func:`load`.

    Raises:
        ValueError: if it cannot be loaded, or has not been trained yet (with the command to do it).
    """
    try:
        guide = load(**settings)
    except ValueError as error:  # the sentence is about model.path
        raise ValueError(f"guide: {error}") from error
    if guide.num_blocks is None:
        return guide
    folder = truncated_folder(guide.fingerprint())
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"guide=truncated: the first {guide.num_blocks} blocks of {settings['path']} have not "
            "been trained to predict tokens yet; train them once, on texts like yours, with: python "
            f"train.py model=truncated model.path={settings['path']} "
            f"model.num_blocks={guide.num_blocks} method=pretrain data=text data.path='*.txt'"
        )
    trained = load(str(folder), dtype=settings.get("dtype", "float32"))
    return replace(trained, path=guide.path, revision=guide.revision, num_blocks=guide.num_blocks)
