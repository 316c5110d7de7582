"""What a run leaves behind - checkpoints and export - and how it is opened again."""

import glob
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from superpose.config import GuideConfig
from superpose.decoding import Decoder, JointContrastive, TwoHead
from superpose.methods.checkpoints import read_checkpoint
from superpose.models.layout import output_head
from superpose.models.loading import PACKAGED, LanguageModel, load
from superpose.models.students import student_of

PROVENANCE_FILE = "superpose.json"
HEAD_FILE = "two_head.safetensors"  # mixers and heads, beside the backbone
TYPED = ("model", "guide", "streams", "trainer")  # their schema does not change with the choice
TRAINED = ("model.", "student.", "backbone.")  # where a .ckpt keeps the trained model
HEAD = "head."  # and mixers and heads of method=two_head


@dataclass(frozen=True)
class Checkpoint:
    """Trained weights on disk.

    Attributes:
        path: the run folder, .ckpt file or export folder that was named.
        provenance: what ``superpose.json`` and every .ckpt say: method, N, base model and its
            fingerprint, teacher, alpha, beta, guide with its fingerprint, and the run's config.
        export_folder: the Hugging Face folder of the weights, or None for a .ckpt.
        lightning_file: the .ckpt to resume from, or None if there is none.
    """

    path: str
    provenance: dict[str, Any]
    export_folder: Path | None
    lightning_file: Path | None

    @property
    def has_reference(self) -> bool:
        """Whether the weights are to be measured beside the base model they were trained from."""
        config = self.provenance["config"]["method"]
        return self.provenance["method"] != "Pretrain" and not config.get("freeze_backbone")

    def load(self, base: LanguageModel | None = None) -> LanguageModel:
        """The trained model; ``base`` is its base model, if that is loaded already."""
        if self.export_folder is not None:
            return load(str(self.export_folder))
        if base is None:
            base = load(**self.provenance["base"])
        self.check_base(base)
        model = student_of(base.model).eval()
        self.load_into(model)
        return LanguageModel(model, base.tokenizer, self.path)

    def load_into(self, model: PreTrainedModel) -> None:
        """Put the trained weights into ``model``.

        Raises:
            ValueError: if they do not fit.
        """
        if self.export_folder is not None:
            state = load(str(self.export_folder)).model.state_dict()
        else:
            assert self.lightning_file is not None
            saved = read_checkpoint(self.lightning_file)["state_dict"]
            state = {
                key.split(".", 1)[1]: value
                for key, value in saved.items()
                if key.startswith(TRAINED)
            }
        expected = model.state_dict()
        odd = sorted(set(state) ^ set(expected)) or [
            key for key, value in expected.items() if value.shape != state[key].shape
        ]
        if odd:
            raise ValueError(
                f"checkpoint={self.path} does not fit the model: {len(odd)} weights are missing, "
                f"unexpected or of another shape, such as {odd[0]}; "
                f"it was trained from model.path={self.provenance['base']['path']}"
            )
        model.load_state_dict(state)

    def decoder(self, model: LanguageModel, guide: LanguageModel | None) -> Decoder | None:
        """What the run trained to tell the streams of ``model``, its weights, apart; None if nothing.

        Args:
            model: the checkpoint's model, as :meth:`load` gives it.
            guide: the run's guide.

        Raises:
            ValueError: for another guide than the run's.
        """
        if self.provenance["method"] == "JointContrastive":
            expected = self.provenance["guide"]["fingerprint"]
            if guide is None or guide.fingerprint() != expected:
                given = "none" if guide is None else f"{guide.path} ({guide.fingerprint()})"
                raise ValueError(
                    f"checkpoint={self.path} was trained with the guide "
                    f"{self.provenance['guide']['path']} ({expected}), got {given}; leave guide out, "
                    "the checkpoint brings its own"
                )
            alpha, beta = self.provenance["alpha"], self.provenance["beta"]
            num_streams = self.provenance["num_streams"]
            return JointContrastive(model, guide, alpha, beta, num_streams, "joint")
        if self.provenance["method"] == "TwoHead":
            head = TwoHead(output_head(model.model), self.provenance["num_streams"])
            head.load_state_dict(self._head_state())
            return head.requires_grad_(False)
        return None

    def _head_state(self) -> dict[str, Tensor]:
        if self.export_folder is not None:
            return load_file(self.export_folder / HEAD_FILE)
        assert self.lightning_file is not None
        saved = read_checkpoint(self.lightning_file)["state_dict"]
        return {k.removeprefix(HEAD): v for k, v in saved.items() if k.startswith(HEAD)}

    def check_base(self, base: LanguageModel) -> None:
        """Refuse another base model than the one the weights were trained from."""
        if self.provenance["base"]["random_init"]:
            return  # nothing of the start is left in a model trained from scratch
        fingerprint = base.fingerprint()
        if fingerprint != self.provenance["fingerprint"]:
            raise ValueError(
                f"checkpoint={self.path} was trained from {self.provenance['base']['path']} with "
                f"fingerprint {self.provenance['fingerprint']}, but model.path={base.path} has "
                f"{fingerprint}; give the base model of that run, or leave model.path out"
            )


