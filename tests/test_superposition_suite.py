"""suite=superposition against plain loops in float64, and against limits with known answers."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from superpose.config import SuperpositionSettings
from superpose.losses.superposition import measure_mixture, measure_row, measure_streams
from superpose.models.loading import LanguageModel
from superpose.streams.batch import StreamBatch
from superpose.suites.statistics import (
    GroupSums,
    PositionMoments,
    RankHistogram,
    ratio_of_sums,
)
from superpose.suites.superposition import superposition
from superpose.suites.superposition_result import TOP_K, curve_ranks

NUM_TOKENS, VOCABULARY, LENGTH, NUM_GROUPS = 101, 108, 6, 5  # logits wider than the tokenizer
NUM_PREDICTABLE = 40
SETTINGS = SuperpositionSettings(limit=None, batch_size=2, top_k=5, wasserstein_positions=None)


def tiny_llama(seed: int) -> LanguageModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.3,  # logits far from uniform
    )
    # ids below 40 are predictable (the numbers are no words), the others content
    words = {str(index) if index < NUM_PREDICTABLE else "w" * (index - 30): index
             for index in range(NUM_TOKENS)}  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), unk_token="0"
    )
    return LanguageModel(LlamaForCausalLM(config).eval(), tokenizer, f"llama-{seed}")


@pytest.fixture(scope="module")
def base() -> LanguageModel:
    return tiny_llama(0)


@pytest.fixture(scope="module")
def checkpoint() -> LanguageModel:
    return tiny_llama(1)


def batch_of(num_streams: int, seed: int = 0) -> StreamBatch:
    """Groups of random tokens; one with a short stream, one with a stream of a single token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(NUM_TOKENS, (NUM_GROUPS, num_streams, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -1, 4:] = 0
    mask[2, 0, 1:] = 0
    return StreamBatch.uniform(ids, mask)


def split(batch: StreamBatch, size: int) -> list[StreamBatch]:
    tensors = (batch.input_ids, batch.attention_mask, batch.weights)
    return [
        StreamBatch(*parts)
        for parts in zip(*(tensor.split(size) for tensor in tensors), strict=True)
    ]


# --- an independent reference: loops over groups, positions, streams and tokens in float64


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    scaled = logits / temperature
    exponentials = np.exp(scaled - scaled.max())
    return exponentials / exponentials.sum()


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def js(p: np.ndarray, q: np.ndarray) -> float:
    mean = (p + q) / 2
    return (kl(p, mean) + kl(q, mean)) / 2


def wasserstein(p: np.ndarray, q: np.ndarray, table: np.ndarray, top_k: int) -> float:
    top_p, top_q = np.argsort(-p)[:top_k], np.argsort(-q)[:top_k]
    rows = table / np.linalg.norm(table, axis=1, keepdims=True)
    cost = 1 - rows[top_p] @ rows[top_q].T
    equal = [np.kron(np.eye(top_k), np.ones(top_k)), np.kron(np.ones(top_k), np.eye(top_k))]
    masses = [p[top_p] / p[top_p].sum(), q[top_q] / q[top_q].sum()]
    return float(linprog(cost.ravel(), A_eq=np.vstack(equal), b_eq=np.concatenate(masses)).fun)


def rank(logits: np.ndarray, token: int) -> int:
    return 1 + sum(1 for value in logits[:NUM_TOKENS] if value > logits[token])


def logits_of(model: LanguageModel, **inputs: Tensor) -> np.ndarray:
    with torch.no_grad():
        return model.model(**inputs).logits[0].double().numpy()


def reference_measures(base: LanguageModel, other: LanguageModel, batch: StreamBatch) -> dict:
    table = base.model.get_input_embeddings().weight.detach().double().numpy()
    found: dict[str, Any] = {name: [] for name in (
        "kl", "kl1", "js", "w", "tvd", "pair_kl", "pair_js", "pair_w", "rank", "truth", "control",
        "overlap", "confidence", "content",
    )}  # fmt: skip
    by_position: dict[int, list[float]] = {}
    for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True):
        singles = [logits_of(base, input_ids=row[None]) for row in ids]
        mixed_input = other.model.get_input_embeddings()(ids).mean(dim=0)[None]
        mixed = logits_of(other, inputs_embeds=mixed_input)
        valid = mask.bool().all(dim=0).tolist()
        for t in range(LENGTH):
            if not valid[t]:
                continue
            smooth = [softmax(single[t], 1.5) for single in singles]
            plain = [softmax(single[t]) for single in singles]
            target, mix = np.mean(plain, axis=0), softmax(mixed[t])
            found["kl"].append(kl(np.mean(smooth, axis=0), softmax(mixed[t], 1.5)))
            found["js"].append(js(np.mean(smooth, axis=0), softmax(mixed[t], 1.5)))
            found["kl1"].append(kl(target, mix))
            found["w"].append(wasserstein(target, mix, table, SETTINGS.top_k))
            found["tvd"].append(np.abs(target - mix).sum() / 2)
            by_position.setdefault(t, []).append(found["tvd"][-1])
            for n, m in itertools.permutations(range(len(singles)), 2):
                found["pair_kl"].append(kl(smooth[n], smooth[m]))
                found["pair_js"].append(js(smooth[n], smooth[m]))
                found["pair_w"].append(wasserstein(plain[n], plain[m], table, SETTINGS.top_k))
                if t + 1 < LENGTH and valid[t + 1]:
                    found["control"].append(rank(singles[n][t], int(ids[m, t + 1])))
                    found["overlap"].append(int(ids[n, t + 1] == ids[m, t + 1]))
            for n, single in enumerate(singles):
                token = int(single[t, :NUM_TOKENS].argmax())
                found["rank"].append(rank(mixed[t], token))
                found["confidence"].append(plain[n][token])
                found["content"].append(token >= NUM_PREDICTABLE)
                if t + 1 < LENGTH and valid[t + 1]:
                    found["truth"].append(rank(mixed[t], int(ids[n, t + 1])))
    return found | {"by_position": by_position}


