"""Linearity of blocks, against numpy on all states at once, and for a block that is linear."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from word_models import MAX_LENGTH, NUM_WORDS, word_model

from superpose.config import LayerLinearitySettings
from superpose.data.datamodule import batched
from superpose.data.groups import Group
from superpose.models.layout import blocks
from superpose.models.loading import LanguageModel
from superpose.suites.layer_linearity import LayerLinearityResult, layer_linearity

LENGTHS = (24, 9, 24, 17, 24, 24, 13, 24)


def texts(pad: int = 3) -> list[Group]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(NUM_WORDS, (len(LENGTHS), 1, 24), generator=generator)
    masks = (torch.arange(24) < torch.tensor(LENGTHS)[:, None, None]).long()
    return [
        Group(torch.where(mask == 1, row, pad), mask) for row, mask in zip(ids, masks, strict=True)
    ]


def run(model: LanguageModel, groups: list[Group], **settings: Any) -> LayerLinearityResult:
    chosen = LayerLinearitySettings(**settings)
    return layer_linearity(model, list(batched(groups, chosen.batch_size)), chosen)


@torch.no_grad()
def states_of(model: LanguageModel, groups: list[Group]) -> list[np.ndarray]:
    """Every block's input and the last one's output, by each block's own forward."""
    found: list[list[Tensor]] = [[] for _ in range(len(blocks(model.model)) + 1)]
    for group in groups:
        ids = group.input_ids[0][group.attention_mask[0].bool()][None]
        entering = model.model(input_ids=ids, output_hidden_states=True).hidden_states[:-1]
        last: list[Tensor] = []
        block = blocks(model.model)[-1]
        hook = block.register_forward_hook(lambda *call, last=last: last.append(call[-1]))
        model.model(input_ids=ids)
        hook.remove()
        for index, state in enumerate((*entering, last[0])):
            found[index].append(state[0])
    return [torch.cat(states).double().numpy() for states in found]


def score(x: np.ndarray, y: np.ndarray) -> float:
    """Razzhigaev's definition, step by step."""
    x, y = x - x.mean(0), y - y.mean(0)
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    matrix = np.linalg.lstsq(x, y, rcond=None)[0]
    return 1 - np.linalg.norm(x @ matrix - y) ** 2


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_equal_to_the_definition_at_any_batch_size(family: str, batch_size: int) -> None:
    model = word_model(family)
    result = run(model, texts(), batch_size=batch_size)
    states = states_of(model, texts())
    for layer, x, y in zip(result.layers, states[:-1], states[1:], strict=True):
        assert layer.linearity == pytest.approx(score(x, y), abs=1e-6)
        assert layer.linearity_increment == pytest.approx(score(x, y - x), abs=1e-6)
        values = np.linalg.eigvalsh(np.cov(x.T))
        assert layer.rank == 32
        assert layer.condition_number == pytest.approx(values[-1] / values[0], rel=1e-3)
    assert result.counts == {"texts": 8, "tokens": sum(LENGTHS), "hidden_size": 32}


def test_what_stands_in_the_padding_does_not_matter() -> None:
    model = word_model()
    assert run(model, texts(pad=3)).layers == run(model, texts(pad=9)).layers


def test_a_linear_block_scores_one_and_an_empty_one_too() -> None:
    model = word_model()
    first, last = blocks(model.model)
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    for block in (first, last):  # nothing but the residual stream
        torch.nn.init.zeros_(block.self_attn.o_proj.weight)
        torch.nn.init.zeros_(block.mlp.down_proj.weight)
    hook = first.register_forward_hook(lambda module, args, output: output @ weight + 1.0)
    linear, empty = run(model, texts()).layers
    hook.remove()
    assert linear.linearity == pytest.approx(1, abs=1e-9)
    assert linear.linearity_increment == pytest.approx(1, abs=1e-9)
    assert (empty.linearity, empty.linearity_increment) == (pytest.approx(1), 1.0)


def test_thirds_mean_and_minimum() -> None:
    def result(*scores: float) -> dict[str, float]:
        from superpose.suites.layer_linearity import Layer

        layers = [Layer(value, value / 2, 4, 1.0) for value in scores]
        return LayerLinearityResult(layers, {}).metrics()

    seven = result(0.7, 0.6, 0.5, 0.1, 0.2, 0.3, 0.9)
    assert seven["layer_linearity.first_third"] == pytest.approx(0.6)
    assert seven["layer_linearity.middle_third"] == pytest.approx(0.1)
    assert seven["layer_linearity.last_third"] == pytest.approx(1.4 / 3)
    assert seven["layer_linearity.min"] == 0.1
    assert seven["layer_linearity.mean"] == pytest.approx(3.3 / 7)
    assert seven["layer_linearity.increment.min"] == 0.05
    assert result(0.4)["layer_linearity.middle_third"] == 0.4
    assert result(0.4, 0.8)["layer_linearity.last_third"] == 0.8


def test_bad_input_is_one_sentence() -> None:
    model = word_model()
    for settings, message in (
        ({"limit": 0}, r"suite\.limit must be at least 1, got 0"),
        ({"batch_size": 0}, r"suite\.batch_size must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            run(model, texts(), **settings) if "limit" in settings else layer_linearity(
                model, [], LayerLinearitySettings(**settings)
            )
    with pytest.raises(ValueError, match=r"got 24 tokens in 1 texts, but needs more than the 32"):
        run(model, texts()[:1])
    with pytest.raises(ValueError, match=r"needs more than the 32 dimensions"):
        run(model, [])
    ids = torch.ones(1, MAX_LENGTH + 1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"data\.length=49 is above the 48 positions"):
        run(model, [Group(ids, ids)])
    with torch.no_grad():
        model.model.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        run(model, texts())
