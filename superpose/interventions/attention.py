"""Attention weights recorded, replaced and permuted within a pass (sec. 3 of arXiv 2609.29845).

All of it goes through Transformers' own attention interface: an implementation is registered that
lets the model compute its weights as its eager attention does (grouped queries, sliding windows and
soft-capped logits included), changes them, and applies the result to the model's own values. A
context manager switches a model to it and back; the code of no model is copied or altered.

Weights are post-softmax, ``(B, H, T, T)``: row t says how much query t takes from each position.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

IMPLEMENTATION = "superpose"  # our name in the attention interface

AttentionWeights = dict[int, Tensor]
"""Weights ``(B, H, T, T)`` by layer index."""

Change = Callable[[int, Callable[[], Tensor], Tensor], Tensor]
"""``change(layer_index, own, mask)`` gives the weights to use.

``own()`` computes the layer's own weights; ``mask (B or 1, 1, T, T)`` is 0 where a query may attend.
"""

_NEEDED = (
    "patching needs every layer to be implemented with that interface's eager attention, as in the "
    "families gpt2, gpt_neox, llama, qwen2, qwen3, gemma, gemma2, gemma3 and olmo"
)

_change: ContextVar[Change] = ContextVar("change")


@contextmanager
def recorded_attention(model: PreTrainedModel) -> Iterator[AttentionWeights]:
    """Record the weights of every layer; the pass itself is that of eager attention.

    Yields:
        A mapping that a pass within the context fills. A second pass overwrites the first.

    Raises:
        ValueError: if the attention of the model does not go through the interface.
    """
    recorded: AttentionWeights = {}

    def record(layer_index: int, own: Callable[[], Tensor], mask: Tensor) -> Tensor:
        recorded[layer_index] = own()
        return recorded[layer_index]

    with _changed_attention(model, record):
        yield recorded


@contextmanager
def donor_attention(model: PreTrainedModel, donor: AttentionWeights) -> Iterator[None]:
    """Use the weights of another text, recorded with :func:`recorded_attention`, at every layer.

    Hidden states, values and everything else stay the reading text's own; its softmax(QK) is not
    computed. With the text itself as donor nothing changes, to the bit.

    Raises:
        ValueError: if the attention of the model does not go through the interface, or donor and
            text differ in shape.
    """

    def replace(layer_index: int, own: Callable[[], Tensor], mask: Tensor) -> Tensor:
        weights = donor[layer_index]
        if weights.shape[-1] != mask.shape[-1]:
            raise ValueError(
                f"attention weights of a donor of {weights.shape[-1]} tokens cannot be used in a "
                f"text of {mask.shape[-1]} tokens; cut both to one length"
            )
        return weights

    with _changed_attention(model, replace):
        yield


@contextmanager
def permuted_attention(model: PreTrainedModel, seeds: Sequence[int]) -> Iterator[None]:
    """Permute the text's own weights, each row within the positions that it may attend to.

    Causality, the sum and the multiset of every row are kept; every layer, head and row has a
    permutation of its own.

    Args:
        model: the model.
        seeds: one a row of the batch, so that a text's permutations do not depend on its batch.

    Raises:
        ValueError: if the attention of the model does not go through the interface.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def permute(layer_index: int, own: Callable[[], Tensor], mask: Tensor) -> Tensor:
        return permute_rows(own(), mask == 0, generators)

    with _changed_attention(model, permute):
        yield


def permute_rows(weights: Tensor, allowed: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Each row of ``weights (B, H, T, T)`` randomly permuted within its allowed positions.

    Args:
        weights: post-softmax, 0 wherever not allowed.
        allowed: bool, broadcastable to ``weights``.
        generators: of the CPU, one for each of the B texts.

    Returns:
        ``(B, H, T, T)``, 0 wherever not allowed.
    """
    allowed = allowed.expand_as(weights)
    keys = torch.stack([torch.rand(weights.shape[1:], generator=one) for one in generators])
    keys = keys.to(weights.device).masked_fill(~allowed, 2.0)
    source = keys.argsort(dim=-1)  # the allowed positions in random order, then the others
    target = allowed.byte().argsort(dim=-1, descending=True, stable=True)  # and in their own order
    return torch.zeros_like(weights).scatter(-1, target, weights.gather(-1, source))


def check_patchable(model: PreTrainedModel, name: str) -> None:
    """Prove on the model itself that every layer's attention goes through the interface.

    Raises:
        ValueError: if it does not, naming the implementation that is needed.
    """
    ids = torch.arange(1, 5, device=model.device).view(1, -1)
    try:
        with torch.no_grad(), recorded_attention(model) as recorded:
            model(input_ids=ids, use_cache=False)
    except ValueError as error:
        raise ValueError(f"model.path={name}: {error}") from None
    num_layers = model.config.get_text_config().num_hidden_layers
    if len(recorded) != num_layers:
        raise ValueError(
            f"model.path={name}: only {len(recorded)} of {num_layers} layers attend through "
            f"transformers.AttentionInterface, so not all can be patched; {_NEEDED}"
        )


@contextmanager
def _changed_attention(model: PreTrainedModel, change: Change) -> Iterator[None]:
    """Let ``model`` attend through :func:`_attend`, and back to what it was."""
    before = model.config._attn_implementation
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"the attention of a {model.config.model_type!r} model cannot be patched, because it "
            f"does not go through transformers.AttentionInterface; {_NEEDED}"
        )
    token = _change.set(change)
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        yield
    finally:
        model.set_attn_implementation(before)
        _change.reset(token)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    **settings: object,
) -> tuple[Tensor, Tensor]:
    """An attention implementation: ``query (B, H, T, d)``, ``key`` and ``value`` of fewer heads."""

    def own() -> Tensor:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, attention_mask, **settings)[1]

    weights = _change.get()(module.layer_idx, own, attention_mask)  # type: ignore[arg-type]
    queries_per_value = weights.shape[1] // value.shape[1]
    values = value.repeat_interleave(queries_per_value, dim=1)  # (B, H, T, d)
    return (weights @ values).transpose(1, 2).contiguous(), weights


AttentionInterface.register(IMPLEMENTATION, _attend)
AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)
