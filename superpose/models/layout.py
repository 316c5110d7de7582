"""Where a causal language model keeps its parts: the only file that knows attribute paths.

Everything else reads a model through :func:`embed`, :func:`final_hidden` and :func:`output_head`.
:func:`check_layout` proves on the loaded model itself that these three compose to its logits, so a
family that adds a step of its own (Gemma's embedding scale, logit soft-capping, a logit scale) is
either handled or refused - never silently wrong.
"""

from dataclasses import dataclass
from inspect import Parameter, signature

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from superpose.streams.batch import StreamBatch
from superpose.streams.mixing import mix_embeddings

TESTED_FAMILIES = (
    "gpt2", "gpt_neox", "llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo", "olmo2",
)  # fmt: skip

FFN = "mlp"  # what every family that is tested here calls a block's feed-forward part


@dataclass(frozen=True)
class OutputHead:
    """The map from the final hidden state to logits.

    Attributes:
        weight: ``(V, D)``; with tied embeddings the very parameter of the input table.
        bias: ``(V,)`` or None.
        softcap: final logit soft-capping ``c * tanh(logits / c)`` (Gemma 2), or None.
        scale: factor on the logits before the soft cap (Cohere, Granite); 1 elsewhere.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``(..., V)`` in float32 for hidden states ``(..., D)``.

        The product is done in the dtype of the head, also under autocast, which would round it.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.to(self.weight.dtype)
            logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        logits = logits.float() * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def embed(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Token embeddings ``(..., D)`` as the model's own embedding module gives them.

    The module is called, its weight is never indexed: Gemma's embedding scale lies inside it.
    """
    return model.get_input_embeddings()(input_ids)


def output_head(model: PreTrainedModel) -> OutputHead:
    """The output head of a model, sharing the model's own parameters."""
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None)  # Cohere multiplies
    scaling = getattr(config, "logits_scaling", None)  # Granite divides
    return OutputHead(
        weight=head.weight,
        bias=getattr(head, "bias", None),
        softcap=getattr(config, "final_logit_softcapping", None),
        scale=float(scale or 1.0) / float(scaling or 1.0),
    )


def final_hidden(
    model: PreTrainedModel, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None
) -> Tensor:
    """Hidden states ``(B, T, D)`` after the final norm: what :func:`output_head` reads.

    No attention mask is passed: outside decoding, padding stands on the right, where a causal model
    never sees it, and positions count from the left in every family.
    """
    backbone = model.base_model
    return backbone(
        input_ids=input_ids, inputs_embeds=inputs_embeds, use_cache=False
    ).last_hidden_state


def next_hidden(
    model: PreTrainedModel, inputs_embeds: Tensor, attention_mask: Tensor, cache: Cache | None
) -> Tensor:
    """Final hidden state ``(B, D)`` of the last of ``t`` new positions, for decoding.

    Args:
        model: the model.
        inputs_embeds: ``(B, t, D)`` embeddings of the new positions.
        attention_mask: ``(B, S + t)`` 1 for a token, 0 for padding, which stands on the left; S is
            the number of positions that the cache holds.
        cache: keys and values of the S earlier positions, which gains the new ones; None for S = 0
            keeps none.
    """
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp_min(0)  # GPT-2 would count the padding
    hidden = model.base_model(
        inputs_embeds=inputs_embeds,
        attention_mask=None if bool(attention_mask.all()) else attention_mask,
        position_ids=position_ids[:, -inputs_embeds.shape[1] :],
        cache=cache,
        use_cache=cache is not None,
    ).last_hidden_state
    return hidden[:, -1]


