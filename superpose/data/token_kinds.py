"""Predictable and content tokens: the split of section 6 of arXiv 2609.29845, as a pure function.

Most of running text can be guessed from the last word or two, so a mean over all positions flatters
a model whose context is disturbed. A token is **predictable** if it is

- punctuation, white space or a symbol (it has no letter), or has a digit,
- a special token,
- a single letter,
- a function word of :data:`FUNCTION_WORDS` - articles, pronouns, prepositions, auxiliaries,
  conjunctions, particles, wh-words - in any case, or the tail of a contraction (``'s``, ``n't``),
- a fragment: it does not start a word, because it begins with a letter and is not capitalised
  (``ing``), so that no space or punctuation mark stands between it and what was before.

Every other token is **content**. A capitalised piece without a space (``Once``) counts as the start
of a word, since that is how words look at the start of a text or behind a quotation mark.

The suites classify the token that is *predicted* at a position - the vanilla model's most probable
next token - not the token that is read there.
"""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

KINDS = ("predictable", "content")

FUNCTION_WORDS = frozenset(
    """
    a an the
    i me my mine myself we us our ours ourselves you your yours yourself yourselves thou thee thy
    he him his himself she her hers herself it its itself they them their theirs themselves one ones
    oneself this that these those each every either neither both all any some none no such another
    other others many much more most few fewer less least several enough half
    anyone anybody anything everyone everybody everything someone somebody something nobody nothing
    about above across after against along alongside amid among amongst around as at atop before
    behind below beneath beside besides between beyond by despite down during except for from in
    inside into like near of off on onto opposite out outside over past per round since than through
    throughout till to toward towards under underneath unlike until unto up upon via with within
    without
    am is are was were be been being have has had having do does did doing done will would shall
    should can could may might must ought need cannot gonna gotta
    don doesn didn isn aren wasn weren hasn haven hadn wouldn couldn shouldn mustn needn ain shan
    and or but nor so yet if because although though while whereas unless lest whether once
    not only also too very just even still again ever never always then there here now thus hence
    however therefore else quite rather almost already away back ago apart maybe perhaps well yes
    who whom whose which what when where why how whoever whatever whichever whenever wherever
    """.split()
)
CONTRACTION_TAILS = frozenset("s t d m re ve ll nt em".split())
APOSTROPHES = ("'", "\u2019")


def content_tokens(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Which tokens are content words; the others are predictable.

    Args:
        tokenizer: with any way of marking spaces (byte-level BPE, SentencePiece, whole words).

    Returns:
        ``(len(tokenizer),)`` bool, by token id.
    """
    special = set(tokenizer.all_special_ids)
    special |= {index for index, added in tokenizer.added_tokens_decoder.items() if added.special}
    return torch.tensor(
        [
            index not in special and is_content(text)
            for index, text in enumerate(token_texts(tokenizer))
        ]
    )


def token_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What each token adds to a running text, its leading space included.

    Every token is decoded behind a letter: at the start of a text decoders drop a space.
    """
    before = tokenizer("a", add_special_tokens=False)["input_ids"]
    pieces = [[*before, index] for index in range(len(tokenizer))]
    start = len(tokenizer.decode(before, clean_up_tokenization_spaces=False))
    texts = tokenizer.batch_decode(pieces, clean_up_tokenization_spaces=False)
    return [text[start:] for text in texts]


def is_content(text: str) -> bool:
    """Whether a token that adds ``text`` to what stands before it is a content word."""
    letters = [place for place, character in enumerate(text) if character.isalpha()]
    if len(letters) < 2 or any(character.isdigit() for character in text):
        return False
    before, word = text[: letters[0]], text[letters[0] : letters[-1] + 1]
    if word.casefold() in FUNCTION_WORDS:
        return False
    if before.endswith(APOSTROPHES) and word.casefold() in CONTRACTION_TAILS:
        return False
    return bool(before) or (word[0].isupper() and word[1:].islower())