def open_checkpoint(path: str) -> Checkpoint:
    """Find the trained weights that ``checkpoint=PATH`` names.

    Args:
        path: a run folder, a .ckpt file, or an export folder.

    Raises:
        ValueError: if there are none, or they cannot be read.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return Checkpoint(path, read_checkpoint(place)["superpose"], None, place)
    if not place.is_dir():
        raise ValueError(
            f"checkpoint={path} does not exist; give a run folder (outputs/train/DAY/TIME), a .ckpt "
            "file or an export folder"
        )
    last = place / "checkpoints" / "last.ckpt"
    for folder in (place, place / "export"):
        if (folder / PROVENANCE_FILE).is_file():
            provenance = json.loads((folder / PROVENANCE_FILE).read_text(encoding="utf-8"))
            return Checkpoint(path, provenance, folder, last if last.is_file() else None)
    if last.is_file():  # a run that was stopped before its export
        return Checkpoint(path, read_checkpoint(last)["superpose"], None, last)
    raise ValueError(
        f"checkpoint={path} has neither {PROVENANCE_FILE}, export/ nor checkpoints/last.ckpt, so it "
        "is no run of superpose; a Hugging Face folder is given with model=pretrained model.path"
    )


def export(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    provenance: dict[str, Any],
    head: dict[str, Tensor] | None = None,
) -> None:
    """Write a Hugging Face folder (safetensors, tokenizer) with ``superpose.json``.

    ``head`` are mixers and heads of method=two_head, written beside the backbone.
    """
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if head:
        save_file({key: value.contiguous() for key, value in head.items()}, folder / HEAD_FILE)
    text = json.dumps(provenance, indent=2)
    (folder / PROVENANCE_FILE).write_text(text + "\n", encoding="utf-8")


def provenance(
    config: dict[str, Any], base: LanguageModel, guide: LanguageModel | None, teacher: bool
) -> dict[str, Any]:
    """What belongs to trained weights: everything needed to rebuild and to judge them.

    ``teacher``: the weights are a student's, whose teacher is the base model.
    """
    return {
        "schema": 1,
        "method": config["method"]["_target_"].rsplit(".", 1)[-1],
        "num_streams": config["streams"]["num_streams"],
        "base": weights_of(config),
        "fingerprint": base.fingerprint(),
        "teacher": config["model"]["path"] if teacher else None,
        "alpha": None,
        "beta": None,
        "guide": guide and {**config["guide"], "fingerprint": guide.fingerprint()},
        "config": config,
    }


def weights_of(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of :func:`superpose.models.loading.load` in a run's config."""
    return {key: value for key, value in config["model"].items() if key != "learning_rate"}


def with_absolute_paths(cfg: DictConfig) -> DictConfig:
    """A config whose local paths no longer depend on where it was launched from.

    A checkpoint takes its config along, and is opened from other folders.
    """
    absolute = cfg.copy()
    for key in ("model.path", "guide.path", "data.path"):
        path = OmegaConf.select(absolute, key)
        if path is not None and path not in PACKAGED and glob.glob(os.path.expanduser(path)):
            OmegaConf.update(absolute, key, os.path.abspath(os.path.expanduser(path)))
    return absolute


def inherit(
    cfg: DictConfig, run: dict[str, Any], overrides: Iterable[str], groups: Iterable[str]
) -> DictConfig:
    """A config with groups taken over from the run that a checkpoint is from.

    What the user set by hand stays: a group chosen anew (``data=text``) is not inherited, single
    keys (``data.length=32``) are laid over the run's. An ``experiment`` chooses all groups.

    Args:
        cfg: the composed config.
        run: the run's config.
        overrides: the user's own, as Hydra lists them.
        groups: names of groups, such as ``model``, or of single keys of the top level.
    """
    chosen = {override.split("=", 1)[0].lstrip("+~") for override in overrides if "=" in override}
    if "experiment" in chosen:
        return cfg
    merged = cfg.copy()
    with open_dict(merged):
        for group in groups:
            if any(key == group or key.startswith(f"{group}/") for key in chosen):
                continue
            own = {key for key in chosen if key.startswith(f"{group}.")}
            kept = {key: OmegaConf.select(cfg, key) for key in own}
            value = run.get(group)
            if isinstance(value, dict):
                schema: Any = {}
                if group in TYPED:  # a guide that is null has no type of its own
                    schema = GuideConfig if group == "guide" else OmegaConf.get_type(cfg, group)
                value = OmegaConf.merge(schema, value)
            merged[group] = value
            for key, value in kept.items():
                OmegaConf.update(merged, key, value)
    return merged
