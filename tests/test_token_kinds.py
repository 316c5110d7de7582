"""The predictable/content split: known words, and the same answer from every kind of tokenizer."""

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from word_models import word_tokenizer

from superpose.data.token_kinds import FUNCTION_WORDS, content_tokens, is_content, token_texts
from superpose.models.loading import load

TEXT = [
    'Once there was a queen in the green garden, and she said: "Where\'s the 2nd key?"',
    "The king didn't know; the KING never knew. Gardens grow slowly, the gardener's garden too.",
    "Queens and kings walked, talking of 1984 - of gardens, keys (green ones) and naïve cafés.",
] * 20


@pytest.mark.parametrize(
    "text",
    [
        " the", "The", " The", " THE", "the", " of", " she", " is", " and", " not", " which", " why",
        ",", " (", "...", '."', " -", "\n", "\n\n", "  ", "", "\t", " =", "%", "�", " \xa0",
        "7", " 1984", " 2nd", "3D", " e", "A", " I", "'s", "\u2019s", "'t", "'ll", "n't", "\u2019re", "t",
        "ing", "ed", "ables", "TION", "ü", " don",
    ],
)  # fmt: skip
def test_predictable(text):
    assert not is_content(text)


@pytest.mark.parametrize(
    "text",
    [
        " queen", "Queen", " Queen", " QUEEN", "Once upon", " garden", "\nGarden", '"Garden', "(green",
        " naïve", " quant", " café", "-based", "_name", " 日本", " mother-in-law", "'garden", " ing",
    ],
)  # fmt: skip
def test_content(text):
    assert is_content(text)


def test_function_words_are_complete_in_their_closed_classes():
    for words in (
        "i me my mine myself you he him his she her it we us they them",
        "a an the this that these those",
        "am is are was were be been being have has had do does did",
        "will would shall should can could may might must",
        "of in to for with on at by from into over under between through",
        "and or but nor so yet if because although while",
        "who whom whose which what when where why how",
    ):
        assert set(words.split()) <= FUNCTION_WORDS
    assert all(word == word.casefold() for word in FUNCTION_WORDS)


def byte_level(prefix_pattern: bool) -> PreTrainedTokenizerFast:
    """As GPT-2's; with ``prefix_pattern`` a word takes the mark before it along, as in Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if prefix_pattern:
        pattern = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def metaspace(old: bool) -> PreTrainedTokenizerFast:
    """As SentencePiece's: ``▁word``, whose first space decoders drop; ``old`` as in Llama 2."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    if old:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if old else []
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *bytes_], show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize(
    "tokenizer",
    [byte_level(False), byte_level(True), metaspace(False), metaspace(True)],
    ids=["gpt2", "llama3", "metaspace", "llama2"],
)
def test_every_kind_of_tokenizer_gives_the_same_answers(tokenizer):
    content = content_tokens(tokenizer)
    assert content.shape == (len(tokenizer),)
    assert content.dtype == torch.bool
    encoded = tokenizer(TEXT[0] + " " + TEXT[1] + " " + TEXT[2], add_special_tokens=False)
    texts = token_texts(tokenizer)
    kinds = {texts[index].strip(' (",.?'): bool(content[index]) for index in encoded["input_ids"]}
    for word in ("queen", "garden", "key", "king", "KING", "knew", "slowly"):
        assert kinds[word], word
    for word in ("a", "in", "the", "and", "she", "The", "of", "never"):
        assert not kinds[word], word
    special = tokenizer.all_special_ids
    assert not content[special].any()
    assert "".join(texts[index] for index in encoded["input_ids"]).strip().startswith("Once there")


def test_words_of_a_vocabulary_without_spaces_all_start_words():
    words = ["the", "queen", "garden", "7", "<end>", "walked"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(
            models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<end>")
        ),
        eos_token="<end>",
    )
    assert content_tokens(tokenizer).tolist() == [False, True, True, False, False, True]
    assert not content_tokens(word_tokenizer()).any()  # " w12" has a digit


def test_packaged_tokenizer():
    tokenizer = load("tiny").tokenizer
    content = content_tokens(tokenizer)
    texts = token_texts(tokenizer)
    kinds = {text: bool(content[index]) for index, text in enumerate(texts)}
    assert kinds[" harbor"]
    assert kinds["Soon"]  # a story's first word: no space before it
    assert kinds[" wanted"]
    assert not kinds["The"]
    assert not kinds[" the"]
    assert not kinds["."]
    assert 0.3 < content.float().mean() < 0.7
