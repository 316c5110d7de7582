"""suite=attention_patching against a plain reading of a Llama, and limits with known answers."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from superpose.config import AttentionPatchingSettings, PatchedLambadaSettings
from superpose.data.lambada import ClozeExample
from superpose.data.token_kinds import is_content
from superpose.interventions.attention import permute_rows
from superpose.models.loading import LanguageModel
from superpose.streams.batch import StreamBatch
from superpose.suites.attention_patching import attention_patching

WORDS = [
    *"the of and to in she he it is was that with not which . , 7 12 s t".split(),
    *("".join(pair) for pair in itertools.product("b d f g k l m n".split(), "ark ole est unt".split())),
    "<unk>",
]  # fmt: skip
VOCABULARY, LENGTH, NUM_GROUPS = len(WORDS) + 5, 7, 4  # logits wider than the tokenizer
NO_LAMBADA = PatchedLambadaSettings(examples=0, length=16)
SETTINGS = AttentionPatchingSettings(limit=None, batch_size=2, seed=5, lambada=NO_LAMBADA)


def tiny_llama(seed: int) -> LanguageModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        initializer_range=0.3,  # logits far from uniform
    )
    words = Tokenizer(WordLevel({w: index for index, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    return LanguageModel(LlamaForCausalLM(config).eval(), tokenizer, f"llama-{seed}")


@pytest.fixture(scope="module")
def base() -> LanguageModel:
    return tiny_llama(0)


@pytest.fixture(scope="module")
def checkpoint() -> LanguageModel:
    return tiny_llama(1)


def batches(size: int = 2, texts: int = 3) -> list[StreamBatch]:
    """Groups of random words; in one group the donor is short, in another the third text."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(WORDS), (NUM_GROUPS, texts, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 1, 5:] = 0
    mask[2, -1, 3:] = 0
    return [
        StreamBatch.uniform(some, its)
        for some, its in zip(ids.split(size), mask.split(size), strict=True)
    ]


# --- an independent reference: one text at a time, the Llama written out


