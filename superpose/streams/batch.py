"""The batch that every part of superpose passes on: rows of N token streams with their weights."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StreamBatch:
    """B rows of N streams of T tokens, to be read at once.

    Attributes:
        input_ids: token ids, ``(B, N, T)`` int64.
        attention_mask: 1 for a token, 0 for padding, ``(B, N, T)`` int64. Padding stands on the
            right, so that no token ever attends to it.
        weights: share of each stream in its row's mixture, ``(B, N)`` float32, non-negative, sum 1
            over N. Uniform weights are the paper's mixing, a one-hot row is an ordinary
            single-stream example.
    """

    input_ids: Tensor
    attention_mask: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        """Refuse shapes that do not belong together."""
        if self.input_ids.dim() != 3 or self.input_ids.shape != self.attention_mask.shape:
            raise ValueError(
                "StreamBatch needs input_ids and attention_mask of one shape (B, N, T), got "
                f"{tuple(self.input_ids.shape)} and {tuple(self.attention_mask.shape)}"
            )
        if self.weights.shape != self.input_ids.shape[:2]:
            raise ValueError(
                f"StreamBatch needs weights of shape (B, N) = {tuple(self.input_ids.shape[:2])}, "
                f"got {tuple(self.weights.shape)}"
            )

    @classmethod
    def uniform(cls, input_ids: Tensor, attention_mask: Tensor | None = None) -> "StreamBatch":
        """The paper's batch (eq. 1): every stream of ``input_ids (B, N, T)`` has weight 1/N."""
        num_rows, num_streams, _ = input_ids.shape
        weights = torch.full((num_rows, num_streams), 1.0 / num_streams, device=input_ids.device)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return cls(input_ids, mask, weights)

    @property
    def num_rows(self) -> int:
        """B, the rows."""
        return self.input_ids.shape[0]

    @property
    def num_streams(self) -> int:
        """N, the streams of a row."""
        return self.input_ids.shape[1]

    @property
    def length(self) -> int:
        """T, the positions."""
        return self.input_ids.shape[2]

    @property
    def position_mask(self) -> Tensor:
        """``(B, T)`` bool: positions at which every stream of positive weight has a token."""
        unused = (self.weights == 0).unsqueeze(-1)  # (B, N, 1)
        return (self.attention_mask.bool() | unused).all(dim=1)

    def next_tokens(self) -> tuple[Tensor, Tensor]:
        """What follows each position in each stream, for next-token losses.

        Returns:
            ``labels (B, N, T)``, the next token's id (at the last position one of no meaning), and
            ``predicted (B, N, T)`` bool: the position is one of ``position_mask``, the stream has a
            positive weight there and a token that follows.
        """
        follows = self.attention_mask.roll(-1, dims=2).bool()
        follows[..., -1] = False
        in_use = (self.weights > 0).unsqueeze(-1)  # (B, N, 1)
        predicted = follows & in_use & self.position_mask.unsqueeze(1)
        return self.input_ids.roll(-1, dims=2), predicted

    @property
    def num_predicted(self) -> int:
        """How many tokens :meth:`next_tokens` marks as to be predicted."""
        return int(self.next_tokens()[1].sum())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "StreamBatch":
        """The same batch on another device."""
        return StreamBatch(
            self.input_ids.to(device, non_blocking=non_blocking),
            self.attention_mask.to(device, non_blocking=non_blocking),
            self.weights.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> "StreamBatch":
        """The same batch in page-locked memory (called by the DataLoader)."""
        return StreamBatch(
            self.input_ids.pin_memory(), self.attention_mask.pin_memory(), self.weights.pin_memory()
        )
