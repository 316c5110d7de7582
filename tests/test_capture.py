"""Captured hidden states: what they are, for every family, and that nothing is left behind."""

import pytest
import torch
from families import FAMILIES, VOCABULARY, tiny_model

from superpose.interventions.capture import captured_states, hidden_of
from superpose.models.layout import blocks, embed, final_hidden


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest):
    return tiny_model(request.param)


def some_ids(rows: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def final_norm(model, hidden):
    base = model.base_model
    names = ("norm", "ln_f", "final_layer_norm")
    (norm,) = (module for name, module in base.named_children() if name in names)
    return norm(hidden)


@torch.no_grad()
def test_states_are_block_outputs_before_the_final_norm(model):
    ids = some_ids()
    theirs = model(input_ids=ids, output_hidden_states=True).hidden_states
    with captured_states(model) as states:
        final = final_hidden(model, input_ids=ids)
    assert len(states) == len(blocks(model)) + 1 == len(theirs)
    for ours, reference in zip(states[:-1], theirs[:-1], strict=True):
        assert torch.equal(ours, reference)
    # pitfall: their last state is post-norm
    assert not torch.allclose(states[-1], theirs[-1], atol=1e-2)
    assert torch.equal(final_norm(model, states[-1]), theirs[-1])
    assert torch.equal(final_norm(model, states[-1]), final)


@torch.no_grad()
def test_logits_are_untouched_and_each_pass_starts_anew(model):
    ids = some_ids()
    before = model(input_ids=ids).logits
    with captured_states(model) as states:
        assert torch.equal(model(input_ids=ids).logits, before)
        first = [state.clone() for state in states]
        model(inputs_embeds=embed(model, ids.flip(0)))
    assert len(states) == len(first)
    for one, other in zip(first, states, strict=True):  # both rows, in the other order
        torch.testing.assert_close(one, other.flip(0))
    assert torch.equal(model(input_ids=ids).logits, before)


def hooks_of(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hooks_are_removed_after_an_exception_too(model):
    before = hooks_of(model)
    with captured_states(model):
        assert hooks_of(model) == before + len(blocks(model)) + 1
    with pytest.raises(IndexError), captured_states(model):
        model(input_ids=torch.tensor([[VOCABULARY]]))
    assert hooks_of(model) == before


def test_tuples_are_unpacked_and_other_shapes_refused():
    hidden = torch.zeros(2, 3, 8)
    assert hidden_of((hidden, None), 8) is hidden
    assert hidden_of(hidden, 8) is hidden
    for wrong in (hidden[0], torch.zeros(2, 3, 9), None, (None, hidden)):
        with pytest.raises(ValueError, match=r"expected hidden states \(B, T, 8\)"):
            hidden_of(wrong, 8, "odd")