@pytest.mark.parametrize("num_streams", [2, 3])
def test_equals_plain_loops(base, checkpoint, num_streams):
    batch = batch_of(num_streams)
    result = superposition({"base": base, "checkpoint": checkpoint}, split(batch, 2), SETTINGS)
    metrics = result.metrics()
    for prefix, model in (("base.", base), ("", checkpoint)):
        expected = reference_measures(base, model, batch)
        mean = {name: np.mean(values) for name, values in expected.items() if name != "by_position"}
        ranks, truth = np.array(expected["rank"]), np.array(expected["truth"])
        named = {
            "kl_nats": mean["kl"],
            "kl_tau1_nats": mean["kl1"],
            "js_nats": mean["js"],
            "wasserstein": mean["w"],
            "total_variation": mean["tvd"],
            "kl_ratio": mean["kl"] / mean["pair_kl"],
            "js_ratio": mean["js"] / mean["pair_js"],
            "wasserstein_ratio": mean["w"] / mean["pair_w"],
            "rank.median": np.median(ranks),
            "rank_truth.median": np.median(truth),
            **{f"rank.top_{k}": np.mean(ranks <= k) for k in TOP_K},
            **{f"rank_truth.top_{k}": np.mean(truth <= k) for k in TOP_K},
        }
        content = np.array(expected["content"])
        for kind, chosen in (("content", content), ("predictable", ~content)):
            named |= {
                f"rank.{kind}.share": np.mean(chosen),
                f"rank.{kind}.median": np.median(ranks[chosen]),
                f"rank.{kind}.top_1": np.mean(ranks[chosen] <= 1),
                f"rank.{kind}.top_10": np.mean(ranks[chosen] <= 10),
            }
        for name, value in named.items():
            found = metrics[f"{prefix}superposition.{name}"]
            assert found == pytest.approx(value, rel=2e-5, abs=1e-7), name
        control = np.array(expected["control"])
        assert metrics["superposition.control.top_10"] == np.mean(control <= 10)
        assert metrics["superposition.control.median"] == np.median(control)
        assert metrics["superposition.control.token_overlap"] == pytest.approx(mean["overlap"])
        confident = ranks[np.array(expected["confidence"]) >= 0.5]
        if len(confident):
            found = metrics[f"{prefix}superposition.rank.median_confident"]
            assert found == np.median(confident)
        split_rows = result.tables()["superposition.rank_by_kind"]
        assert [(row["model"], row["kind"]) for row in split_rows] == list(
            itertools.product(["base", "checkpoint"], ["predictable", "content"])
        )
        rows = result.tables()["superposition.by_position"]
        for row in rows:
            if row["model"] == ("base" if prefix else "checkpoint"):
                values = expected["by_position"][row["position"]]
                assert row["total_variation"] == pytest.approx(np.mean(values), rel=1e-5)
                error = np.std(values, ddof=1) / math.sqrt(len(values))
                assert row["standard_error"] == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize("num_streams", [1, 3])
