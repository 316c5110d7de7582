"""Exact limits of the mixed pass for every family, loading, teacher and student."""

import copy
import json
import shutil

import pytest
import torch
from families import FAMILIES, VOCABULARY, tiny_model
from word_models import word_tokenizer

from superpose.models.layout import (
    OutputHead,
    check_layout,
    embed,
    final_hidden,
    mixed_hidden,
    output_head,
    position_limit,
    stream_hidden,
)
from superpose.models.loading import LanguageModel, load
from superpose.models.students import freeze, student_of
from superpose.streams.batch import StreamBatch


def random_batch(num_streams: int, length: int = 9, rows: int = 2) -> StreamBatch:
    generator = torch.Generator().manual_seed(num_streams)
    ids = torch.randint(1, VOCABULARY, (rows, num_streams, length), generator=generator)
    return StreamBatch.uniform(ids)


def mixed_logits(model, batch):
    return output_head(model).logits(mixed_hidden(model, batch))


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request):
    model = tiny_model(request.param)
    with torch.no_grad():
        yield model


def test_one_stream_is_the_ordinary_model(model):
    batch = random_batch(1)
    expected = model(input_ids=batch.input_ids[:, 0]).logits
    torch.testing.assert_close(mixed_logits(model, batch), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_streams", [2, 3, 4, 8])
def test_equal_streams_are_one_stream(model, num_streams):
    ids = random_batch(1).input_ids
    batch = StreamBatch.uniform(ids.expand(-1, num_streams, -1))
    expected = model(input_ids=ids[:, 0]).logits
    torch.testing.assert_close(mixed_logits(model, batch), expected, atol=2e-4, rtol=1e-4)


def test_one_hot_weights_are_one_stream(model):
    batch = random_batch(3)
    weights = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    one_hot = StreamBatch(batch.input_ids, batch.attention_mask, weights)
    chosen = torch.stack([batch.input_ids[0, 1], batch.input_ids[1, 2]])
    expected = model(input_ids=chosen).logits
    torch.testing.assert_close(mixed_logits(model, one_hot), expected, atol=1e-5, rtol=1e-5)


def test_order_of_streams_does_not_matter(model):
    batch = random_batch(3)
    turned = StreamBatch.uniform(batch.input_ids.flip(1))
    torch.testing.assert_close(
        mixed_logits(model, turned), mixed_logits(model, batch), atol=2e-4, rtol=1e-4
    )


def test_mixing_differs_from_every_stream(model):
    batch = random_batch(2)
    single = model(input_ids=batch.input_ids[:, 0]).logits
    assert (mixed_logits(model, batch) - single).abs().max() > 0.05


def test_padding_changes_nothing(model):
    short = random_batch(2, length=6)
    padded = torch.nn.functional.pad(short.input_ids, (0, 5), value=0)
    mask = torch.nn.functional.pad(short.attention_mask, (0, 5), value=0)
    batch = StreamBatch.uniform(padded, mask)
    assert batch.position_mask.sum(dim=1).tolist() == [6, 6]
    torch.testing.assert_close(
        mixed_logits(model, batch)[:, :6], mixed_logits(model, short), atol=1e-5, rtol=1e-5
    )


def test_rows_do_not_see_each_other(model):
    batch = random_batch(2)
    alone = StreamBatch.uniform(batch.input_ids[1:])
    torch.testing.assert_close(
        mixed_logits(model, batch)[1:], mixed_logits(model, alone), atol=1e-5, rtol=1e-5
    )


def test_streams_in_use_are_the_only_ones_run(model):
    batch = random_batch(2)
    weights = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    hidden = stream_hidden(model, StreamBatch(batch.input_ids, batch.attention_mask, weights))
    assert (hidden[0, 1] == 0).all()
    expected = final_hidden(model, input_ids=batch.input_ids[:, 0])
    torch.testing.assert_close(hidden[:, 0], expected, atol=1e-5, rtol=1e-5)


def test_layout_is_proved_and_a_foreign_one_refused(model):
    check_layout(model, "tiny")
    assert position_limit(model) == 64
    broken = copy.deepcopy(model)
    original = broken.base_model.forward

    def forward(input_ids=None, *args, inputs_embeds=None, **kwargs):
        if input_ids is not None:  # a family that embeds ids differently from its module
            inputs_embeds = embed(broken, input_ids) * torch.linspace(0.5, 2.0, 32)
        return original(None, *args, inputs_embeds=inputs_embeds, **kwargs)

    broken.base_model.forward = forward
    with pytest.raises(ValueError, match="mixed input would be wrong"):
        check_layout(broken, "odd")


def test_gemma_input_is_scaled_by_its_module():
    gemma = tiny_model("gemma2")
    ids = torch.arange(5)
    rows = gemma.get_input_embeddings().weight[ids]
    assert torch.allclose(embed(gemma, ids), rows * 32**0.5, rtol=1e-3)


def test_head_with_scale_and_softcap():
    head = OutputHead(torch.eye(2), torch.tensor([1.0, 0.0]), softcap=2.0, scale=0.5)
    logits = head.logits(torch.tensor([[3.0, 1.0]]))
    expected = 2.0 * torch.tanh(torch.tensor([[2.0, 0.5]]) / 2.0)
    torch.testing.assert_close(logits, expected)


def test_student_shares_nothing_with_the_teacher():
    teacher = freeze(tiny_model("qwen2").to(torch.bfloat16))
    student = student_of(teacher)
    assert student.training
    assert not teacher.training
    assert {p.dtype for p in student.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in student.parameters())
    assert not any(p.requires_grad for p in teacher.parameters())
    theirs = {p.data_ptr() for p in teacher.parameters()}
    assert theirs.isdisjoint(p.data_ptr() for p in student.parameters())


def test_student_of_a_tied_teacher_is_tied():
    teacher = tiny_model("gpt2")
    assert teacher.config.tie_word_embeddings
    student = student_of(teacher)
    assert student.get_output_embeddings().weight is student.get_input_embeddings().weight


@pytest.fixture
def folder(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_load_gives_float32_whatever_the_file_says(folder):
    tiny_model("llama").to(torch.bfloat16).save_pretrained(folder)
    assert load(str(folder)).model.dtype == torch.float32
    assert load(str(folder), dtype="bfloat16").model.dtype == torch.bfloat16


def test_load_twice_is_one_function(folder):
    first, second = load(str(folder)), load(str(folder))
    assert first.fingerprint() == second.fingerprint()
    assert not first.model.training
    assert first.name == "model"
    with torch.no_grad():
        next(second.model.parameters()).add_(1e-3)
    assert first.fingerprint() != second.fingerprint()


def test_random_init_draws_by_seed(folder):
    torch.manual_seed(1)
    first = load(str(folder), random_init=True)
    torch.manual_seed(1)
    again = load(str(folder), random_init=True)
    assert first.fingerprint() == again.fingerprint() != load(str(folder)).fingerprint()


def test_logits_wider_than_the_tokenizer_are_fine(folder):
    model = load(str(folder))
    assert model.num_tokens == 61 < output_head(model.model).weight.shape[0] == VOCABULARY


def test_length_above_the_limit_names_key_and_limit(folder):
    model = load(str(folder))
    model.check_length(64, "data.length")
    with pytest.raises(ValueError, match=r"data.length=65 is above the 64 positions of model"):
        model.check_length(65, "data.length")


def test_bad_folders(folder, tmp_path):
    with pytest.raises(ValueError, match=r"model.path=/no/such/place does not exist"):
        load("/no/such/place")
    with pytest.raises(ValueError, match="model.dtype must be one of"):
        load(str(folder), dtype="int4")
    with pytest.raises(ValueError, match="is a file, expected a folder"):
        load(str(folder / "config.json"))
    with pytest.raises(ValueError, match=r"model.gguf_file=x.gguf is not in"):
        load(str(folder), gguf_file="x.gguf")
    with pytest.raises(ValueError, match="no config.json"):
        load(str(tmp_path))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no weights \(\*.safetensors\)"):
        load(str(folder))


def test_truncated_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ValueError, match="could not be loaded"):
        load(str(folder))


def test_tokenizer_larger_than_the_model(folder):
    config = json.loads((folder / "config.json").read_text())
    shutil.rmtree(folder)
    from transformers import LlamaConfig, LlamaForCausalLM

    small = LlamaConfig(**{**config, "vocab_size": 50})
    LlamaForCausalLM(small).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    with pytest.raises(ValueError, match="knows 61 tokens but the model has 50 embeddings"):
        load(str(folder))


def test_unreachable_hub_names_the_way_out():
    with pytest.raises(ValueError, match=r"model.path=nobody/nothing .* could not be loaded"):
        load("nobody/nothing")


def test_name_with_revision():
    model = LanguageModel(tiny_model("llama"), word_tokenizer(), "some/where", revision="step1000")
    assert model.name == "where@step1000"
