"""LAMBADA: reading, encoding and scoring, against a scorer that takes one example at a time."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from word_models import MAX_LENGTH, NUM_WORDS, word_model

from superpose.config import LambadaSettings
from superpose.data.lambada import (
    ClozeExample,
    encode,
    encode_examples,
    load_lambada,
    read_lambada,
)
from superpose.decoding import JointContrastive, Raw, TwoHead
from superpose.models.layout import output_head
from superpose.models.loading import LanguageModel
from superpose.suites.continuations import distinct, jaccard
from superpose.suites.lambada import lambada
from superpose.suites.lambada_result import LambadaResult

# ------------------------------------------------------------------------------------ reading


def write(folder: Path, *rows: Any) -> Path:
    file = folder / "cloze.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_both_forms_are_read(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {"text": "He fed the  old\ncat \n"},
        {"text": "two  spaces"},
        {"context": "He fed the", "continuation": "cat"},
        {"context": "He fed the ", "continuation": "cat"},
        {"context": "He fed the", "continuation": " cat", "text": "not this one"},
    )
    assert read_lambada(file) == [
        ClozeExample("He fed the  old", "\ncat"),
        ClozeExample("two ", " spaces"),
        ClozeExample("He fed the", " cat"),
        ClozeExample("He fed the ", "cat"),
        ClozeExample("He fed the", " cat"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"cloze\.jsonl is empty"),
        (b"\n \n", r"cloze\.jsonl is empty"),
        (b'{"text": "a b"}\n\n{"title": "a b"}\n', r"cloze\.jsonl, line 3 has no text.*title"),
        (b'{"text": null}\n', "line 1 has no text"),
        (b'{"context": "a b"}\n', "line 1 has no text"),
        (b'{"text": "a b"}\n{"text": \n', "line 2 is no JSON"),
        (b'["a b"]\n', "line 1 is no JSON object"),
        (b'{"text": "a b"}\n{"text": "caf\xe9 noir"}\n', "line 2 is not UTF-8.*0xe9"),
        (b'{"context": "a b", "continuation": " "}\n', "line 1 has an empty continuation"),
        (b'{"text": "  "}\n', "line 1 has an empty continuation"),
        (b'{"text": "word"}\n', "line 1 has no words before its last one"),
        (b'{"context": "", "continuation": " b"}\n', "line 1 has no words before its last one"),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "cloze.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_lambada(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.jsonl", tmp_path):
        with pytest.raises(ValueError, match=rf"suite\.path={path} is not a file"):
            read_lambada(path)


def test_data_set_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "cloze"
    folder.mkdir()
    (folder / "test.jsonl").write_text('{"text": "He fed the cat"}\n{"text": "We saw it"}\n')
    expected = [ClozeExample("He fed the", " cat"), ClozeExample("We saw", " it")]
    assert load_lambada(str(folder)) == expected
    with pytest.raises(ValueError, match=r"split validation.*suite\.path=FILE"):
        load_lambada(str(folder), split="validation")


def test_hub_out_of_reach_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def out_of_reach(*_: Any, **arguments: Any) -> None:
        assert arguments == {"revision": "v1", "split": "test"}  # above all, no trust_remote_code
        raise ConnectionError("Couldn't reach\nthe hub")

    monkeypatch.setattr(datasets, "load_dataset", out_of_reach)
    with pytest.raises(ValueError, match=r"suite\.dataset=EleutherAI/lambada_openai.*suite\.path"):
        load_lambada("EleutherAI/lambada_openai", revision="v1")


# ----------------------------------------------------------------------------------- encoding


def bpe_tokenizer(
    *merges: tuple[str, str], across_words: bool = False, bos: bool = False, adds_bos: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the given merges; ``Ġ`` is the space."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    vocabulary = {token: index for index, token in enumerate([*tokens, "<s>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=not across_words
    )
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
        )
    special = {"bos_token": "<s>"} if bos or adds_bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece's habits: a mark for each space, one more at the start of the text."""
    vocabulary = {token: index for index, token in enumerate("▁abcehst")}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    "tokenizer",
    [bpe_tokenizer(("Ġ", "c"), ("Ġc", "a")), bpe_tokenizer(adds_bos=True), metaspace_tokenizer()],
    ids=["gpt2-like", "adds BOS", "sentencepiece-like"],
)
def test_target_is_the_word_wherever_the_space_stands(tokenizer: PreTrainedTokenizerFast) -> None:
    expected = encode(tokenizer, ClozeExample("the best", " cat"))
    assert tokenizer.decode(list(expected.target_ids)) == " cat"
    assert expected.context_ids == tuple(tokenizer("the best")["input_ids"])
    assert not expected.border_merge
    assert encode(tokenizer, ClozeExample("the best ", "cat")) == expected
    two_spaces = encode(tokenizer, ClozeExample("the best ", " cat"))
    assert two_spaces.context_ids == expected.context_ids
    assert tokenizer.decode(list(two_spaces.target_ids)) == "  cat"