def test_equal_streams_are_an_ordinary_pass(base, num_streams):
    ids = batch_of(1).input_ids.expand(-1, num_streams, -1)
    metrics = superposition({"base": base}, [StreamBatch.uniform(ids)], SETTINGS).metrics()
    assert metrics["superposition.kl_nats"] == pytest.approx(0, abs=1e-5)
    assert metrics["superposition.js_nats"] == pytest.approx(0, abs=1e-5)
    assert metrics["superposition.wasserstein"] == pytest.approx(0, abs=1e-4)
    assert metrics["superposition.rank.top_1"] == 1.0
    assert metrics["superposition.rank.median"] == 1.0
    # the denominator is 0: there is no ratio, and no NaN stands for it
    assert not any(name.endswith("_ratio") for name in metrics)


def test_single_stream_leaves_out_what_needs_a_pair(base):
    result = superposition({"base": base}, [batch_of(1)], SETTINGS)
    assert not any("control" in name or "unrelated" in name for name in result.metrics())
    assert "superposition.control" not in result.tables()
    assert all(math.isfinite(value) for value in result.metrics().values())


def test_perfect_mixture_has_ranks_1_and_2():
    stream_logits = torch.randn(2, 4, 50, generator=torch.Generator().manual_seed(0))
    favourites = torch.tensor([[3, 5, 7, 9], [4, 6, 8, 10]])
    stream_logits.scatter_(-1, favourites.unsqueeze(-1), torch.tensor(9.0).expand(2, 4, 1))
    weights = torch.tensor([0.5, 0.5])
    perfect = measure_streams(stream_logits, weights, temperature=1.0).log_target
    streams, mixture = measure_row(stream_logits, perfect, weights, temperature=1.0)
    assert torch.equal(streams.tokens, favourites)
    assert sorted(mixture.ranks[:, 0].tolist()) == [1, 2]
    assert mixture.ranks.double().mean() == 1.5
    assert mixture.kl_nats.abs().max() < 1e-6
    assert mixture.total_variation.abs().max() < 1e-6


def test_smoothing_concerns_kl_and_js_alone():
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(3, 4, 50, generator=generator)
    mixed = 5 * torch.randn(4, 50, generator=generator)
    weights = torch.tensor([0.2, 0.3, 0.5])
    _, plain = measure_row(logits, mixed, weights, temperature=1.0)
    _, smooth = measure_row(logits, mixed, weights, temperature=1.5)
    assert torch.equal(plain.kl_nats, plain.kl_smooth_nats)
    assert (smooth.kl_smooth_nats < plain.kl_smooth_nats).all()
    for name in ("kl_nats", "total_variation", "ranks"):
        assert torch.equal(getattr(plain, name), getattr(smooth, name))


def test_streams_of_weight_0_are_not_read():
    generator = torch.Generator().manual_seed(0)
    logits, mixed = torch.randn(3, 4, 50, generator=generator), torch.randn(4, 50)
    logits[1] = float("nan")
    weights = torch.tensor([0.25, 0.0, 0.75])
    streams, mixture = measure_row(logits, mixed, weights)
    expected, _ = measure_row(logits[[0, 2]], mixed, weights[[0, 2]])
    assert torch.equal(streams.log_target, expected.log_target)
    assert mixture.ranks.shape == (2, 4)
    single = measure_streams(logits[:1], torch.ones(1))
    assert single.pair_kl_nats is None
    assert measure_mixture(single, logits[0]).kl_nats.abs().max() < 1e-6


def test_result_does_not_depend_on_the_batch_size(base, checkpoint):
    batch = batch_of(2)
    settings = dataclasses.replace(SETTINGS, wasserstein_positions=2, seed=3)
    results = [
        superposition(
            {"base": base, "checkpoint": checkpoint},
            split(batch, given),
            dataclasses.replace(settings, batch_size=size),
        )
        for given, size in ((1, 8), (5, 2), (5, 8))
    ]
    first = results[0].metrics()
    for result in results[1:]:
        assert result.metrics() == pytest.approx(first, rel=1e-5)
        assert result.counts() == results[0].counts()


def test_repeats_to_the_bit_and_limit_takes_the_first_groups(base):
    settings = dataclasses.replace(SETTINGS, limit=3)

    def groups():
        yield from split(batch_of(2), 2)[:2]
        raise AssertionError("asked for more than limit groups")

    first = superposition({"base": base}, groups(), settings)
    assert first.counts()["groups"] == 3
    assert first.metrics() == superposition({"base": base}, groups(), settings).metrics()


