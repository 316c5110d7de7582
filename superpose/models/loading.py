"""Load a causal language model from a hub id, a local folder or a GGUF file."""

import copy
import hashlib
import logging
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from superpose.models.layout import (
    TESTED_FAMILIES,
    check_layout,
    final_hidden,
    output_head,
    truncate,
)
from superpose.models.layout import position_limit as _position_limit

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PACKAGED = {  # models that ship with superpose
    "tiny": Path(__file__).parent / "tiny_weights",
    "tiny-guide": Path(__file__).parent / "tiny_guide_weights",
}
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
GGUF_SENTENCE = "The quick brown fox jumps over the lazy dog, and the dog looks at the fox."


@dataclass(frozen=True)
class LanguageModel:
    """A model in eval mode with the tokenizer that belongs to it.

    Attributes:
        model: the Hugging Face model.
        tokenizer: its fast tokenizer.
        path: hub id or folder it came from.
        revision: hub revision, or None.
        gguf_file: the GGUF file inside ``path``, or None.
        num_blocks: how many of its first blocks were kept, None for all.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    path: str
    revision: str | None = None
    gguf_file: str | None = None
    num_blocks: int | None = None

    @property
    def name(self) -> str:
        """Short name for tables: the last part of the path, and the revision."""
        base = Path(self.path).name or self.path
        revision = f"@{self.revision}" if self.revision else ""
        return base + revision + (f"[:{self.num_blocks}]" if self.num_blocks else "")

    @property
    def num_tokens(self) -> int:
        """Tokens that the tokenizer can name; logits may be wider (padded vocabularies)."""
        return len(self.tokenizer)

    @property
    def max_length(self) -> int | None:
        """The longest sequence the model was made for, in tokens."""
        return _position_limit(self.model)

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def first_blocks(self, num_blocks: int) -> "LanguageModel":
        """A copy with the first blocks only, and the model's own final norm and head.

        Raises:
            ValueError: if the model has fewer blocks.
        """
        model = truncate(copy.deepcopy(self.model), num_blocks)
        return LanguageModel(
            model, self.tokenizer, self.path, self.revision, self.gguf_file, num_blocks
        )

    def fingerprint(self) -> str:
        """Hash of all weights: two models with one fingerprint compute the same function."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            digest.update(name.encode())
            digest.update(parameter.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def check_length(self, length: int, key: str) -> None:
        """Raise ValueError if ``length`` tokens (the config's ``key``) exceed the position limit."""
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"{key}={length} is above the {self.max_length} positions of {self.name}; "
                f"set {key} to at most {self.max_length}"
            )


def load(
    path: str,
    revision: str | None = None,
    gguf_file: str | None = None,
    dtype: str = "float32",
    random_init: bool = False,
    num_blocks: int | None = None,
) -> LanguageModel:
    """Load a model and its tokenizer; nothing but safetensors (or GGUF) is ever read.

    Args:
        path: hub id (``EleutherAI/pythia-160m``), local folder, or ``tiny``, the packaged model.
        revision: hub revision (branch, tag, commit).
        gguf_file: name of a GGUF file in ``path``; its weights are dequantised.
        dtype: ``float32`` whatever the file says (AdamW loses small updates in bfloat16), unless
            another of bfloat16 and float16 is asked for.
        random_init: take only the configuration and the tokenizer and draw fresh weights from
            torch's global generator.
        num_blocks: keep the first blocks only, with the model's own final norm and head.

    Returns:
        The model in eval mode, checked to be one that superpose mixes rightly.

    Raises:
        ValueError: one sentence naming the key and the way out - for a folder that is missing or
            has no weights, a hub that cannot be reached, a vocabulary that does not fit.
    """
    if dtype not in DTYPES:
        raise ValueError(f"model.dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    source = str(PACKAGED.get(path, path))
    _check_folder(source, gguf_file, needs_weights=not random_init)
    local = Path(source).expanduser()
    source = str(local) if local.is_dir() else source
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, gguf_file=gguf_file)
        if random_init:
            config = AutoConfig.from_pretrained(source, revision=revision, gguf_file=gguf_file)
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
        else:
            model, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
                source,
                revision=revision,
                gguf_file=gguf_file,
                dtype=DTYPES[dtype],
                use_safetensors=None if gguf_file else True,
                output_loading_info=True,
            )
            missing = sorted(info["missing_keys"])  # type: ignore[has-type]
            if missing:  # Transformers would draw them at random
                raise ValueError(f"{len(missing)} weights are missing, such as {missing[0]}")
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"model.path={path} (revision {revision or 'default'}) could not be loaded: "
            f"{reason[:300]}; give a hub id that can be reached from here or a local folder with "
            "config.json, a tokenizer and model.safetensors"
        ) from error
    if gguf_file and not random_init:
        model = _plain(model)
    if num_blocks is not None:
        model = truncate(model, num_blocks)
    loaded = LanguageModel(model.eval(), tokenizer, path, revision, gguf_file, num_blocks)
    _check_vocabulary(loaded)
    check_layout(loaded.model, path)
    if gguf_file and not random_init:
        _check_gguf(loaded)
    log.info(
        "model %s: %s, %.1f M parameters, %s, vocabulary %d (logits %d)",
        loaded.name,
        loaded.model.config.model_type,
        loaded.num_parameters / 1e6,
        str(loaded.model.dtype).removeprefix("torch."),
        loaded.num_tokens,
        output_head(loaded.model).weight.shape[0],
    )
    return loaded


