"""A GGUF file, written here from a tiny Llama, loads to the same model."""

import json
import logging

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from superpose.models.loading import load
from superpose.models.tiny import train_tokenizer

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

HEADS = 4


def permuted(weight: torch.Tensor) -> torch.Tensor:
    """Rows of a query or key projection in llama.cpp's order of rotary pairs."""
    rows, columns = weight.shape
    return weight.view(HEADS, 2, rows // HEADS // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, model, tokenizer) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(bpe["vocab"], key=bpe["vocab"].get))
    writer.add_token_types([3 if i == 0 else 1 for i in range(len(bpe["vocab"]))])
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "model.layers": "blk",
    }  # fmt: skip
    for name, weight in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = permuted(weight)
        for old, new in names.items():
            name = name.replace(old, new)
        writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    tokenizer = train_tokenizer(["The quick brown fox jumps over the lazy dog."] * 3, 300)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=HEADS, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    write_gguf(folder / "tiny.gguf", model, tokenizer)
    return folder, model, tokenizer


def test_gguf_gives_the_model_it_was_written_from(written, caplog):
    folder, model, tokenizer = written
    caplog.set_level(logging.WARNING)
    loaded = load(str(folder), gguf_file="tiny.gguf")
    ids = torch.tensor([tokenizer("the lazy fox jumps")["input_ids"]])
    assert loaded.tokenizer("the lazy fox jumps")["input_ids"][-ids.shape[1] :] == ids[0].tolist()
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.model(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4
        )
    assert loaded.model.dtype == torch.float32
    assert "may not have been converted rightly" in caplog.text  # random weights know no English


def test_a_model_from_gguf_can_be_saved_and_loaded_again(written, tmp_path):
    folder, _, _ = written
    loaded = load(str(folder), gguf_file="tiny.gguf")
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    assert load(str(tmp_path)).fingerprint() == loaded.fingerprint()
