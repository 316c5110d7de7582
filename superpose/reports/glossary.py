"""What each metric means: one place for units, directions and words."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Direction = Literal["lower", "higher", ""]


@dataclass(frozen=True)
class Meaning:
    """One metric.

    Attributes:
        text: what it is.
        unit: ``nats``, ``share`` (0 to 1), ``rank`` (1 is best), ...; empty for a plain number.
        better: which way is better, empty where neither is.
    """

    text: str
    unit: str
    better: Direction


# By pattern, the first that fits; BASE is left off before.
MEANINGS: dict[str, Meaning] = {
    "superposition.kl_nats": Meaning(
        "KL(P_target || P_mix), all distributions smoothed (suite.temperature, 1.5 in the paper): "
        "distance of the mixed pass's distribution from the mean of the streams' own",
        "nats", "lower",
    ),
    "superposition.kl_tau1_nats": Meaning(
        "the same KL without smoothing (temperature 1)", "nats", "lower"
    ),
    "superposition.js_nats": Meaning(
        "Jensen-Shannon divergence of P_target and P_mix, smoothed in the same way; at most "
        "log 2 = 0.693",
        "nats", "lower",
    ),
    "superposition.wasserstein": Meaning(
        "Wasserstein-1 distance of P_target and P_mix on their top 256 tokens, ground metric "
        "cosine distance of token embeddings",
        "cosine distance", "lower",
    ),
    "superposition.*_ratio": Meaning(
        "Superposition Approximation Ratio (eq. 3): mean distance of P_mix from P_target over the "
        "mean distance of two unrelated contexts; 0 is perfect, 1 no closer than unrelated texts",
        "ratio of means", "lower",
    ),
    "superposition.*_standard_error": Meaning(
        "standard error of that ratio over groups (delta method)", "", ""
    ),
    "superposition.*_unrelated_nats": Meaning(
        "denominator of the ratio: mean distance, in both directions, between the streams' own "
        "distributions",
        "nats", "",
    ),
    "superposition.wasserstein_unrelated": Meaning(
        "the same of the Wasserstein distance", "cosine distance", ""
    ),
    "superposition.total_variation": Meaning(
        "total variation distance of P_target and P_mix at temperature 1", "0 to 1", "lower"
    ),
    "superposition.rank.median_confident": Meaning(
        "median rank, in the mixed logits, of the streams' argmax tokens whose own single-stream "
        "probability is above 0.5",
        "rank", "lower",
    ),
    "superposition.rank.*.share": Meaning(
        "share of the streams' argmax tokens that are of this kind: predictable (punctuation, "
        "digits, function words, fragments) or content; aggregates flatter, for most are predictable",
        "share", "",
    ),
    "superposition.rank.*.median": Meaning(
        "median rank, in the mixed logits, of the streams' argmax tokens of this kind",
        "rank", "lower",
    ),
    "superposition.rank.*.top_*": Meaning(
        "share of the streams' argmax tokens of this kind among the first k of the mixed logits",
        "share", "higher",
    ),
    "superposition.rank.median": Meaning(
        "median rank, in the mixed logits, of each stream's own argmax token; a perfect mixture "
        "of two gives 1 and 2",
        "rank", "lower",
    ),
    "superposition.rank.top_*": Meaning(
        "share of the streams' argmax tokens among the first k of the mixed logits",
        "share", "higher",
    ),
    "superposition.rank_truth.median": Meaning(
        "median rank, in the mixed logits, of each stream's actual next token", "rank", "lower"
    ),
    "superposition.rank_truth.top_*": Meaning(
        "share of the streams' actual next tokens among the first k of the mixed logits",
        "share", "higher",
    ),
    "superposition.control.token_overlap": Meaning(
        "how often two streams have the same next token at one position", "share", ""
    ),
    "superposition.control.median": Meaning(
        "frequency control: median rank of another stream's next token in a stream's own logits",
        "rank", "",
    ),
    "superposition.control.top_*": Meaning(
        "frequency control: share of another stream's next tokens among the first k of a stream's "
        "own logits; what frequent words alone give",
        "share", "",
    ),
    "attention_patching.share.*": Meaning(
        "share of positions whose vanilla argmax token is of this kind: predictable (punctuation, "
        "digits, function words, fragments) or content",
        "share", "",
    ),
    "attention_patching.unrelated_kl_nats": Meaning(
        "denominator of the ratios: mean smoothed KL(vanilla A || vanilla of an unrelated text)",
        "nats", "",
    ),
    "attention_patching.lambada.*.first_token_accuracy": Meaning(
        "share of texts whose last word's first token is the argmax: read alone, with the attention "
        "of another text (donor), mixed with it",
        "share", "higher",
    ),
    "attention_patching.lambada.*.median_rank": Meaning(
        "median rank of that token", "rank", "lower"
    ),
    "attention_patching.*.median_rank": Meaning(
        "median rank of a text's vanilla argmax token when the pass is disturbed: mixed with another "
        "text, with that text's attention weights (donor), with its own weights permuted",
        "rank", "lower",
    ),
    "attention_patching.*.top_*": Meaning(
        "share of those tokens among the first k of the disturbed logits", "share", "higher"
    ),
    "attention_patching.*.kl_nats": Meaning(
        "mean KL(vanilla || disturbed), smoothed (suite.temperature, 1.5 in the paper)",
        "nats", "lower",
    ),
    "attention_patching.*.kl_ratio": Meaning(
        "that KL over the KL of an unrelated text; 0 is undisturbed, 1 is as far as another text",
        "ratio of means", "lower",
    ),
    "lambada.*.first_token_accuracy": Meaning(
        "share of texts whose last word's first token is the argmax", "share", "higher"
    ),
    "lambada.single.accuracy": Meaning(
        "share of texts whose last word is predicted greedily, token by token (lm-eval's "
        "lambada_openai)",
        "share", "higher",
    ),
    "lambada.guide.accuracy": Meaning(
        "the same of the guide, which reads every text on its own", "share", "higher"
    ),
    "lambada.*.accuracy": Meaning(
        "the same when several texts are read in one mixed pass: mixed as it comes, guided by a "
        "guide with alpha = beta = 1, joint with trained alpha and beta, two_head with own heads",
        "share", "higher",
    ),
    "lambada.*.jaccard": Meaning(
        "token-set overlap of the streams' greedy continuations", "0 to 1", "lower"
    ),
    "lambada.*.perplexity": Meaning(
        "exp of the mean negative log-likelihood of the last word", "", "lower"
    ),
    "lambada.*.median_rank": Meaning(
        "median rank of the last word's first token", "rank", "lower"
    ),
    "perplexity.nll_nats": Meaning(
        "mean negative log-likelihood of a token in ordinary single-stream reading: the price of "
        "distillation",
        "nats per token", "lower",
    ),
    "perplexity.ppl": Meaning("exp of it", "", "lower"),
    "additivity.mean": Meaning(
        "E_bar (eq. 8): distance of the directions of a mixture's hidden state and of the sum of "
        "its texts' states, each about its mean, averaged over positions and hidden-state indices",
        "0 to 2", "lower",
    ),
    "additivity.standard_error": Meaning("of E_bar, over hidden-state indices", "", ""),
    "additivity.trajectory.lowest_step": Meaning(
        "training step at which E_bar is lowest; in the paper the earliest", "steps", ""
    ),
    "additivity.trajectory.rank_correlation": Meaning(
        "Spearman correlation of E_bar with the training step; the paper's grows throughout, "
        "which gives 1",
        "-1 to 1", "",
    ),
    "layer_linearity.trajectory.lowest_step": Meaning(
        "training step at which the mean score is lowest", "steps", ""
    ),
    "layer_linearity.trajectory.rank_correlation": Meaning(
        "Spearman correlation of the mean score with the training step", "-1 to 1", ""
    ),
    "layer_linearity.increment.*": Meaning(
        "the same of what a block adds to its input", "0 to 1", ""
    ),
    "layer_linearity.*": Meaning(
        "share of the variance of a block's output that the best linear map of its input explains "
        "(Razzhigaev's score), over the very tokens it was fitted to: mean and minimum over blocks, "
        "means over thirds of the depth",
        "0 to 1", "",
    ),
    "generation.single.*": Meaning("the same, each prompt continued alone by the teacher", "", ""),
    "generation.jaccard": Meaning(
        "token-set overlap of the continuations of two streams", "0 to 1", "lower"
    ),
    "generation.distinct_*": Meaning(
        "different n-grams of all continuations over all of them", "0 to 1", "higher"
    ),
    "generation.nll_nats": Meaning(
        "mean negative log-likelihood of the continuations under the single-stream teacher",
        "nats per token", "lower",
    ),
    "generation.*cache_bytes_per_stream": Meaning(
        "KV cache at the end of a continuation", "bytes", "lower"
    ),
    "throughput.*.tokens_per_second": Meaning(
        "new tokens of all streams over the time of prefill and decoding; raw: one mixed pass, "
        "separate: a head a stream, guided: a guide beside it, batch: the prompts in an ordinary "
        "batch, sequential: the streams of a group one after the other, guide_batch: the guide alone",
        "tokens per second", "higher",
    ),
    "throughput.*.prefill_seconds": Meaning(
        "time to read all prompts and choose the first new tokens", "seconds", "lower"
    ),
    "throughput.*.decode_ms_per_step": Meaning(
        "time for one more token of every stream", "milliseconds", "lower"
    ),
    "throughput.*.peak_memory_bytes": Meaning(
        "most memory above the level before, weights left out: caches, activations, logits",
        "bytes", "lower",
    ),
    "throughput.*.cache_bytes_per_stream": Meaning(
        "KV caches at the end over all streams, those of a guide included", "bytes", "lower"
    ),
    "throughput.*.speedup_*": Meaning(
        "time of the same prompts, sequential or in an ordinary batch, over the time of this mode, "
        "repeat by repeat; N streams in one pass gain at most N times",
        "times", "higher",
    ),
    "train[./]nll_nats": Meaning("next-token loss", "nats per token", "lower"),
    "val[./]nll_nats": Meaning("held-out next-token loss", "nats per token", "lower"),
    "val[./]alpha": Meaning("weight of a stream's own guide logits (eq. 7)", "", ""),
    "val[./]beta": Meaning("weight of the other streams' guide logits (eq. 7)", "", ""),
    "train[./]kl_nats": Meaning("distillation loss at its own temperature", "nats", "lower"),
    "val[./]kl_nats": Meaning("held-out KL(target || student) at temperature 1", "nats", "lower"),
    "val[./]kl_ratio": Meaning("held-out ratio of eq. 3 at temperature 1.5", "ratio", "lower"),
    "val[./]top10": Meaning("held-out share of argmax tokens in the top 10", "share", "higher"),
    "*accuracy": Meaning("share predicted right", "share", "higher"),
    "*_nats": Meaning("", "nats", ""),
    "*_seconds": Meaning("wall-clock time", "seconds", "lower"),
}  # fmt: skip

BASE = "base."


def meaning_of(metric: str) -> Meaning:
    """The meaning of a metric; an empty one for a name that nothing is known of."""
    name = metric.removeprefix(BASE)
    for pattern, meaning in MEANINGS.items():
        if fnmatchcase(name, pattern):
            return meaning
    return Meaning("", "", "")