def _check_folder(path: str, gguf_file: str | None, needs_weights: bool) -> None:
    """What can be said of a local folder before anything is read from it."""
    folder = Path(path).expanduser()
    if not folder.exists():
        if path.startswith((".", "/", "~")):
            raise ValueError(
                f"model.path={path} does not exist; give a folder or a hub id such as "
                "EleutherAI/pythia-160m"
            )
        return  # a hub id
    if not folder.is_dir():
        raise ValueError(
            f"model.path={path} is a file, expected a folder; for a GGUF file give its folder "
            "and model.gguf_file=NAME.gguf"
        )
    if gguf_file:
        if not (folder / gguf_file).is_file():
            raise ValueError(f"model.gguf_file={gguf_file} is not in model.path={path}")
        return
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model.path={path} has no config.json, so it is no Hugging Face model folder; "
            "the folder of a superpose run has one in export/"
        )
    if needs_weights and not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        raise ValueError(
            f"model.path={path} has a config.json but no weights (*.safetensors); save the model "
            "with save_pretrained, or give the folder that has them"
        )


def _check_vocabulary(loaded: LanguageModel) -> None:
    rows = loaded.model.get_input_embeddings().weight.size(0)  # type: ignore[operator]
    logits = output_head(loaded.model).weight.shape[0]
    if loaded.num_tokens > min(rows, logits):
        raise ValueError(
            f"model.path={loaded.path}: the tokenizer knows {loaded.num_tokens} tokens but the "
            f"model has {rows} embeddings and {logits} logits; use the tokenizer that the model "
            "was trained with"
        )


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """A dequantised model as an ordinary one: without its mark it can be saved again."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.model_type, **_plain_settings(config)), dtype=model.dtype
    )
    plain.load_state_dict(model.state_dict())
    return plain


def _plain_settings(config: object) -> dict:
    settings = config.to_dict()  # type: ignore[attr-defined]
    return {k: v for k, v in settings.items() if k not in ("model_type", "quantization_config")}


def _check_gguf(loaded: LanguageModel) -> None:
    """A converter that forgets a constant raises nothing, but the model then knows no English."""
    if loaded.model.config.model_type not in TESTED_FAMILIES:
        raise ValueError(
            f"model.gguf_file={loaded.gguf_file} holds a {loaded.model.config.model_type!r} model; "
            f"GGUF is read for {', '.join(TESTED_FAMILIES)}; give the Hugging Face folder instead"
        )
    ids = torch.tensor([loaded.tokenizer(GGUF_SENTENCE)["input_ids"]])
    with torch.no_grad():
        logits = output_head(loaded.model).logits(final_hidden(loaded.model, input_ids=ids))
    nll = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    limit = math.log(loaded.num_tokens / 10)
    if nll > limit:
        log.warning(
            "model.gguf_file=%s: %.2f nats per token on a plain English sentence (expected below "
            "%.2f): the file may not have been converted rightly",
            loaded.gguf_file, nll.item(), limit,
        )  # fmt: skip
