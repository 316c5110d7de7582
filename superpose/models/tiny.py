"""The packaged model: a small Llama with a tokenizer of its own, trained on the embedded stories.

``python -m superpose.models.tiny FOLDER`` writes configuration and tokenizer, as they lie in
``tiny_weights/``; ``python train.py experiment=tiny method=pretrain`` trains the weights.
"""

import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from superpose.data import stories

TOKENIZER_STORIES = 20_000  # stories of the training split that the tokenizer is trained on
END = "<|endoftext|>"  # ends a document, and fills up short rows
MAX_VOCAB_SIZE = 1600  # the stories fill less: every word becomes a token of its own


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = MAX_VOCAB_SIZE
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: it can spell any text, and knows the words of ``texts``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def tiny_config(
    vocab_size: int,
    hidden_size: int = 128,
    num_hidden_layers: int = 5,
    intermediate_size: int = 272,
) -> LlamaConfig:
    """A Llama of about one million parameters, its embeddings tied."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.06,  # about 1/sqrt(D): copying heads form sooner than from 0.02
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def write_untrained(folder: Path) -> None:
    """Write configuration and tokenizer: what ``model.random_init=true`` starts from."""
    texts = itertools.islice(stories.documents("train", seed=0), TOKENIZER_STORIES)
    tokenizer = train_tokenizer(texts)
    tokenizer.save_pretrained(folder)
    tiny_config(len(tokenizer)).save_pretrained(folder)


if __name__ == "__main__":
    write_untrained(Path(sys.argv[1]))
