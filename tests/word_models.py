"""Tiny random models over words, for the suites that score tokens: about 35 k parameters."""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from superpose.models.loading import LanguageModel

NUM_WORDS = 60
NUM_LOGITS = NUM_WORDS + 1 + 7  # the end token, and 7 rows that no token uses
MAX_LENGTH = 48


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the word " wI"; the end token, id 60, is also the padding."""
    vocabulary = {f" w{index}": index for index in range(NUM_WORDS)} | {"<end>": NUM_WORDS}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "merged_with_next")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def word_model(family: str = "llama", seed: int = 0) -> LanguageModel:
    """A Llama (untied head) or GPT-2 (tied head) whose weights are large enough for opinions."""
    config: PretrainedConfig
    if family == "llama":
        config = LlamaConfig(
            vocab_size=NUM_LOGITS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_LENGTH,
            initializer_range=0.3,
        )
    else:
        config = GPT2Config(
            vocab_size=NUM_LOGITS,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=MAX_LENGTH,
            initializer_range=0.3,
            bos_token_id=NUM_WORDS,
            eos_token_id=NUM_WORDS,
        )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # the greedy choice is a word
        model.get_output_embeddings().weight[NUM_WORDS:] = 0
    return LanguageModel(model.eval(), word_tokenizer(), f"tiny-{family}")
