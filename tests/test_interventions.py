"""Attention patching on every family: exact limits, invariants, and what is restored."""

import pytest
import torch
from families import FAMILIES, VOCABULARY, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from superpose.interventions.attention import (
    check_patchable,
    donor_attention,
    permute_rows,
    permuted_attention,
    recorded_attention,
)

LENGTH = 11  # above the sliding window of 4


def texts(seed: int, rows: int = 2, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (rows, length), generator=generator)


@pytest.fixture(params=sorted(FAMILIES))
def model(request):
    model = tiny_model(request.param)
    with torch.no_grad():
        yield model


def logits_of(model, ids):
    return model(input_ids=ids, use_cache=False).logits


def recording(model, ids):
    with recorded_attention(model) as weights:
        logits = logits_of(model, ids)
    return logits, weights


def permuted(model, ids, seeds):
    """Logits, and the permuted weights as the model itself hands them out."""
    with permuted_attention(model, seeds):
        found = model(input_ids=ids, use_cache=False, output_attentions=True)
    return found.logits, found.attentions


def test_recording_is_the_models_own_eager_attention(model):
    logits, weights = recording(model, texts(0))
    model.set_attn_implementation("eager")
    expected = model(input_ids=texts(0), use_cache=False, output_attentions=True)
    torch.testing.assert_close(logits, expected.logits, atol=1e-5, rtol=0)
    assert len(weights) == len(expected.attentions) == 2
    for layer_index, attention in enumerate(expected.attentions):
        torch.testing.assert_close(weights[layer_index], attention, atol=1e-5, rtol=0)


def test_the_text_itself_as_donor_changes_nothing(model):
    logits, weights = recording(model, texts(0))
    with donor_attention(model, weights):
        assert torch.equal(logits_of(model, texts(0)), logits)


def test_a_donor_gives_its_weights_and_nothing_else(model):
    clean, _ = recording(model, texts(0))
    _, donor = recording(model, texts(1))
    with donor_attention(model, donor):
        found = model(input_ids=texts(0), use_cache=False, output_attentions=True)
    for layer_index, attention in enumerate(found.attentions):
        assert torch.equal(attention, donor[layer_index])
    assert (found.logits - clean).abs().max() > 0.01
    # the first position attends to itself alone, whoever's weights they are
    torch.testing.assert_close(found.logits[:, 0], clean[:, 0], atol=1e-5, rtol=0)


def test_permuted_rows_keep_causality_sum_and_multiset(model):
    # the first layer's input is that of the clean pass, so its own weights are known
    _, weights = recording(model, texts(0))
    logits, attentions = permuted(model, texts(0), [3, 4])
    own, changed = weights[0], attentions[0]
    assert (own != changed).any()
    assert torch.equal(own.sort(dim=-1).values, changed.sort(dim=-1).values)
    for attention in attentions:
        assert torch.equal(attention, attention.tril())
        torch.testing.assert_close(attention.sum(dim=-1), torch.ones(2, 4, LENGTH))
    for before, after in zip(weights.values(), attentions, strict=True):
        assert torch.equal(before == 0, after == 0)  # windows too
    again, _ = permuted(model, texts(0), [3, 4])
    other, _ = permuted(model, texts(0), [3, 5])
    assert torch.equal(logits, again)
    assert torch.equal(logits[0], other[0])
    assert not torch.equal(logits[1], other[1])


def test_permuted_passes_are_causal_and_do_not_depend_on_the_batch(model):
    changed = texts(0)
    changed[:, 6:] = texts(9)[:, 6:]
    logits, _ = permuted(model, texts(0), [3, 4])
    other, _ = permuted(model, changed, [3, 4])
    torch.testing.assert_close(logits[:, :6], other[:, :6], atol=1e-5, rtol=0)
    alone, _ = permuted(model, texts(0)[1:], [4])
    torch.testing.assert_close(alone, logits[1:], atol=1e-5, rtol=0)


def test_everything_is_as_before_after_the_context_and_after_an_exception(model):
    before, implementation = logits_of(model, texts(0)), model.config._attn_implementation
    _, donor = recording(model, texts(1))
    for context in (
        lambda: recorded_attention(model),
        lambda: donor_attention(model, donor),
        lambda: permuted_attention(model, [0, 1]),
    ):
        with context():
            logits_of(model, texts(0))
        assert torch.equal(logits_of(model, texts(0)), before)
        with pytest.raises(IndexError), context():
            logits_of(model, texts(0) + VOCABULARY)  # fails inside the pass
        assert torch.equal(logits_of(model, texts(0)), before)
        assert model.config._attn_implementation == implementation


def test_every_family_can_be_patched(model):
    check_patchable(model, "tiny")


def test_permutations_are_uniform():
    """Every one of the 6 orders of 3 allowed positions, about as often as the others."""
    weights = torch.tensor([0.5, 0.3, 0.2, 0.0]).expand(1, 6000, 1, 4)
    allowed = torch.tensor([True, True, True, False])
    found = permute_rows(weights, allowed, [torch.Generator().manual_seed(0)])[0, :, 0]
    orders, counts = found.unique(dim=0, return_counts=True)
    assert len(orders) == 6
    assert (orders[:, 3] == 0).all()
    assert ((counts - 1000).abs() < 150).all()


def test_a_donor_of_another_length():
    model = tiny_model("llama")
    _, donor = recording(model, texts(0, length=5))
    message = "donor of 5 tokens cannot be used in a text of 11 tokens"
    with donor_attention(model, donor), pytest.raises(ValueError, match=message):
        logits_of(model, texts(0))


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (
            "bloom",
            {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50},
            "model.path=x: the attention of a 'bloom' model cannot be patched, because it does not "
            "go through transformers.AttentionInterface; patching needs every layer",
        ),
        (
            "lfm2",
            {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 50,
             "num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": None,
             "eos_token_id": 0, "pad_token_id": None,
             "layer_types": ["full_attention", "conv"]},
            "model.path=x: only 1 of 2 layers attend through transformers.AttentionInterface",
        ),
    ],
)  # fmt: skip
def test_an_architecture_that_cannot_be_patched(family, settings, message):
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=message):
        check_patchable(model, "x")