def test_wasserstein_positions(base):
    batch = batch_of(2)
    some = dataclasses.replace(SETTINGS, wasserstein_positions=2)
    result = superposition({"base": base}, [batch], some)
    assert result.counts()["wasserstein_positions"] == 2 * 4 + 1  # one group has one position
    none = dataclasses.replace(SETTINGS, wasserstein_positions=0)
    metrics = superposition({"base": base}, [batch], none).metrics()
    assert not any("wasserstein" in name for name in metrics)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"limit": 0}, r"suite\.limit must be at least 1, or null for all, got 0"),
        ({"batch_size": 0}, r"suite\.batch_size must be at least 1 group, got 0"),
        ({"temperature": 0.0}, r"suite\.temperature must be above 0, got 0\.0"),
        ({"top_k": 0}, r"suite\.top_k must be at least 1 token, got 0"),
        ({"wasserstein_positions": -1}, r"suite\.wasserstein_positions must be at least 0"),
    ],
)
def test_impossible_settings(base, changed, message):
    with pytest.raises(ValueError, match=message):
        superposition({"base": base}, [batch_of(2)], dataclasses.replace(SETTINGS, **changed))


def test_bad_input(base, checkpoint):
    with pytest.raises(ValueError, match="found no position to measure in 0 groups"):
        superposition({"base": base}, [], SETTINGS)
    with pytest.raises(ValueError, match=r"one shape \(N, T\), got \(2, 6\) and then \(3, 6\)"):
        superposition({"base": base}, [batch_of(2), batch_of(3)], SETTINGS)
    one_hot = StreamBatch(
        batch_of(2).input_ids, batch_of(2).attention_mask, torch.eye(2)[[0, 1, 0, 1, 0]]
    )
    with pytest.raises(ValueError, match="a weight above 0 for every stream"):
        superposition({"base": base}, [one_hot], SETTINGS)
    other = tiny_llama(2)
    other.model.resize_token_embeddings(VOCABULARY + 8)
    with pytest.raises(ValueError, match="one vocabulary, got logits of base: 108, other: 116"):
        superposition({"base": base, "other": other}, [batch_of(2)], SETTINGS)


def test_rank_histogram_has_the_median_and_shares_of_a_list():
    for count in (1, 2, 7, 100):
        ranks = torch.randint(1, 30, (count,), generator=torch.Generator().manual_seed(count))
        histogram = RankHistogram(30)
        for part in ranks.split(3):
            histogram.add(part)
        assert histogram.median() == np.median(ranks.numpy())
        assert histogram.share_within(10) == np.mean(ranks.numpy() <= 10)
    assert RankHistogram(5).median() is None


def test_standard_error_of_a_ratio_is_that_of_simulated_repetitions():
    random = np.random.default_rng(0)
    ratios, errors = [], []
    for _ in range(400):
        denominators = random.gamma(4.0, size=60)
        numerators = 0.5 * denominators + random.normal(size=60)
        estimate = ratio_of_sums(numerators.tolist(), denominators.tolist())
        assert estimate is not None
        ratios.append(estimate.value)
        errors.append(estimate.standard_error)
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.1)
    assert ratio_of_sums([1.0], [2.0]).standard_error is None
    assert ratio_of_sums([1.0], [0.0]) is None


def test_sums_of_a_group_without_a_value_are_0():
    sums = GroupSums()
    for positions, value in ((2, None), (2, 3.0), (4, 5.0)):
        sums.begin()
        sums.add("positions", positions)
        if value is not None:
            sums.add("late", value)
    assert sums.list_of("late") == [0.0, 3.0, 5.0]
    assert sums.mean("late", "positions").value == 1.0
    assert sums.mean("never", "positions") is None
    moments = PositionMoments(3)
    moments.add(torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
    moments.add(torch.tensor([0]), torch.tensor([3.0]))
    first, second, third = moments.estimates()
    assert (first.value, first.standard_error) == (2.0, 1.0)
    assert (second.value, second.standard_error, third) == (2.0, None, None)


def test_curve_ranks_hold_the_named_ones():
    ranks = curve_ranks(49152)
    assert ranks == sorted(set(ranks))
    assert {1, 5, 10, 50, 100, 49152} <= set(ranks)
    assert len(ranks) < 50
    assert curve_ranks(3) == [1, 2, 3]
