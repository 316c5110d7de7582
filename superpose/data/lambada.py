"""LAMBADA and data in its form: a passage and the last word that only the passage gives away."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from superpose.data.blocks import leading_bos

FORMS = '{"text"} or {"context", "continuation"}'


@dataclass(frozen=True)
class ClozeExample:
    """A context and the word to predict.

    Attributes:
        context: the passage without its last word.
        continuation: the last word with the white space before it.
    """

    context: str
    continuation: str


@dataclass(frozen=True)
class EncodedExample:
    """Token ids of a cloze example.

    Attributes:
        context_ids: what the model reads, BOS included where there is one; never empty.
        target_ids: what it has to predict; never empty.
        num_bos: leading BOS tokens of the context, 0 or 1.
        truncated: tokens were dropped from the left of the context to respect the position limit.
        border_merge: the tokens of the context are no prefix of the tokens of the whole text.
    """

    context_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    num_bos: int = 0
    truncated: bool = False
    border_merge: bool = False

    def last_context(self, length: int) -> tuple[int, ...]:
        """The last ``length`` (at least 1) tokens of the context, BOS kept in front."""
        return _drop_left(self.context_ids, length, self.num_bos)


def read_lambada(path: str | Path, key: str = "suite.path") -> list[ClozeExample]:
    """Read cloze examples from a local .jsonl file, one JSON object a line.

    A line is ``{"text"}``, split before its last word, or ``{"context", "continuation"}``. Empty
    lines are skipped.

    Args:
        path: the file.
        key: of the config that names it, for errors.

    Raises:
        ValueError: one sentence with file and line number - for a missing, empty or non-UTF-8 file,
            bad JSON, a line without text, an empty continuation or an empty context.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(
            f"{key}={path} is not a file; give a .jsonl file with one {FORMS} a line, "
            "or leave it out to read suite.dataset from the hub"
        )
    examples = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                examples.append(
                    _example(_parse(line, f"{key}={path}, line {number}"), path, number)
                )
    if not examples:
        raise ValueError(f"{key}={path} is empty; expected one {FORMS} a line")
    return examples


def load_lambada(
    dataset: str, revision: str | None = None, split: str = "test"
) -> list[ClozeExample]:
    """Read cloze examples from the hub or from a local data set folder.

    Args:
        dataset: hub id (``EleutherAI/lambada_openai`` is OpenAI's detokenised text,
            ``cimec/lambada`` the original one) or folder; no script of it is ever run.
        revision: hub revision, None for the main branch.
        split: name of the split.

    Raises:
        ValueError: one sentence naming the way out if it cannot be read or has no text.
    """
    import datasets  # here, because importing it takes a second

    try:
        rows = datasets.load_dataset(dataset, revision=revision, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"suite.dataset={dataset} (split {split}, revision {revision or 'default'}) could not "
            f"be read: {reason[:300]}; without network give a local .jsonl file with "
            f"suite.path=FILE, one {FORMS} a line"
        ) from error
    examples = [_example(row, dataset, number) for number, row in enumerate(rows, start=1)]
    if not examples:
        raise ValueError(f"suite.dataset={dataset} has no rows in its split {split}")
    return examples


def encode(
    tokenizer: PreTrainedTokenizerBase,
    example: ClozeExample,
    max_length: int | None = None,
    add_bos: bool | None = None,
) -> EncodedExample:
    """Token ids of a context and its target, parted as lm-eval parts them.

    White space at the end of the context moves to the target; the whole text is encoded and cut
    after as many tokens as the context alone has, so that the target gets the tokens it has in
    running text. Where a token spans the border the context's own tokens are read, and the target
    is what the whole text has behind the cut; such examples are marked ``border_merge``.

    Args:
        tokenizer: the model's tokenizer.
        example: context and word.
        max_length: position limit; tokens are dropped from the left of the context, BOS and the
            target stay. The last target token is predicted, not read, and needs no position.
        add_bos: None follows the tokenizer's own habit, as training does; never gives two.

    Raises:
        ValueError: if the target or the context gets no token, if the target alone exceeds the
            limit, or if BOS is asked of a tokenizer without one.
    """
    return _encode(tokenizer, example, max_length, _bos(tokenizer, add_bos))


