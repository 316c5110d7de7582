"""Additivity (eq. 8) against brute force, and where its value is known."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, VOCABULARY, tiny_model
from word_models import MAX_LENGTH, NUM_WORDS, word_model, word_tokenizer

from superpose.config import AdditivitySettings
from superpose.data.datamodule import batched
from superpose.data.groups import Group
from superpose.models.layout import blocks, embed, final_hidden
from superpose.models.loading import LanguageModel
from superpose.suites.additivity import AdditivityResult, additivity, additivity_error

LENGTHS = ((16, 11), (16, 16), (5, 16), (16, 16), (13, 12))


def pairs(num_streams: int = 2, vocabulary: int = NUM_WORDS, pad: int = 3) -> list[Group]:
    generator = torch.Generator().manual_seed(0)
    groups = []
    for lengths in LENGTHS:
        ids = torch.randint(vocabulary, (num_streams, 16), generator=generator)
        ends = torch.tensor([*lengths, 16][:num_streams])
        mask = (torch.arange(16) < ends[:, None]).long()
        groups.append(Group(torch.where(mask == 1, ids, pad), mask))
    return groups


def run(model: LanguageModel, groups: list[Group], **settings: Any) -> AdditivityResult:
    chosen = AdditivitySettings(**settings)
    return additivity(model, list(batched(groups, chosen.batch_size)), chosen)


@torch.no_grad()
def brute_force(model: LanguageModel, groups: list[Group]) -> list[float]:
    """E_l from all states at once, pass by pass, with numpy."""
    count = len(blocks(model.model)) + 1
    kept: list[list[np.ndarray]] = [[] for _ in range(count)]  # (P, N + 1, D) of each group
    for group in groups:
        valid = group.attention_mask.bool().all(dim=0)
        streams = embed(model.model, group.input_ids)
        runs = []
        for inputs in (*streams, streams.mean(dim=0)):
            seen: list[torch.Tensor] = []
            hooks = [
                block.register_forward_hook(lambda *call, seen=seen: seen.append(call[-1][0]))
                for block in blocks(model.model)
            ]
            first = blocks(model.model)[0].register_forward_pre_hook(
                lambda module, args, seen=seen: seen.append(args[0][0])
            )
            final_hidden(model.model, inputs_embeds=inputs[None])
            for hook in (*hooks, first):
                hook.remove()
            runs.append(torch.stack(seen)[:, valid])  # (L + 1, P, D)
        for index in range(count):
            stacked = torch.stack([states[index] for states in runs], dim=1)
            kept[index].append(stacked.double().numpy())
    errors = []
    for of_index in kept:
        states = np.concatenate(of_index)
        states = states - states.mean(axis=0)
        mixed, summed = states[:, -1], states[:, :-1].sum(axis=1)
        mixed = mixed / np.maximum(np.linalg.norm(mixed, axis=1, keepdims=True), 1e-12)
        summed = summed / np.maximum(np.linalg.norm(summed, axis=1, keepdims=True), 1e-12)
        errors.append(float(np.linalg.norm(mixed - summed, axis=1).mean()))
    return errors


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("num_streams", [2, 3])
def test_equal_to_brute_force_at_any_batch_size(family: str, num_streams: int) -> None:
    model, groups = word_model(family), pairs(num_streams)
    expected = brute_force(model, groups)
    assert max(expected) > 0.1
    for batch_size in (1, 2, 8):
        result = run(model, groups, batch_size=batch_size)
        np.testing.assert_allclose(result.errors, expected, atol=1e-6)
        assert result.counts == {"groups": 5, "positions": 11 + 16 + 5 + 16 + 12}


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_streams_are_additive_and_the_input_always_is(family: str) -> None:
    model = LanguageModel(tiny_model(family), word_tokenizer(), family)
    groups = pairs(vocabulary=VOCABULARY)
    full = [Group(group.input_ids, torch.ones_like(group.input_ids)) for group in groups]
    errors = run(model, full).errors
    assert errors[0] == pytest.approx(0, abs=1e-6)  # the mean of embeddings points as their sum
    assert min(errors[1:]) > 1e-2
    same = [Group(g.input_ids[:1].repeat(2, 1), torch.ones_like(g.input_ids)) for g in groups]
    assert run(model, same).errors == pytest.approx([0] * len(errors), abs=1e-4)


def test_stream_order_and_padding_do_not_matter() -> None:
    model = word_model()
    expected = run(model, pairs()).errors
    swapped = [Group(g.input_ids.flip(0), g.attention_mask.flip(0)) for g in pairs()]
    assert run(model, swapped).errors == pytest.approx(expected, abs=1e-6)
    assert run(model, pairs(pad=9)).errors == expected


def test_error_of_known_directions() -> None:
    def error(mixed: list[float], *streams: list[float]) -> float:
        return float(additivity_error(torch.tensor([[*streams, mixed]])))

    assert error([3.0, 0.0], [0.5, 1.0], [0.5, -1.0]) == pytest.approx(0)
    assert error([0.0, 5.0], [0.5, 1.0], [0.5, -1.0]) == pytest.approx(math.sqrt(2))
    assert error([-1.0, 0.0], [1.0, 0.0], [1.0, 0.0]) == pytest.approx(2)


def test_mean_and_standard_error_over_indices() -> None:
    result = AdditivityResult([0.0, 0.3, 0.6], {})
    assert result.metrics() == {
        "additivity.mean": pytest.approx(0.3),
        "additivity.standard_error": pytest.approx(0.3 / math.sqrt(3)),
    }
    assert result.tables()["additivity.layers"][1] == {"layer": 1, "error": 0.3}


def test_bad_input_is_one_sentence() -> None:
    model = word_model()
    with pytest.raises(ValueError, match=r"suite\.limit must be at least 1, got 0"):
        run(model, pairs(), limit=0)
    with pytest.raises(ValueError, match=r"streams\.num_streams=1, but suite=additivity adds up"):
        run(model, pairs(num_streams=1))
    apart = torch.tensor([[1, 0], [0, 1]])
    for nothing in ([], [Group(torch.ones_like(apart), apart)]):
        with pytest.raises(ValueError, match="no positions at which all texts"):
            run(model, nothing)
    ids = torch.ones(2, MAX_LENGTH + 1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"data\.length=49 is above the 48 positions"):
        run(model, [Group(ids, ids)])
    with torch.no_grad():
        model.model.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        run(model, pairs())
