"""The residual stream at every depth: the input of the first block and the output of each.

Transformers' own ``output_hidden_states`` is not used: the last of its states lies after the final
norm and the others do not, so numbers of the last block would be of something else.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from superpose.models.layout import blocks


@contextmanager
def captured_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Keep the hidden states of the last forward pass made inside the ``with``.

    Args:
        model: a model of L blocks.

    Yields:
        A list that each pass fills with L + 1 tensors ``(B, T, D)``, without gradients: index 0 is
        what enters the first block (embeddings, with positions where the model adds them), index l
        the output of block l, counted from 1. None of them has passed the final norm.

    Raises:
        ValueError: if a block hands on something else than ``(B, T, D)``.
    """
    states: list[Tensor] = []
    width = model.config.get_text_config().hidden_size
    kind = model.config.model_type

    def before_first(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        entering = args[0] if args else kwargs["hidden_states"]
        states[:] = [hidden_of(entering, width, kind).detach()]

    def after_block(module: torch.nn.Module, args: tuple, output: Any) -> None:
        states.append(hidden_of(output, width, kind).detach())

    with ExitStack() as hooks:
        chain = blocks(model)
        first = chain[0].register_forward_pre_hook(before_first, with_kwargs=True)
        hooks.callback(first.remove)
        for block in chain:
            hooks.callback(block.register_forward_hook(after_block).remove)
        yield states


def hidden_of(output: Any, width: int, kind: str = "") -> Tensor:
    """The hidden states ``(B, T, D)`` in what a block returns, a tensor or a tuple that begins so.

    Args:
        output: what the module returned.
        width: D.
        kind: model type, for the error.

    Raises:
        ValueError: for another rank or width.
    """
    hidden = output[0] if isinstance(output, tuple) else output
    if not isinstance(hidden, Tensor) or hidden.dim() != 3 or hidden.shape[-1] != width:
        found = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise ValueError(
            f"a block of a {kind!r} model hands on {found}, expected hidden states (B, T, {width}); "
            "this architecture cannot be captured"
        )
    return hidden
