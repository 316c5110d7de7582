"""StreamBatch, mixing and the drawing of weights."""

import pytest
import torch

from superpose.streams.batch import StreamBatch
from superpose.streams.mixing import draw_weights, mix_embeddings


def test_mixing_is_the_weighted_mean():
    embeddings = torch.tensor([[[[1.0, 2.0]], [[3.0, 6.0]]]])  # (1, 2, 1, 2)
    uniform = mix_embeddings(embeddings, torch.tensor([[0.5, 0.5]]))
    assert torch.equal(uniform, torch.tensor([[[2.0, 4.0]]]))
    weighted = mix_embeddings(embeddings, torch.tensor([[0.25, 0.75]]))
    assert torch.equal(weighted, torch.tensor([[[2.5, 5.0]]]))


def test_one_hot_row_is_its_stream_to_the_bit():
    embeddings = torch.randn(2, 3, 5, 7)
    weights = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    mixed = mix_embeddings(embeddings, weights)
    assert torch.equal(mixed[0], embeddings[0, 1])
    assert torch.equal(mixed[1], embeddings[1, 2])


def test_position_mask_ignores_streams_without_weight():
    mask = torch.tensor([[[1, 1, 0], [1, 0, 0]]])
    ids = torch.zeros_like(mask)
    both = StreamBatch(ids, mask, torch.tensor([[0.5, 0.5]]))
    assert both.position_mask.tolist() == [[True, False, False]]
    first = StreamBatch(ids, mask, torch.tensor([[1.0, 0.0]]))
    assert first.position_mask.tolist() == [[True, True, False]]


@pytest.mark.parametrize("distribution", ["uniform", "dirichlet"])
@pytest.mark.parametrize("num_streams", [1, 2, 3, 8])
def test_weights_are_mixtures(distribution, num_streams):
    generator = torch.Generator().manual_seed(0)
    weights = draw_weights(1000, num_streams, distribution, 0.25, generator)
    assert weights.shape == (1000, num_streams)
    assert (weights >= 0).all()
    assert torch.allclose(weights.sum(dim=1), torch.ones(1000))
    if num_streams > 1:
        one_hot = (weights.max(dim=1).values == 1).float().mean()
        assert one_hot == pytest.approx(0.25, abs=0.04)
        assert torch.allclose(
            weights.mean(dim=0), torch.full((num_streams,), 1 / num_streams), atol=0.05
        )


def test_dirichlet_is_uniform_over_the_simplex():
    weights = draw_weights(20000, 3, "dirichlet", 0.0, torch.Generator().manual_seed(0))
    # Dirichlet(1, 1, 1): each weight has variance (1/3)(2/3)/4
    assert weights.var(dim=0).numpy() == pytest.approx([1 / 18] * 3, rel=0.05)


def test_weights_repeat_with_the_generator():
    first = draw_weights(5, 3, "dirichlet", 0.5, torch.Generator().manual_seed(7))
    again = draw_weights(5, 3, "dirichlet", 0.5, torch.Generator().manual_seed(7))
    other = draw_weights(5, 3, "dirichlet", 0.5, torch.Generator().manual_seed(8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 0), "streams.num_streams must be at least 1, got 0"),
        ((4, 2, "normal"), "streams.weights must be one of uniform, dirichlet, got 'normal'"),
        ((4, 2, "uniform", 1.5), "streams.retention must lie between 0 and 1"),
    ],
)
def test_impossible_settings_name_their_key(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw_weights(*arguments)


def test_shapes_that_do_not_belong_together():
    with pytest.raises(ValueError, match="one shape"):
        StreamBatch(torch.zeros(1, 2, 3), torch.zeros(1, 2, 4), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"weights of shape \(B, N\) = \(1, 2\)"):
        StreamBatch(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.ones(1, 3))