def test_a_merge_across_the_border_is_cut_by_count() -> None:
    tokenizer = bpe_tokenizer(("t", "Ġ"), across_words=True)
    encoded = encode(tokenizer, ClozeExample("cat", " sat"))
    assert tokenizer.convert_ids_to_tokens(list(encoded.context_ids)) == ["c", "a", "t"]
    assert tokenizer.convert_ids_to_tokens(list(encoded.target_ids)) == ["s", "a", "t"]
    assert encoded.border_merge


def test_a_target_without_tokens_names_its_row() -> None:
    tokenizer = bpe_tokenizer(("a", "b"), across_words=True)
    examples = [ClozeExample("a", " b"), ClozeExample("a", "b")]
    with pytest.raises(ValueError, match="LAMBADA example 2: the continuation 'b' has no token"):
        encode_examples(tokenizer, examples)


@pytest.mark.parametrize(
    ("tokenizer", "add_bos", "count"),
    [
        (bpe_tokenizer(), None, 0),
        (bpe_tokenizer(bos=True), None, 0),
        (bpe_tokenizer(bos=True), True, 1),
        (bpe_tokenizer(adds_bos=True), None, 1),
        (bpe_tokenizer(adds_bos=True), True, 1),
        (bpe_tokenizer(adds_bos=True), False, 0),
    ],
)
@pytest.mark.parametrize("context", ["the best", "<s>the best"])
def test_one_bos_or_none(
    tokenizer: PreTrainedTokenizerFast, add_bos: bool | None, count: int, context: str
) -> None:
    if context.startswith("<s>"):
        if not count:
            return
        assert tokenizer(context, add_special_tokens=False)["input_ids"][0] == (
            tokenizer.bos_token_id
        )
    encoded = encode(tokenizer, ClozeExample(context, " cat"), add_bos=add_bos)
    assert encoded.context_ids.count(tokenizer.convert_tokens_to_ids("<s>")) == count
    assert encoded.num_bos == count
    assert tokenizer.decode(list(encoded.target_ids)) == " cat"


def test_bos_of_a_tokenizer_without_one_is_refused() -> None:
    with pytest.raises(ValueError, match="no BOS token"):
        encode(bpe_tokenizer(), ClozeExample("the", " cat"), add_bos=True)


@pytest.mark.parametrize("excess", [0, 1, 500])
@pytest.mark.parametrize("num_bos", [0, 1])
def test_only_the_left_of_the_context_is_cut(excess: int, num_bos: int) -> None:
    tokenizer = bpe_tokenizer(adds_bos=bool(num_bos))
    context = ("abcdefghij" * 60)[: 20 - 3 - num_bos + excess]  # 4 target tokens, 3 are read
    encoded = encode(tokenizer, ClozeExample(context, " cat"), max_length=20)
    assert encoded.truncated == (excess > 0)
    assert len(encoded.context_ids) + len(encoded.target_ids) - 1 == 20
    assert tokenizer.decode(list(encoded.target_ids)) == " cat"
    assert encoded.context_ids[:num_bos] == (tokenizer.bos_token_id,) * num_bos
    assert context.endswith(str(tokenizer.decode(list(encoded.context_ids[num_bos:]))))
    shorter = encoded.last_context(9)
    assert shorter == encoded.context_ids[:num_bos] + encoded.context_ids[-9 + num_bos :]
    with pytest.raises(ValueError, match="4 tokens but the model only 3 positions"):
        encode(tokenizer, ClozeExample(context, " cat"), max_length=3)


