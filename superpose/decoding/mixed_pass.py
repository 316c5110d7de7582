"""The mixed forward pass that grows token by token, with one KV cache for all streams of a group."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from superpose.decoding.raw import Decoder
from superpose.models.layout import embed, next_hidden, output_head
from superpose.models.loading import LanguageModel


class MixedPass:
    """Reads G groups of N streams, and gives each stream's next-token logits.

    In the mixed pass the streams of a group end at one position. A longer stream stands alone in
    the positions in front of the shorter ones: there the input is its embedding, unmixed. A leading
    BOS of all streams stays at position 0. The guide, if there is one, reads every stream by itself.
    """

    def __init__(self, model: LanguageModel, decoder: Decoder, use_cache: bool = True):
        """Prepare an empty pass; without cache every step reads everything again."""
        self.model, self.decoder = model, decoder
        self.head = output_head(model.model)
        self.mixed = Reader(model, use_cache)
        self.guide = None if decoder.guide is None else Reader(decoder.guide, use_cache)

    def start(self, groups: Sequence[Sequence[Sequence[int]]], num_bos: int = 0) -> Tensor:
        """Read the prompts.

        Args:
            groups: token ids, ``[group][stream][position]``; G groups of N streams.
            num_bos: how many ids at the front of every stream are its BOS, 0 or 1.

        Returns:
            ``(N, G, V)`` logits of the tokens that come next, over the tokenizer's tokens.
        """
        device = self.model.model.device
        self.num_groups, self.num_streams = len(groups), len(groups[0])
        input_ids, present = right_aligned(groups, num_bos)  # (G, N, T)
        weights = present / present.sum(dim=1, keepdim=True).clamp_min(1.0)
        logits = self._read_mixed(input_ids.to(device), weights.to(device))
        alone = [[stream] for group in groups for stream in group]  # (G N, 1, T)
        guide = None
        if self.guide is not None:
            ids, mask = right_aligned(alone, 0)
            guide = self._read_guide(ids[:, 0], mask[:, 0])
        return self._streams(logits, guide)

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to every stream: ``tokens (G, N)``; returns as :meth:`start`."""
        weights = torch.full(
            (*tokens.shape, 1), 1.0 / self.num_streams, device=self.model.model.device
        )
        hidden = self._read_mixed(tokens.unsqueeze(-1), weights)
        guide = None
        if self.guide is not None:
            guide = self._read_guide(tokens.reshape(-1, 1), torch.ones(tokens.numel(), 1))
        return self._streams(hidden, guide)

    def _read_mixed(self, input_ids: Tensor, weights: Tensor) -> Tensor:
        """Final hidden state ``(G, D)`` of the last position; ``weights (G, N, t)``, 0 for none."""
        mixed = self.decoder.mix(embed(self.model.model, input_ids), weights)
        return self.mixed.append(mixed, (weights.sum(dim=1) > 0).long())

    def _read_guide(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """The guide's logits ``(N, G, V)``."""
        assert self.guide is not None
        model, device = self.guide.model.model, self.guide.model.model.device
        hidden = self.guide.append(embed(model, input_ids.to(device)), mask.long().to(device))
        logits = output_head(model).logits(hidden)
        return logits.view(self.num_groups, self.num_streams, -1).transpose(0, 1)

    def _streams(self, hidden: Tensor, guide: Tensor | None) -> Tensor:
        logits = self.decoder.stream_logits(self.head, hidden, guide)
        return logits[..., : self.model.num_tokens].expand(self.num_streams, -1, -1)


class Reader:
    """One model that reads rows position by position, with or without a cache."""

    def __init__(self, model: LanguageModel, use_cache: bool):
        """Prepare an empty cache."""
        self.model = model
        config = model.model.config.get_text_config()
        self.cache: Cache | None = DynamicCache(config=config) if use_cache else None
        self.mask: Tensor | None = None  # (R, S) of what was read
        self.embeddings: Tensor | None = None  # (R, S, D), kept without a cache only

    def append(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Read ``embeddings (R, t, D)`` with ``mask (R, t)``; the last position's hidden ``(R, D)``."""
        self.mask = mask if self.mask is None else torch.cat([self.mask, mask], dim=1)
        if self.cache is None:
            if self.embeddings is not None:
                embeddings = torch.cat([self.embeddings, embeddings], dim=1)
            self.embeddings = embeddings
        return next_hidden(self.model.model, embeddings, self.mask, self.cache)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values that are kept, counted from the tensors."""
        layers = [] if self.cache is None else self.cache.layers
        kept = [getattr(layer, name) for layer in layers for name in ("keys", "values")]
        return sum(x.numel() * x.element_size() for x in kept)


def right_aligned(groups: Sequence[Sequence[Sequence[int]]], num_bos: int) -> tuple[Tensor, Tensor]:
    """Token ids ``(G, N, T)`` and where there is one, ``(G, N, T)`` float 0 or 1.

    All streams end at position T - 1. The first ``num_bos`` ids of every stream of a group stand
    where those of its longest one do.
    """
    longest = max(len(stream) for group in groups for stream in group)
    input_ids = torch.zeros(len(groups), len(groups[0]), longest, dtype=torch.int64)
    present = torch.zeros(len(groups), len(groups[0]), longest)
    for g, group in enumerate(groups):
        first = longest - max(len(stream) for stream in group)
        for n, stream in enumerate(group):
            places = list(range(longest - len(stream), longest))
            places[:num_bos] = range(first, first + num_bos)
            input_ids[g, n, places] = torch.tensor(stream)
            present[g, n, places] = 1.0
    return input_ids, present
