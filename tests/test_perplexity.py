"""Single-stream NLL and perplexity, against one text at a time and a number known beforehand."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from word_models import MAX_LENGTH, NUM_LOGITS, NUM_WORDS, word_model

from superpose.config import PerplexitySettings
from superpose.models.loading import LanguageModel
from superpose.streams.batch import StreamBatch
from superpose.suites import perplexity as perplexity_module
from superpose.suites.perplexity import PerplexityResult, perplexity


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return word_model(request.param)


def blocks_of(*lengths: tuple[int, ...], width: int = 20, pad: int = 3) -> list[StreamBatch]:
    """One batch (1, N, T) for each tuple of N lengths; padding is an ordinary word."""
    generator = torch.Generator().manual_seed(0)
    blocks = []
    for row in lengths:
        ids = torch.randint(NUM_WORDS, (1, len(row), width), generator=generator)
        mask = (torch.arange(width) < torch.tensor(row)[:, None]).long()[None]
        blocks.append(StreamBatch.uniform(torch.where(mask == 1, ids, pad), mask))
    return blocks


LENGTHS = ((20, 7), (12, 20), (2, 9), (20, 20))


@torch.no_grad()
def brute_force(model: LanguageModel, blocks: list[StreamBatch]) -> list[list[float]]:
    """Nats of every predicted token, text by text."""
    nats = []
    for block in blocks:
        for ids, mask in zip(block.input_ids[0], block.attention_mask[0], strict=True):
            text = ids[: int(mask.sum())]
            log_probs = model.model(text[None]).logits[0].double().log_softmax(dim=-1)
            nats.append([-float(log_probs[i - 1, text[i]]) for i in range(1, len(text))])
    return nats


def run(model: LanguageModel, blocks: Any, **settings: Any) -> PerplexityResult:
    return perplexity(model, blocks, PerplexitySettings(**settings))


@pytest.mark.parametrize("chunk", [5, 256])
def test_equal_to_brute_force_at_any_batch_size(
    model: LanguageModel, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity_module, "_CHUNK", chunk)
    blocks = blocks_of(*LENGTHS)
    nats = brute_force(model, blocks)
    tokens = [token for text in nats for token in text]
    for batch_size in (1, 3, 8):
        result = run(model, blocks, batch_size=batch_size)
        assert result.counts == {"texts": 8, "tokens": len(tokens), "skipped": 0}
        assert result.nll_nats == pytest.approx(np.mean(tokens), rel=1e-6)
        assert result.ppl == pytest.approx(math.exp(np.mean(tokens)), rel=1e-5)


def test_standard_error_is_that_of_the_mean_for_texts_of_one_length(model: LanguageModel) -> None:
    blocks = blocks_of((20, 20, 20), (20, 20, 20))
    means = [np.mean(text) for text in brute_force(model, blocks)]
    result = run(model, blocks)
    assert result.standard_error_nats == pytest.approx(np.std(means, ddof=1) / math.sqrt(6))
    single = run(model, blocks, limit=1)
    assert single.standard_error_nats is None
    assert set(single.metrics()) == {"perplexity.nll_nats", "perplexity.ppl"}


def test_what_stands_in_the_padding_does_not_matter(model: LanguageModel) -> None:
    results = [run(model, blocks_of(*LENGTHS, pad=pad)) for pad in (3, 60)]
    assert results[0] == results[1]


def test_no_opinion_is_the_size_of_the_vocabulary() -> None:
    model = word_model("llama")
    with torch.no_grad():
        model.model.lm_head.weight.zero_()
    result = run(model, blocks_of(*LENGTHS))
    assert result.ppl == pytest.approx(NUM_LOGITS, rel=1e-6)
    assert result.metrics()["perplexity.standard_error_nats"] == pytest.approx(0, abs=1e-6)
    assert result.tables()["perplexity.summary"][0]["tokens"] == result.counts["tokens"]


def test_limit_reads_no_further(model: LanguageModel) -> None:
    def endless() -> Iterator[StreamBatch]:
        while True:
            yield from blocks_of((20,), (7,))

    result = run(model, endless(), limit=3)
    assert result.counts == {"texts": 3, "tokens": 19 + 6 + 19, "skipped": 0}


def test_weights_are_ignored_and_texts_of_one_token_skipped(model: LanguageModel) -> None:
    (block,) = blocks_of((20, 1, 12))
    one_hot = StreamBatch(block.input_ids, block.attention_mask, torch.tensor([[0.0, 0.0, 1.0]]))
    assert run(model, [one_hot]) == run(model, [block])
    assert run(model, [block]).counts == {"texts": 2, "tokens": 30, "skipped": 1}


def test_bad_input_is_one_sentence(model: LanguageModel) -> None:
    blocks = blocks_of(*LENGTHS)
    for settings, message in (
        ({"limit": 0}, r"suite\.limit must be at least 1, got 0"),
        ({"batch_size": 0}, r"suite\.batch_size must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            run(model, blocks, **settings)
    for nothing in ([], blocks_of((1, 1))):
        with pytest.raises(ValueError, match="no text of two tokens"):
            run(model, nothing)
    too_long = blocks_of((MAX_LENGTH + 1,), width=MAX_LENGTH + 1)
    with pytest.raises(ValueError, match=r"data\.length=49 is above the 48 positions"):
        run(model, too_long)
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.fill_(math.nan)
    with pytest.raises(ValueError, match="not finite"):
        run(model, blocks)
