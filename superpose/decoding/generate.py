"""Generation: N continuations from one mixed forward pass a token and one KV cache."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from superpose.data.blocks import leading_bos
from superpose.decoding.mixed_pass import MixedPass
from superpose.decoding.raw import Decoder, Raw
from superpose.models.loading import LanguageModel

Tokens = list[list[list[int]]]  # [group][stream][position]


@dataclass(frozen=True)
class Generation:
    """What :func:`generate` made of G groups of N prompts.

    Attributes:
        token_ids: the new tokens, ``[group][stream][position]``; an EOS is the last one.
        texts: the same as text, special tokens left out, ``[group][stream]``.
        step_seconds: time of the prefill and of every step after it; together all of the run.
        cache_bytes: KV cache of the mixed pass at the end, all groups; 0 without a cache.
        guide_cache_bytes: KV cache of the guide at the end, all groups and streams.
    """

    token_ids: Tokens
    texts: list[list[str]]
    step_seconds: list[float]
    cache_bytes: int
    guide_cache_bytes: int


def generate(
    model: LanguageModel,
    prompts: Sequence[str] | Sequence[Sequence[str]],
    decoder: Decoder | None = None,
    *,
    max_new_tokens: int = 64,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    use_cache: bool = True,
    on_step: Callable[[Tokens], None] | None = None,
) -> Generation:
    """Continue N prompts at once, or several groups of N.

    A step feeds the mean of the embeddings of the streams' new tokens: one forward pass and one
    cache entry for all N. In a group prompts end at one position; a longer prompt stands alone in
    the positions in front of a shorter one, where the input is its embedding, unmixed. BOS, where
    the tokenizer gives one, is at position 0 of every stream. Groups of unequal length are padded
    on the left under a mask. A stream that has ended with EOS goes on unseen with its own next
    tokens until its whole group has ended: the others read a mixture to the end.

    Args:
        model: the backbone and its tokenizer.
        prompts: N texts, or groups of N texts. One prompt (N = 1) is ordinary generation.
        decoder: how the streams are told apart; None is :class:`Raw`, where all streams share their
            logits and greedy continuations are equal.
        max_new_tokens: the longest continuation, in tokens.
        do_sample: draw from the distribution; otherwise the most probable token is taken (of equals
            the lowest id).
        temperature: divides the logits before drawing.
        top_k: draw from the k most probable tokens only.
        top_p: draw from the smallest set of tokens with at least this probability.
        seed: of the draws.
        use_cache: keep keys and values; without, every step reads everything again.
        on_step: called after every step with the tokens so far (not to be changed).

    Raises:
        ValueError: for settings out of range, an empty prompt, groups of unequal N, a decoder made
            for another N, or more positions than the model or the guide has.
    """
    groups = [[prompts]] if isinstance(prompts, str) else prompts
    if groups and isinstance(groups[0], str):
        groups = [groups]  # type: ignore[list-item]
    return generate_from_ids(
        model, encode_prompts(model, groups), decoder or Raw(), len(leading_bos(model.tokenizer)),
        max_new_tokens=max_new_tokens, do_sample=do_sample, temperature=temperature, top_k=top_k,
        top_p=top_p, seed=seed, use_cache=use_cache, on_step=on_step,
    )  # fmt: skip


def encode_prompts(model: LanguageModel, groups: Sequence[Sequence[str]]) -> Tokens:
    """Token ids of the prompts of each group, BOS in front where the tokenizer gives one.

    Raises:
        ValueError: for a prompt without any token.
    """
    bos = leading_bos(model.tokenizer)
    encoded: Tokens = []
    for group in groups:
        encoded.append([])
        for text in group:
            ids = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if not ids:
                raise ValueError(
                    f"prompt {sum(map(len, encoded)) + 1} is empty ({text!r}); give every stream "
                    "at least one token to go on from"
                )
            encoded[-1].append([*bos, *(ids if ids[:1] != bos else ids[1:])])
    return encoded


def generate_from_ids(
    model: LanguageModel,
    groups: Tokens,
    decoder: Decoder,
    num_bos: int = 0,
    *,
    max_new_tokens: int = 64,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    use_cache: bool = True,
    stop_at_eos: bool = True,
    on_step: Callable[[Tokens], None] | None = None,
) -> Generation:
    """:func:`generate` for prompts that are token ids already, ``num_bos`` of them BOS."""
    check_prompts(model, groups, decoder, max_new_tokens)
    choose = _chooser(do_sample, temperature, top_k, top_p, seed)
    eos = end_ids(model) if stop_at_eos else set()
    tokens: Tokens = [[[] for _ in group] for group in groups]
    ended = [[False] * len(group) for group in groups]
    times = [time.perf_counter()]
    with torch.inference_mode():
        mixed_pass = MixedPass(model, decoder, use_cache)
        logits = mixed_pass.start(groups, num_bos)  # (N, G, V)
        for step in range(max_new_tokens):
            chosen = choose(logits).transpose(0, 1)  # (G, N)
            for g, row in enumerate(chosen.tolist()):
                for n, token in enumerate(row):
                    if not ended[g][n]:
                        tokens[g][n].append(token)
                        ended[g][n] = token in eos
            times.append(time.perf_counter())
            if on_step is not None:
                on_step(tokens)
            if step == max_new_tokens - 1 or all(map(all, ended)):
                break
            logits = mixed_pass.step(chosen)
    decode = model.tokenizer.decode
    return Generation(
        token_ids=tokens,
        texts=[[str(decode(ids, skip_special_tokens=True)) for ids in group] for group in tokens],
        step_seconds=[after - before for before, after in pairwise(times)],
        cache_bytes=mixed_pass.mixed.cache_bytes,
        guide_cache_bytes=0 if mixed_pass.guide is None else mixed_pass.guide.cache_bytes,
    )


def end_ids(model: LanguageModel) -> set[int]:
    """The ids that end a text: the tokenizer's EOS and those of the model's generation config."""
    config = getattr(model.model, "generation_config", None)
    named = getattr(config, "eos_token_id", None)
    ids = named if isinstance(named, list) else [named]
    return {int(i) for i in [*ids, model.tokenizer.eos_token_id] if i is not None}


def check_prompts(
    model: LanguageModel, groups: Tokens, decoder: Decoder, max_new_tokens: int
) -> None:
    """Raise ValueError for prompts that cannot be continued (see :func:`generate`)."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not groups or not groups[0]:
        raise ValueError("no prompts were given; give N texts, one a stream")
    num_streams = len(groups[0])
    for number, group in enumerate(groups, start=1):
        if len(group) != num_streams:
            raise ValueError(
                f"group {number} has {len(group)} prompts, group 1 has {num_streams}; give every "
                "group one prompt a stream"
            )
    check_num_streams(decoder, num_streams)
    longest = max(len(stream) for group in groups for stream in group)
    # the last new token is chosen, not read
    for reader in filter(None, (model, decoder.guide)):
        limit = reader.max_length
        if limit is not None and longest + max_new_tokens - 1 > limit:
            raise ValueError(
                f"the longest prompt has {longest} tokens and max_new_tokens={max_new_tokens} asks "
                f"for more than the {limit} positions of {reader.name}; shorten the prompt or set "
                f"max_new_tokens to at most {max(0, limit - longest + 1)}"
            )