# ------------------------------------------------------------------------------------ scoring


def words(*ids: int) -> str:
    return "".join(f" w{index}" for index in ids)


@torch.no_grad()
def examples_for(model: LanguageModel, count: int = 23, seed: int = 0) -> list[ClozeExample]:
    """Random contexts of 3 to 40 words; every other target of 1 to 3 words is the greedy one."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for row in range(count):
        length = int(torch.randint(3, 41, (), generator=generator))
        ids = torch.randint(NUM_WORDS, (length + row % 3 + 1,), generator=generator).tolist()
        if row % 2:
            for position in range(length, len(ids)):
                logits = model.model(torch.tensor([ids[:position]])).logits[0, -1]
                ids[position] = int(logits[:NUM_WORDS].argmax())
        examples.append(ClozeExample(words(*ids[:length]), words(*ids[length:])))
    return examples


@torch.no_grad()
def brute_force(model: LanguageModel, examples: list[ClozeExample]) -> tuple[float, float]:
    """Accuracy and perplexity, one example at a time, by the definition."""
    correct, log_likelihood = 0, 0.0
    for example in examples:
        whole = model.tokenizer(example.context + example.continuation)["input_ids"]
        start = len(model.tokenizer(example.context)["input_ids"])
        log_probs = model.model(torch.tensor([whole[:-1]])).logits[0].double().log_softmax(dim=-1)
        steps = [(log_probs[i - 1], whole[i]) for i in range(start, len(whole))]
        log_likelihood += sum(float(row[token]) for row, token in steps)
        correct += all(int(row.argmax()) == token for row, token in steps)
    return correct / len(examples), math.exp(-log_likelihood / len(examples))


@torch.no_grad()
def brute_force_mixed(
    model: LanguageModel, examples: list[ClozeExample], num_streams: int, length: int
) -> list[list[int]]:
    """Ranks [stream][group], one group at a time, by sorting."""
    num_groups = len(examples) // num_streams
    ranks: list[list[int]] = [[] for _ in range(num_streams)]
    for group in range(num_groups):
        chosen = [examples[group + n * num_groups] for n in range(num_streams)]
        contexts = [model.tokenizer(example.context)["input_ids"] for example in chosen]
        common = min(length, *map(len, contexts))
        ids = torch.tensor([context[len(context) - common :] for context in contexts])
        mixed = model.model.get_input_embeddings()(ids).mean(dim=0, keepdim=True)
        logits = model.model(inputs_embeds=mixed).logits[0, -1, : model.num_tokens]
        order = logits.argsort(descending=True).tolist()
        for n, example in enumerate(chosen):
            first = model.tokenizer(example.continuation)["input_ids"][0]
            ranks[n].append(order.index(first) + 1)
    return ranks


@torch.no_grad()
def brute_force_words(
    model: LanguageModel, examples: list[ClozeExample], num_streams: int, length: int,
    guide: LanguageModel | None = None, alpha: float = 1.0, beta: float = 1.0,
) -> tuple[list[list[bool]], list[list[bool]]]:  # fmt: skip
    """Whole word and first token right, [group][stream], every step read from the start again."""
    num_groups = len(examples) // num_streams
    ids_of = lambda text: model.tokenizer(text)["input_ids"]  # noqa: E731
    whole, first = [], []
    for group in range(num_groups):
        chosen = [examples[group + n * num_groups] for n in range(num_streams)]
        contexts = [ids_of(example.context) for example in chosen]
        targets = [ids_of(example.continuation) for example in chosen]
        common = min(length, *map(len, contexts))
        read = [context[len(context) - common :] for context in contexts]
        right = [[] for _ in range(num_streams)]
        for step in range(max(map(len, targets))):
            embedded = model.model.get_input_embeddings()(torch.tensor(read))
            large = model.model(inputs_embeds=embedded.mean(0, keepdim=True)).logits[0, -1]
            small = [guide.model(torch.tensor([ids])).logits[0, -1] for ids in read if guide]
            for n in range(num_streams):
                logits = large
                if guide is not None and num_streams > 1:
                    others = sum(small[m] for m in range(num_streams) if m != n)
                    logits = large + alpha * small[n] - beta * others / (num_streams - 1)
                greedy = int(logits[: model.num_tokens].argmax())
                if step < len(targets[n]):
                    right[n].append(greedy == targets[n][step])
                    read[n] = [*read[n], targets[n][step]]
                else:
                    read[n] = [*read[n], greedy]
        whole.append([all(stream) for stream in right])
        first.append([stream[0] for stream in right])
    return whole, first


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return word_model(request.param)


def run(
    model: LanguageModel, examples: list[ClozeExample], num_streams: int = 2, **settings: Any
) -> LambadaResult:
    return lambada(model, examples, LambadaSettings(**{"length": 16, **settings}), num_streams)


@pytest.mark.parametrize("num_streams", [1, 2, 3])
def test_equal_to_brute_force_at_any_batch_size(model: LanguageModel, num_streams: int) -> None:
    examples = examples_for(model)
    accuracy, perplexity = brute_force(model, examples)
    ranks = torch.tensor(brute_force_mixed(model, examples, num_streams, 16)).double()
    assert 0.3 < accuracy < 0.7  # the targets are half greedy, half random
    for batch_size in (1, 3, 8):
        result = run(model, examples, num_streams, batch_size=batch_size)
        metrics = result.metrics()
        assert metrics["lambada.single.accuracy"] == accuracy
        assert metrics["lambada.single.perplexity"] == pytest.approx(perplexity, rel=1e-6)
        medians = ranks.quantile(0.5, dim=1)
        for n in range(num_streams):
            prefix = f"lambada.mixed.stream_{n + 1}"
            assert metrics[f"{prefix}.median_rank"] == medians[n]
            assert metrics[f"{prefix}.first_token_accuracy"] == (ranks[n] == 1).double().mean()
        assert metrics["lambada.mixed.median_rank"] == ranks.flatten().quantile(0.5)
        assert metrics["lambada.mixed.stream_mean.median_rank"] == pytest.approx(
            float(medians.mean())
        )
        assert metrics["lambada.mixed.first_token_accuracy"] == pytest.approx(
            float((ranks == 1).double().mean())
        )
        assert result.counts == {
            "examples": 23,
            "target_tokens": sum(example.continuation.count("w") for example in examples),
            "groups": 23 // num_streams,
            "mixed_examples": 23 // num_streams * num_streams,
            "truncated": 0,
            "mixed_truncated": result.counts["mixed_truncated"],
            "border_merges": 0,
            "ties": 0,
            "mixed_ties": 0,
        }
        assert 0 < result.counts["mixed_truncated"] < 23


@pytest.mark.parametrize("num_streams", [1, 2, 3])
@pytest.mark.parametrize("guided", [False, True])
def test_whole_words_are_those_of_brute_force(
    model: LanguageModel, num_streams: int, guided: bool
) -> None:
    guide = word_model(seed=1) if guided else None
    decoders = [JointContrastive(model, guide, 0.8, 0.6, name="joint") if guide else Raw()]
    examples = examples_for(model)
    # what the mixture wants first, so that some words are right
    for row in range(0, len(examples), 4):
        examples[row] = ClozeExample(examples[row].context, examples[row].continuation[:3].rstrip())
    whole, first = brute_force_words(model, examples, num_streams, 16, guide, 0.8, 0.6)
    settings = LambadaSettings(length=16, continuation_groups=0)
    for batch_size in (1, 3, 8):
        settings.batch_size = batch_size
        score = lambada(model, examples, settings, num_streams, decoders=decoders).mixed
        (of_decoder,) = score.values()
        for n, stream in enumerate(of_decoder.streams):
            assert stream.accuracy == pytest.approx(sum(g[n] for g in whole) / len(whole))
            assert stream.first_token_accuracy == pytest.approx(
                sum(g[n] for g in first) / len(first)
            )
        assert of_decoder.jaccard is None


def test_a_guide_that_knows_the_answers_separates_the_streams() -> None:
    """The backbone knows nothing; the guide is the model whose greedy words are the targets."""
    guide = word_model(seed=2)
    backbone = word_model(seed=3)
    with torch.no_grad():
        backbone.model.lm_head.weight.zero_()
    examples = [example for row, example in enumerate(examples_for(guide)) if row % 2]
    decoder = JointContrastive(backbone, guide, alpha=1.0, beta=0.0)
    settings = LambadaSettings(length=MAX_LENGTH - 8, continuation_tokens=4)
    same = [ClozeExample(e.context[-60:], e.continuation) for e in examples]
    equal = [e for e in same for _ in range(1)]
    result = lambada(backbone, equal[:1] * 2, settings, 2, decoders=[Raw(), decoder])
    assert result.mixed["guided"].all.accuracy == result.guide.accuracy
    assert result.mixed["guided"].jaccard == 1.0  # one text twice
    other = lambada(backbone, examples[:4], settings, 2, decoders=[Raw(), decoder])
    assert other.mixed["guided"].jaccard < 1.0


def test_a_head_for_another_number_of_streams_is_refused() -> None:
    model = word_model()
    decoders = [TwoHead(output_head(model.model), 3)]
    with pytest.raises(ValueError, match="trained for 3 streams; set streams.num_streams=3"):
        lambada(model, examples_for(model), LambadaSettings(length=16), 2, decoders=decoders)


def test_targets_never_run_over_the_position_limit() -> None:
    """A full context in one group, a longer target in another: GPT-2 has no 49th position."""
    model = word_model("gpt2")
    full = ClozeExample(words(*range(MAX_LENGTH)), " w3")
    long_target = ClozeExample(words(1, 2), words(*range(6)))
    settings = LambadaSettings(length=MAX_LENGTH, batch_size=8)
    result = lambada(model, [full, long_target, full, long_target], settings, 2)
    assert result.counts["groups"] == 2


def test_overlap_and_distinct_n() -> None:
    assert jaccard([[1, 2, 3], [3, 4, 3]]) == pytest.approx(1 / 4)
    assert jaccard([[1], [1], [2]]) == pytest.approx(1 / 3)
    assert jaccard([[1, 2]]) is None
    assert distinct([[1, 1, 2], [1, 2]], 1) == pytest.approx(2 / 5)
    assert distinct([[1, 1, 2], [1, 2]], 2) == pytest.approx(2 / 3)
    assert distinct([[1]], 2) is None


@pytest.mark.parametrize("num_streams", [2, 3, 4])
def test_equal_streams_are_the_single_stream(model: LanguageModel, num_streams: int) -> None:
    examples = examples_for(model, count=9)
    result = run(model, examples * num_streams, num_streams, length=MAX_LENGTH)
    assert result.mixed["raw"].streams == (result.single,) * num_streams
    assert result.mixed["raw"].all == result.single
    one = run(model, examples, 1, length=MAX_LENGTH)
    assert one.mixed["raw"].streams == (one.single,)
    assert one.mixed["raw"].jaccard is None


def test_every_target_token_counts(model: LanguageModel) -> None:
    """Greedy but for the last token: the example is wrong, its first token right."""
    good = examples_for(model, count=6)[5]
    assert good.continuation.count("w") == 3
    head, last = good.continuation.rsplit(" ", 1)
    bad = ClozeExample(good.context, f"{head} {'w1' if last == 'w0' else 'w0'}")
    result = run(model, [good, bad])
    assert result.single.accuracy == 0.5
    assert result.single.first_token_accuracy == 1.0


@pytest.mark.parametrize("excess", [1, 500])
def test_contexts_beyond_the_position_limit(model: LanguageModel, excess: int) -> None:
    """Two target tokens, the second is not read: the last 47 words of the context remain."""
    ids = torch.randint(NUM_WORDS, (MAX_LENGTH - 1 + excess,), generator=torch.manual_seed(1))
    full = ClozeExample(words(*ids.tolist()), " w3 w4")
    kept = ClozeExample(words(*ids[-(MAX_LENGTH - 1) :].tolist()), " w3 w4")
    result = run(model, [full, full])
    assert result.counts["truncated"] == 2
    assert result.perplexity == pytest.approx(brute_force(model, [kept])[1], rel=1e-6)
    assert result.perplexity == run(model, [kept, kept]).perplexity


def test_ties_go_to_the_lowest_index_and_are_counted() -> None:
    model = word_model("llama")
    with torch.no_grad():
        model.model.lm_head.weight.zero_()  # all 68 logits are 0
    examples = [ClozeExample(" w5 w6 w7", f" w{target}") for target in (0, 1, 9, 0)]
    result = run(model, examples)
    assert result.single.accuracy == 0.5
    assert result.perplexity == pytest.approx(68.0)
    assert result.single.median_rank == 1.5  # ranks 1, 2, 10, 1
    assert [stream.median_rank for stream in result.mixed["raw"].streams] == [1.5, 5.5]
    assert (result.counts["ties"], result.counts["mixed_ties"]) == (4, 4)


def test_logits_that_no_token_uses_hide_no_rank() -> None:
    """A padded vocabulary: the greedy choice is over all logits, ranks are over real tokens."""
    model = word_model("llama")
    examples = examples_for(model)
    before = run(model, examples)
    with torch.no_grad():  # every unused row beats every word
        model.model.lm_head.weight[NUM_WORDS + 1 :] = model.model.lm_head.weight[:7] * 100
    after = run(model, examples)
    assert after.mixed == before.mixed
    assert after.single.median_rank == before.single.median_rank
    assert after.single.accuracy < before.single.accuracy


def test_summary_and_progress(model: LanguageModel) -> None:
    seen: list[tuple[str, int, int]] = []

    def record(batches: Any, description: str, total: int) -> Any:
        items = list(batches)
        seen.append((description, total, len(items)))
        return items

    examples = examples_for(model, count=9)
    settings = LambadaSettings(length=16, limit=7, batch_size=2, continuation_tokens=5)
    decoders = (Raw(), JointContrastive(model, word_model(seed=1)))
    result = lambada(model, examples, settings, 2, record, decoders)
    assert seen == [
        ("lambada, single", 4, 4), ("lambada, 2 mixed, raw", 2, 2),
        ("lambada, 2 mixed, guided", 2, 2), ("lambada, guide", 4, 4),
    ]  # fmt: skip
    (rows,) = result.tables().values()
    mixed = ["stream 1", "stream 2", "mean of streams", "all"]
    assert [row["reading"] for row in rows] == [
        "single", "single, guide", *(f"mixed, {part}" for part in mixed),
        *(f"mixed, guided, {part}" for part in mixed),
    ]  # fmt: skip
    assert [row["examples"] for row in rows] == [7, 7, 3, 3, 6, 6, 3, 3, 6, 6]
    assert rows[0]["accuracy"] == result.single.accuracy
    assert [row["jaccard"] for row in rows if row["reading"] == "mixed, all"] == [1.0]
    assert 0 <= rows[-1]["jaccard"] < 1
    metrics = result.metrics()
    assert metrics["lambada.guided.jaccard"] == rows[-1]["jaccard"]
    assert metrics["lambada.guide.accuracy"] == rows[1]["accuracy"]
    json.dumps([result.metrics(), rows, result.counts], allow_nan=False)


@pytest.mark.parametrize(
    ("settings", "num_streams", "message"),
    [
        ({"limit": 0}, 2, r"suite\.limit must be at least 1, got 0"),
        ({"batch_size": 0}, 2, r"suite\.batch_size must be at least 1, got 0"),
        ({"length": 0}, 2, r"suite\.length must be at least 1, got 0"),
        ({"length": MAX_LENGTH + 1}, 2, r"suite\.length=49 is above the 48 positions"),
        ({}, 0, r"streams\.num_streams must be at least 1, got 0"),
        ({"limit": 2}, 3, r"streams\.num_streams=3 needs at least 3 LAMBADA examples, got 2"),
    ],
)
def test_bad_settings_name_the_key(
    settings: dict[str, int], num_streams: int, message: str
) -> None:
    examples = [ClozeExample(" w1 w2", " w3")] * 4
    with pytest.raises(ValueError, match=message):
        run(word_model(), examples, num_streams, **settings)


def test_outputs_that_are_not_finite_are_refused() -> None:
    model = word_model()
    with torch.no_grad():
        model.model.model.norm.weight.fill_(math.nan)
    with pytest.raises(ValueError, match=r"NaN|not finite"):
        run(model, [ClozeExample(" w1 w2", " w3")] * 2)