def encode_examples(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[ClozeExample],
    max_length: int | None = None,
    add_bos: bool | None = None,
) -> list[EncodedExample]:
    """:func:`encode` for many examples; errors name the row, counted from 1."""
    bos = _bos(tokenizer, add_bos)
    encoded = []
    for row, example in enumerate(examples, start=1):
        try:
            encoded.append(_encode(tokenizer, example, max_length, bos))
        except ValueError as error:
            raise ValueError(f"LAMBADA example {row}: {error}") from None
    return encoded


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    example: ClozeExample,
    max_length: int | None,
    bos: Sequence[int],
) -> EncodedExample:
    context = example.context.rstrip()
    whole_ids = _ids(tokenizer, example.context + example.continuation)
    own_ids = _ids(tokenizer, context)
    target_ids = whole_ids[len(own_ids) :]
    if not target_ids:
        raise ValueError(
            f"the continuation {example.continuation!r} has no token of its own with this "
            "tokenizer; remove the example or begin the continuation with a space"
        )
    border_merge = whole_ids[: len(own_ids)] != own_ids
    context_ids = own_ids if own_ids[:1] == tuple(bos) else (*bos, *own_ids)
    if not context_ids:
        raise ValueError("the context is empty, so nothing predicts the continuation; remove it")
    room = len(context_ids) if max_length is None else max_length - len(target_ids) + 1
    if room < 1:
        raise ValueError(
            f"the continuation has {len(target_ids)} tokens but the model only {max_length} "
            "positions; remove the example"
        )
    kept = _drop_left(context_ids, room, len(bos))
    truncated = len(kept) < len(context_ids)
    return EncodedExample(kept, target_ids, len(bos), truncated, border_merge)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    # verbose=False: a text above the model's limit is fine, it is truncated on the left
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _bos(tokenizer: PreTrainedTokenizerBase, add_bos: bool | None) -> list[int]:
    if add_bos is None:
        return leading_bos(tokenizer)
    if not add_bos:
        return []
    if tokenizer.bos_token_id is None:
        raise ValueError("add_bos=True, but this tokenizer has no BOS token; use False or None")
    return [tokenizer.bos_token_id]


def _drop_left(ids: tuple[int, ...], length: int, num_kept: int) -> tuple[int, ...]:
    """The first ``num_kept`` ids and the last ones, ``length`` in all."""
    if len(ids) <= length:
        return ids
    return ids[:num_kept] + ids[len(ids) - (length - num_kept) :]


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8 (byte {error.object[error.start]:#x}); "
            "convert the file, for example with iconv -f latin1 -t utf-8"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON: {error}; expected {FORMS}") from None


def _example(row: Any, source: str | Path, number: int) -> ClozeExample:
    """A row of a file or data set as a cloze example; errors name source and line."""
    where = f"LAMBADA data {source}, line {number}"
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is no JSON object; expected {FORMS}")
    if _has_text(row, ("context", "continuation")):
        context, continuation = row["context"], row["continuation"]
        # Words are parted by a space in running text; lm-eval joins the two with one as well.
        if not (continuation[:1].isspace() or context[-1:].isspace()):
            continuation = " " + continuation
    elif _has_text(row, ("text",)):
        context, continuation = _split_last_word(row["text"])
    else:
        raise ValueError(f"{where} has no text; expected {FORMS}, got keys {sorted(map(str, row))}")
    if not continuation.strip():
        raise ValueError(f"{where} has an empty continuation; expected a word to predict")
    if not context.strip():
        raise ValueError(f"{where} has no words before its last one; expected a context")
    return ClozeExample(context, continuation)


def _has_text(row: Mapping[str, Any], keys: Iterable[str]) -> bool:
    return all(isinstance(row.get(key), str) for key in keys)


def _split_last_word(text: str) -> tuple[str, str]:
    """Cut before the white space character that precedes the last word."""
    stripped = text.rstrip()
    words = stripped.split()
    start = len(stripped) - len(words[-1]) if words else 0
    cut = max(start - 1, 0)
    return stripped[:cut], stripped[cut:]