def check_num_streams(decoder: Decoder, num_streams: int) -> None:
    """Raise ValueError unless ``decoder`` tells ``num_streams`` streams apart."""
    if decoder.num_streams not in (None, num_streams):
        raise ValueError(
            f"streams.num_streams={num_streams}, but the {decoder.name} head of the checkpoint was "
            f"trained for {decoder.num_streams} streams; set streams.num_streams="
            f"{decoder.num_streams} or train one for {num_streams}"
        )


def _chooser(
    do_sample: bool, temperature: float, top_k: int | None, top_p: float | None, seed: int
) -> Callable[[Tensor], Tensor]:
    """A function from logits ``(N, G, V)`` to tokens ``(N, G)``."""
    if not do_sample:
        return lambda logits: logits.argmax(dim=-1)
    if not temperature > 0:
        raise ValueError(
            f"temperature must be above 0, got {temperature}; do_sample=false is greedy"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1 token, got {top_k}; null keeps all")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie above 0 and at most at 1, got {top_p}; null keeps all")
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k is not None:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None:
        warpers.append(TopPLogitsWarper(float(top_p)))
    generator = torch.Generator().manual_seed(seed)
    unused = torch.empty(0)  # the tokens so far, which these warpers do not look at

    def draw(logits: Tensor) -> Tensor:
        rows = warpers(unused, logits.flatten(0, 1))  # type: ignore[arg-type]
        drawn = torch.multinomial(rows.softmax(dim=-1).cpu(), 1, generator=generator)
        return drawn.view(logits.shape[:2]).to(logits.device)

    return draw