def blocks(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The transformer blocks of a model, the first one first.

    Raises:
        ValueError: if the model keeps no list of as many modules as its config counts blocks.
    """
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.children():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"a {model.config.model_type!r} model keeps no list of its {count} blocks that superpose "
        f"finds; use one of the families {', '.join(TESTED_FAMILIES)}"
    )


def ffns(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The feed-forward part of each block: a module of one input ``(B, T, D)`` and one such output.

    The norms before and (Gemma 2 and 3, OLMo 2) behind it are not in it.

    Raises:
        ValueError: for a block without one, or with a mixture of experts.
    """
    found = []
    for index, block in enumerate(blocks(model)):
        module = getattr(block, FFN, None)
        kind = model.config.model_type
        if not isinstance(module, torch.nn.Module) or _inputs(module) != 1:
            raise ValueError(
                f"block {index} of a {kind!r} model ({type(block).__name__}) has no feed-forward "
                f"part that superpose recognises, a module {FFN!r} of one input; use one of the "
                f"families {', '.join(TESTED_FAMILIES)}"
            )
        if any(name.rsplit(".", 1)[-1] == "experts" for name, _ in module.named_modules()):
            raise ValueError(
                f"block {index} of a {kind!r} model is a mixture of experts "
                f"({type(module).__name__}): which weights a token meets depends on its router, so "
                "it has no one map to fit or replace; use a dense model"
            )
        found.append(module)
    return found


def replace_ffn(model: PreTrainedModel, index: int, module: torch.nn.Module) -> torch.nn.Module:
    """Put ``module`` in the place of block ``index``'s feed-forward part; returns the old one."""
    old = ffns(model)[index]
    setattr(blocks(model)[index], FFN, module)
    return old


def _inputs(module: torch.nn.Module) -> int:
    """How many arguments the module's forward requires (BLOOM's takes the residual stream too)."""
    parameters = signature(module.forward).parameters.values()
    return sum(parameter.default is Parameter.empty for parameter in parameters)


def truncate(model: PreTrainedModel, num_blocks: int) -> PreTrainedModel:
    """Drop all blocks but the first ``num_blocks``, in place; the final norm and head stay.

    Raises:
        ValueError: if the model has fewer blocks.
    """
    kept = blocks(model)
    if not 1 <= num_blocks <= len(kept):
        raise ValueError(
            f"model.num_blocks must lie between 1 and the model's {len(kept)} blocks, got {num_blocks}"
        )
    del kept[num_blocks:]
    config = model.config.get_text_config()
    config.num_hidden_layers = num_blocks
    if getattr(config, "layer_types", None):  # full or sliding attention, block by block
        config.layer_types = config.layer_types[:num_blocks]
    return model


def stream_hidden(model: PreTrainedModel, batch: StreamBatch) -> Tensor:
    """Final hidden states ``(B, N, T, D)`` of the N ordinary passes, one stream each.

    Streams of weight 0 are not run; their rows are zeros, and nothing reads them.
    """
    used = batch.weights > 0  # (B, N)
    hidden = final_hidden(model, input_ids=batch.input_ids[used])  # (streams in use, T, D)
    if bool(used.all()):
        return hidden.view(batch.num_rows, batch.num_streams, batch.length, -1)
    full = hidden.new_zeros(batch.num_rows, batch.num_streams, batch.length, hidden.shape[-1])
    full[used] = hidden
    return full


def mixed_hidden(model: PreTrainedModel, batch: StreamBatch) -> Tensor:
    """Final hidden states ``(B, T, D)`` of the one pass over the mixed input (eq. 1)."""
    mixed = mix_embeddings(embed(model, batch.input_ids), batch.weights)
    return final_hidden(model, inputs_embeds=mixed)


def position_limit(model: PreTrainedModel) -> int | None:
    """The longest sequence the model was made for, in tokens, or None where it names none."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions"):
        if isinstance(limit := getattr(config, name, None), int):
            return limit
    return None


def check_layout(model: PreTrainedModel, name: str) -> None:
    """Prove that embed, final_hidden and output_head compose to the model's own logits.

    Raises:
        ValueError: if they do not, for a family whose forward pass does something of its own.
    """
    # Half precision rounds the two routes apart; float32 agrees to about 1e-6.
    tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2
    vocabulary = output_head(model).weight.shape[0]
    ids = torch.arange(1, 9, device=model.device).remainder(vocabulary).view(1, -1)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits.float()
        hidden = final_hidden(model, inputs_embeds=embed(model, ids))
        composed = output_head(model).logits(hidden)
    scale = expected.abs().max().clamp_min(1.0)
    if not torch.allclose(composed, expected, atol=float(tolerance * scale), rtol=0):
        raise ValueError(
            f"model.path={name}: a {model.config.model_type!r} model does something to its "
            "embeddings or logits that superpose does not reproduce, so its mixed input would be "
            f"wrong; use one of the families {', '.join(TESTED_FAMILIES)}"
        )
