"""Tiny random models (about 35 k parameters) of every supported family, built from configs."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 101

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # opinions: logits far from uniform
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_GEMMA = {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY,
             "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 0},
    "gpt_neox": {k: v for k, v in _COMMON.items() if k != "num_key_value_heads"},
    "llama": {**_COMMON, "tie_word_embeddings": False},
    "qwen2": _COMMON,
    "qwen3": {**_COMMON, "head_dim": 8},
    "gemma": {**_COMMON, "head_dim": 8},
    "gemma2": {**_COMMON, **_GEMMA, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**_COMMON, **_GEMMA},
    "olmo": _COMMON,
    "olmo2": _COMMON,
}  # fmt: skip


def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model of a family, in eval mode and float32."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
