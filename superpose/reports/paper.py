"""The papers' own figures, for a reader to compare with; each is labelled with its model.

Of *Your Transformer Can Hold Two Thoughts at Once* (arXiv 2609.29845): Tables 1 to 6 and 9, Appendices
F and H, measured on FineWeb and FineWeb-Edu; other models, texts and sizes give other numbers.
"""

from collections.abc import Mapping
from typing import Any

PRETRAINED = "Pythia-160M to Llama-3.1-8B"
QWEN = "Qwen2.5-3B"

# Table 1 and Appendix B: lengths 32 and 512 together.
DISTANCES = {
    2: {
        "kl_nats": "0.91-2.16", "kl_ratio": "0.31-0.42", "js_nats": "0.23-0.48",
        "js_ratio": "0.39-0.57", "wasserstein": "0.25-0.32", "wasserstein_ratio": "0.61-0.71",
    },
    3: {
        "kl_nats": "1.04-2.69", "kl_ratio": "0.36-0.47", "js_nats": "0.25-0.53",
        "js_ratio": "0.44-0.62", "wasserstein": "0.27-0.35", "wasserstein_ratio": "0.64-0.76",
    },
}  # fmt: skip
DISTILLED = {"kl_nats": "0.27", "kl_ratio": "0.06"}  # Pythia-2.8B, section 4

PATCHING = {  # Tables 2 to 4, N = 2
    "mixing": {
        "predictable.median_rank": "6", "predictable.top_1": "0.248",
        "content.median_rank": "284", "content.top_1": "0.042", "all.median_rank": "19",
    },
    "donor": {
        "predictable.median_rank": "3", "predictable.top_1": "0.330",
        "content.median_rank": "111", "content.top_1": "0.054",
        "all.median_rank": "8", "all.top_10": "0.53", "all.kl_nats": "3.54", "all.kl_ratio": "0.27",
    },
    "permutation": {
        "predictable.median_rank": "3,079", "predictable.top_1": "0.013",
        "content.median_rank": "19,246", "content.top_1": "0.000",
        "all.median_rank": "8,148", "all.top_10": "0.101",
        "all.kl_nats": "9.13", "all.kl_ratio": "0.68",
    },
    "mixing_checkpoint": {
        "predictable.median_rank": "8", "predictable.top_1": "0.216",
        "content.median_rank": "5", "content.top_1": "0.228", "all.median_rank": "6",
    },
    "lambada": {
        "vanilla.first_token_accuracy": "0.73", "donor.first_token_accuracy": "0.005",
        "donor.median_rank": "2,350", "mixing.first_token_accuracy": "0.0225",
        "mixing.median_rank": "339",
    },
    "share": {"predictable": "0.65", "content": "0.35"},
}  # fmt: skip

OTHERS = {  # Tables 5 and 6, Appendix F
    "lambada.single.accuracy": "0.499-0.643 (Pythia-1.4B to Llama-3.2-3B)",
    "lambada.guide.accuracy": "0.225-0.540 (Pythia-160M to Llama-3.2-1B)",
    "lambada.joint.accuracy": "0.110-0.430 (Pythia-1.4B to Llama-3.2-3B)",
    "lambada.joint.jaccard": "0.061-0.080 (Pythia-1.4B to Llama-3.2-3B)",
    "lambada.two_head.accuracy": "0.080-0.164 (Pythia-2.8B to Llama-3.2-3B)",
    "lambada.two_head.jaccard": "0.080-0.235 (Pythia-2.8B to Llama-3.2-3B)",
    "layer_linearity.middle_third": "about 0.65 (the paper's models)",
    "layer_linearity.last_third": "above 0.95 (the paper's models)",
}

# Table 9, two streams, one group: tokens a second over those of the other column, four pairs of
# backbone and guide on a GPU.
SPEEDUPS = {
    "separate.speedup_sequential": "1.96-2.02", "separate.speedup_batch": "0.97-1.02",
    "guided.speedup_sequential": "1.22-1.42", "guided.speedup_batch": "0.62-0.70",
    "batch.speedup_sequential": "1.96-2.03",
}  # fmt: skip


def paper_figures(config: Mapping[str, Any]) -> dict[str, str]:
    """What the paper has for metrics of a run, by the metric's dotted name.

    Args:
        config: the run's config; its ``streams.num_streams`` chooses between the paper's tables.
    """
    asked = (config.get("streams") or {}).get("num_streams")
    count = asked[0] if isinstance(asked, list) else asked
    found = dict(OTHERS)
    for name, value in DISTANCES.get(int(count or 0), {}).items():
        text = f"{value} ({PRETRAINED})"
        if count == 2 and name in DISTILLED:
            text += f", {DISTILLED[name]} (Pythia-2.8B distilled)"
        found[f"superposition.{name}"] = text
    if count == 2:
        for name, value in SPEEDUPS.items():
            found[f"throughput.groups_1.{name}"] = f"{value} (Pythia-1.4B to Llama-3.2-3B)"
        for setup, values in PATCHING.items():
            for name, value in values.items():
                found[f"attention_patching.{setup}.{name}"] = f"{value} ({QWEN})"
    return found