def read(model: LanguageModel, embedded: Tensor, use=None) -> tuple[np.ndarray, list[Tensor]]:
    """Logits and weights of a pass over ``embedded (T, D)``; ``use(layer, own)`` changes weights."""
    llama = model.model.model
    hidden, recorded = embedded[None], []
    length = hidden.shape[1]
    cos, sin = llama.rotary_emb(hidden, torch.arange(length)[None])
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    for layer_index, block in enumerate(llama.layers):
        attention, x = block.self_attn, block.input_layernorm(hidden)
        q = attention.q_proj(x).view(1, length, 4, 8).transpose(1, 2)
        k = attention.k_proj(x).view(1, length, 2, 8).transpose(1, 2)
        v = attention.v_proj(x).view(1, length, 2, 8).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        heads = []
        for head in range(4):
            scores = (q[0, head] @ k[0, head // 2].T / math.sqrt(8)).masked_fill(future, -math.inf)
            heads.append(scores.softmax(dim=-1))
        weights = torch.stack(heads)[None]
        if use is not None:
            weights = use(layer_index, weights)
        recorded.append(weights)
        mixed = torch.cat([weights[0, head] @ v[0, head // 2] for head in range(4)], dim=-1)
        hidden = hidden + attention.o_proj(mixed[None])
        hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
    return model.model.lm_head(llama.norm(hidden))[0].double().numpy(), recorded


def embedded(model: LanguageModel, ids: Tensor) -> Tensor:
    return model.model.get_input_embeddings()(ids)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    scaled = logits / 1.5
    return scaled - scaled.max() - math.log(np.exp(scaled - scaled.max()).sum())


def kl(log_p: np.ndarray, log_q: np.ndarray) -> float:
    return float((np.exp(log_p) * (log_p - log_q)).sum())


def rank(logits: np.ndarray, token: int) -> int:
    return 1 + sum(1 for value in logits[: len(WORDS)] if value > logits[token])


@torch.no_grad()
def reference(base: LanguageModel, other: LanguageModel) -> tuple[dict, dict]:
    """Every metric in plain loops, and the number of content positions."""
    rows: dict[str, list] = {}
    unrelated, kinds = [], []
    for index, batch in enumerate(batches(1)):
        a, c, third = batch.input_ids[0]
        vanilla, _ = read(base, embedded(base, a))
        apart, _ = read(base, embedded(base, third))
        _, donor = read(base, embedded(base, c))
        seeded = [torch.Generator().manual_seed(5 * 1_000_003 + index)]
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        passes = {
            "mixing": read(base, (embedded(base, a) + embedded(base, c)) / 2),
            "donor": read(base, embedded(base, a), lambda layer, own, given=donor: given[layer]),
            "permutation": read(
                base,
                embedded(base, a),
                lambda layer, own, seeded=seeded, causal=causal: permute_rows(own, causal, seeded),
            ),
            "mixing_checkpoint": read(other, (embedded(other, a) + embedded(other, c)) / 2),
        }
        for t in range(LENGTH):
            if not batch.attention_mask[0, :, t].all():
                continue
            token = int(vanilla[t, : len(WORDS)].argmax())
            kinds.append(WORDS[token] != "<unk>" and is_content(" " + WORDS[token]))
            unrelated.append(kl(log_softmax(vanilla[t]), log_softmax(apart[t])))
            for name, (logits, _) in passes.items():
                distance = kl(log_softmax(vanilla[t]), log_softmax(logits[t]))
                rows.setdefault(name, []).append((rank(logits[t], token), distance))
    content = np.array(kinds)
    found = {"share.content": content.mean(), "share.predictable": 1 - content.mean(),
             "unrelated_kl_nats": np.mean(unrelated)}  # fmt: skip
    for name, values in rows.items():
        ranks, distances = (np.array(column) for column in zip(*values, strict=True))
        for kind, chosen in (("content", content), ("predictable", ~content)):
            found[f"{name}.{kind}.median_rank"] = np.median(ranks[chosen])
            found[f"{name}.{kind}.top_1"] = np.mean(ranks[chosen] == 1)
        found[f"{name}.all.median_rank"] = np.median(ranks)
        found[f"{name}.all.top_1"] = np.mean(ranks == 1)
        found[f"{name}.all.top_10"] = np.mean(ranks <= 10)
        found[f"{name}.all.kl_nats"] = distances.mean()
        found[f"{name}.all.kl_ratio"] = distances.mean() / np.mean(unrelated)
    counts = {"groups": NUM_GROUPS, "positions": len(content), "content_positions": content.sum()}
    return {f"attention_patching.{name}": value for name, value in found.items()}, counts


def test_equals_plain_loops(base, checkpoint):
    result = attention_patching({"base": base, "checkpoint": checkpoint}, batches(), SETTINGS)
    expected, counts = reference(base, checkpoint)
    assert result.metrics() == pytest.approx(expected, rel=2e-5)
    assert set(result.metrics()) == set(expected)
    assert result.counts() == counts | {"lambada_examples": 0, "lambada_truncated": 0}
    assert counts["positions"] == 7 + 5 + 3 + 7
    assert 0 < counts["content_positions"] < counts["positions"]
    alone = attention_patching({"base": base}, batches(), SETTINGS).metrics()
    assert alone == {
        key: value for key, value in result.metrics().items() if "_checkpoint" not in key
    }


def test_tables_hold_the_metrics(base, checkpoint):
    result = attention_patching({"base": base, "checkpoint": checkpoint}, batches(), SETTINGS)
    ranks, aggregate = result.tables().values()
    setups = ["mixing", "donor", "permutation", "mixing_checkpoint"]
    assert [row["setup"] for row in ranks] == [row["setup"] for row in aggregate] == setups
    name = "attention_patching.donor.content.median_rank"
    assert ranks[1]["content.median_rank"] == result.metrics()[name]
    assert aggregate[2]["kl_ratio_standard_error"] > 0


def test_result_does_not_depend_on_the_batch_size_and_repeats(base):
    results = []
    for size in (1, 2, 4, 4):
        settings = dataclasses.replace(SETTINGS, batch_size=size)
        results.append(attention_patching({"base": base}, batches(size), settings).metrics())
    for found in results[:-1]:
        assert found == pytest.approx(results[-1], rel=1e-5)
    assert results[-1] == results[-2]
    other = dataclasses.replace(SETTINGS, seed=6)
    name = "attention_patching.permutation.all.kl_nats"
    assert attention_patching({"base": base}, batches(), other).metrics()[name] != results[0][name]


def test_a_text_as_its_own_donor_keeps_everything(base):
    same = [StreamBatch.uniform(batch.input_ids[:, [0, 0, 2]]) for batch in batches()]
    metrics = attention_patching({"base": base}, same, SETTINGS).metrics()
    for setup in ("mixing", "donor"):
        assert metrics[f"attention_patching.{setup}.all.top_1"] == 1.0
        assert metrics[f"attention_patching.{setup}.all.kl_nats"] == pytest.approx(0, abs=1e-5)
    assert metrics["attention_patching.permutation.all.kl_nats"] > 0.01


# --- LAMBADA

CONTEXTS = [
    "the bark of dole", "fole and gest to kark", "she is lole", "munt , nark of the bole",
    "he was dest", "it is not gole , which funt",
]  # fmt: skip
EXAMPLES = [
    ClozeExample(context, f" {word}")
    for context, word in zip(CONTEXTS, "kole lest mark bunt dark fest".split(), strict=True)
]


@torch.no_grad()
def lambada_reference(base: LanguageModel, other: LanguageModel, length: int) -> dict:
    encoded = [
        (base.tokenizer(e.context)["input_ids"], base.tokenizer(e.continuation)["input_ids"][0])
        for e in EXAMPLES
    ]
    encoded.sort(key=lambda pair: -len(pair[0]))
    ranks: dict[str, list[int]] = {}
    for index, (ids, target) in enumerate(encoded):
        partner = encoded[index + 1 if index % 2 == 0 else index - 1][0]
        cut = min(len(ids), len(partner), length)
        own, others = torch.tensor(ids[-cut:]), torch.tensor(partner[-cut:])
        _, donor = read(base, embedded(base, others))
        logits = {
            "vanilla": read(base, embedded(base, own))[0],
            "donor": read(base, embedded(base, own), lambda i, _, given=donor: given[i])[0],
            "mixing": read(base, (embedded(base, own) + embedded(base, others)) / 2)[0],
            "mixing_checkpoint": read(other, (embedded(other, own) + embedded(other, others)) / 2)[
                0
            ],
        }
        for name, found in logits.items():
            ranks.setdefault(name, []).append(rank(found[-1], target))
    return {
        f"attention_patching.lambada.{name}.{key}": value
        for name, found in ranks.items()
        for key, value in (
            ("first_token_accuracy", np.mean(np.array(found) == 1)),
            ("median_rank", np.median(found)),
        )
    }


@pytest.mark.parametrize(("length", "truncated"), [(16, 2), (4, 3)])
def test_lambada_equals_plain_loops(base, checkpoint, length, truncated):
    models = {"base": base, "checkpoint": checkpoint}
    for size in (1, 8):
        settings = dataclasses.replace(
            SETTINGS, batch_size=size, lambada=PatchedLambadaSettings(6, length)
        )
        result = attention_patching(models, batches(), settings, EXAMPLES)
        found = {key: value for key, value in result.metrics().items() if ".lambada." in key}
        assert found == pytest.approx(lambada_reference(base, checkpoint, length))
        assert result.counts()["lambada_examples"] == 6
        assert result.counts()["lambada_truncated"] == truncated
        rows = result.tables()["attention_patching.lambada"]
        assert [row["reading"] for row in rows] == [
            "vanilla",
            "donor",
            "mixing",
            "mixing_checkpoint",
        ]


def test_lambada_takes_an_even_number_of_the_first_examples(base):
    settings = dataclasses.replace(SETTINGS, lambada=PatchedLambadaSettings(5, 16))
    result = attention_patching({"base": base}, batches(), settings, EXAMPLES)
    assert result.counts()["lambada_examples"] == 4


# --- bad input


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"limit": 0}, "suite.limit must be at least 1, got 0"),
        ({"batch_size": 0}, "suite.batch_size must be at least 1, got 0"),
        ({"temperature": 0.0}, "suite.temperature must be above 0, got 0.0"),
        ({"lambada": PatchedLambadaSettings(examples=1)}, "suite.lambada.examples must be at least 2"),
        ({"lambada": PatchedLambadaSettings(length=0)}, "suite.lambada.length must be at least 1"),
        ({"lambada": PatchedLambadaSettings(length=33)}, "suite.lambada.length=33 is above the 32"),
    ],
)  # fmt: skip
def test_impossible_settings(base, changed, message):
    settings = dataclasses.replace(SETTINGS, **changed)
    with pytest.raises(ValueError, match=message):
        attention_patching({"base": base}, batches(), settings)


def test_bad_input(base):
    with pytest.raises(ValueError, match=r"groups of 3 texts .*, got 2"):
        attention_patching({"base": base}, batches(texts=2), SETTINGS)
    with pytest.raises(ValueError, match="found no position to measure in 0 groups of 3 texts"):
        attention_patching({"base": base}, [], SETTINGS)
    settings = dataclasses.replace(SETTINGS, lambada=PatchedLambadaSettings(6, 16))
    with pytest.raises(ValueError, match="suite.lambada needs at least 2 examples"):
        attention_patching({"base": base}, batches(), settings, EXAMPLES[:1])
    other = tiny_llama(2)
    other.model.resize_token_embeddings(VOCABULARY + 8)
    with pytest.raises(ValueError, match="models of one vocabulary, got logits of 58 and 66"):
        attention_patching({"base": base, "other": other}, batches(), SETTINGS)


def test_an_architecture_that_cannot_be_patched(base):
    config = AutoConfig.for_model("bloom", hidden_size=16, n_layer=1, n_head=2, vocab_size=60)
    bloom = LanguageModel(
        AutoModelForCausalLM.from_config(config).eval(), base.tokenizer, "b/bloom"
    )
    with pytest.raises(ValueError, match="model.path=b/bloom: the attention of a 'bloom' model"):
        attention_patching({"base": bloom}, batches(), SETTINGS)
