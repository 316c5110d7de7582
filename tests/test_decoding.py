"""Decoding N streams from one mixed pass: known limits, caches, mistakes."""

import logging

import pytest
import torch
from families import FAMILIES, VOCABULARY, tiny_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from word_models import MAX_LENGTH, NUM_WORDS, word_model

from superpose.decoding import JointContrastive, Raw, TwoHead, generate
from superpose.decoding.generate import Tokens, generate_from_ids
from superpose.decoding.mixed_pass import MixedPass, right_aligned
from superpose.models.layout import output_head
from superpose.models.loading import LanguageModel


def family_model(family: str, seed: int = 0) -> LanguageModel:
    """A tiny model with a tokenizer that names all of its tokens, and no end of text."""
    vocabulary = {f"t{index}": index for index in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary)))
    model = tiny_model(family, seed)
    # untied: with tied random weights a model tends to repeat its last token for ever
    model.get_output_embeddings().weight = torch.nn.Parameter(torch.randn(VOCABULARY, 32))
    return LanguageModel(model, tokenizer, family)


def prompts(*lengths: int, groups: int = 1, seed: int = 0) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
        for _ in range(groups)
    ]


def huggingface(model: LanguageModel, ids: list[int], count: int, use_cache: bool = True):
    made = model.model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=count, do_sample=False, use_cache=use_cache, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return made[0, len(ids) :].tolist()


def continued(model: LanguageModel, groups: Tokens, decoder=None, **settings) -> Tokens:
    settings = {"max_new_tokens": 12, "stop_at_eos": False} | settings
    return generate_from_ids(model, groups, decoder or Raw(), **settings).token_ids


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_stream_and_equal_streams_are_ordinary_generation(family, use_cache, length):
    model = family_model(family)
    (ids,) = prompts(length)[0]
    expected = huggingface(model, ids, 12, use_cache)
    assert len(set(expected)) > 1
    assert continued(model, [[ids]], use_cache=use_cache) == [[expected]]
    for num_streams in (2, 3):
        same = continued(model, [[ids] * num_streams], use_cache=use_cache)
        assert same == [[expected] * num_streams]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_changes_nothing(family):
    model, groups = family_model(family), prompts(7, 5, 7, groups=2)
    with torch.no_grad():
        cached, fresh = MixedPass(model, Raw()), MixedPass(model, Raw(), use_cache=False)
        of_cached, of_fresh = cached.start(groups), fresh.start(groups)
        for _ in range(6):
            torch.testing.assert_close(of_cached, of_fresh, atol=1e-4, rtol=1e-4)
            tokens = of_fresh.argmax(-1).T
            of_cached, of_fresh = cached.step(tokens), fresh.step(tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_pass_is_the_mean_of_embeddings_step_by_step(family):
    """Against the plainest code: embed, average, run everything again."""
    model = family_model(family)
    a, b = prompts(6, 4, seed=3)[0]
    (first, second) = continued(model, [[a, b]], max_new_tokens=5)[0]
    assert first == second  # raw streams share their logits
    embeddings = model.model.get_input_embeddings()
    for count in range(5):
        ids = [torch.tensor([*stream, *first[:count]]) for stream in (a, b)]
        mixed = embeddings(ids[0])
        mixed = torch.cat([mixed[:2], (mixed[2:] + embeddings(ids[1])) / 2])
        logits = model.model(inputs_embeds=mixed[None]).logits[0, -1]
        assert first[count] == int(logits.argmax())


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_of_a_batch_do_not_touch_each_other(family):
    model, guide = family_model(family), family_model(family, seed=1)
    decoder = JointContrastive(model, guide, alpha=0.5, beta=0.7)
    groups = [*prompts(9, 5), *prompts(2, 1, seed=1), *prompts(4, 7, seed=2)]
    together = continued(model, groups, decoder)
    assert together == [continued(model, [group], decoder)[0] for group in groups]


def test_guided_logits_are_eq_7():
    model, guide = family_model("llama"), family_model("gpt2", seed=1)
    decoder, group = JointContrastive(model, guide, 0.5, 2.0), prompts(6, 6, 6)[0]
    with torch.no_grad():
        logits = MixedPass(model, decoder).start([group])[:, 0]
        embedded = model.model.get_input_embeddings()(torch.tensor(group))
        large = model.model(inputs_embeds=embedded.mean(0, keepdim=True)).logits[0, -1]
        small = [guide.model(torch.tensor([ids])).logits[0, -1] for ids in group]
    for n in range(3):
        others = sum(small[m] for m in range(3) if m != n) / 2
        torch.testing.assert_close(
            logits[n], large + 0.5 * small[n] - 2.0 * others, atol=1e-4, rtol=1e-4
        )


def test_equal_prompts_with_alpha_equal_to_beta_are_unguided():
    model, guide = family_model("llama"), family_model("llama", seed=1)
    (ids,) = prompts(5)[0]
    expected = huggingface(model, ids, 8)
    for alpha in (1.0, 3.0):
        decoder = JointContrastive(model, guide, alpha, alpha)
        assert continued(model, [[ids, ids]], decoder, max_new_tokens=8) == [[expected] * 2]
    alone = JointContrastive(model, guide, 2.0, 0.0)
    assert continued(model, [[ids]], alone, max_new_tokens=8) == [[expected]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_of_a_stream_is_one_nth(family):
    model = family_model(family)

    def bytes_of(num_streams: int) -> int:
        groups = prompts(*[6] * num_streams)
        made = generate_from_ids(model, groups, Raw(), max_new_tokens=4, stop_at_eos=False)
        return made.cache_bytes

    single = bytes_of(1)
    config = model.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kept = [6 + 3] * config.num_hidden_layers  # the last new token is never read
    if getattr(config, "sliding_window", None) and getattr(config, "layer_types", None):
        kept = [min(9, config.sliding_window - 1) if "sliding" in t else 9
                for t in config.layer_types]  # fmt: skip
    assert single == sum(kept) * 2 * heads * width * 4
    for num_streams in (2, 3, 4):
        assert bytes_of(num_streams) / num_streams == single / num_streams


def test_the_guide_keeps_one_cache_a_stream():
    model, guide = family_model("llama"), family_model("llama", seed=1)
    made = generate_from_ids(
        model, prompts(5, 5, groups=2), JointContrastive(model, guide), max_new_tokens=3
    )
    assert made.guide_cache_bytes == 2 * made.cache_bytes


def test_two_heads_start_as_the_raw_pass_and_differ_once_trained():
    model = family_model("gemma2")  # its head has a soft-cap
    torch.manual_seed(0)
    two = TwoHead(output_head(model.model), 2)
    groups = prompts(6, 6)
    with torch.no_grad():
        raw = MixedPass(model, Raw()).start(groups)
        logits = MixedPass(model, two).start(groups)
        embedded = model.model.get_input_embeddings()(torch.tensor(groups[0]))  # (2, 6, D)
        mixed = sum(embedded[n] @ two.mixers[n].T for n in range(2)) / 2
        norm = embedded.norm(dim=-1).mean(0)
        mixed = mixed * (norm / mixed.norm(dim=-1)).unsqueeze(-1)
        expected = model.model(inputs_embeds=mixed[None]).logits[0, -1]
        torch.testing.assert_close(logits[0, 0], expected, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(logits, raw, atol=1e-3)  # the mean was rescaled
        torch.testing.assert_close(
            two.mix(embedded[None], torch.tensor([[1.0, 0.0]]))[0].norm(dim=-1),
            embedded[0].norm(dim=-1),
        )
        two.heads[1].mul_(-1.0)
        negated = MixedPass(model, two).start(groups)
    torch.testing.assert_close(negated[1, 0], -expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(negated[0], logits[0])


class Scripted(Raw):
    """Streams say what they were told to, and keep what they were given to read."""

    def __init__(self, *lines: list[int]):
        self.lines, self.spoken, self.read = lines, 0, []

    def mix(self, embeddings, weights):
        self.read.append(embeddings)
        return super().mix(embeddings, weights)

    def stream_logits(self, head, hidden, guide):
        tokens = torch.tensor([line[self.spoken] for line in self.lines])
        self.spoken += 1
        return torch.nn.functional.one_hot(tokens, NUM_WORDS + 1).float()[:, None]


def test_each_stream_stops_at_its_own_end_and_stays_in_the_mixture():
    model = word_model()
    decoder = Scripted([5, 6, NUM_WORDS, 1, 2, 3], [7, 8, 9, 10, NUM_WORDS, 4])
    made = generate(model, [" w1 w2", " w3"], decoder, max_new_tokens=20)
    assert made.token_ids == [[[5, 6, NUM_WORDS], [7, 8, 9, 10, NUM_WORDS]]]
    assert made.texts == [[" w5 w6", " w7 w8 w9 w10"]]
    assert len(made.step_seconds) == 5  # ended as soon as all had
    unseen = model.model.get_input_embeddings()(torch.tensor([[1], [10]]))
    torch.testing.assert_close(decoder.read[-1][0], unseen)
    cut = generate(model, [" w1", " w3"], Scripted([5, 6, 7], [8, NUM_WORDS, 9]), max_new_tokens=3)
    assert cut.token_ids == [[[5, 6, 7], [8, NUM_WORDS]]]


def test_text_prompts_and_callback():
    seen = []
    model = word_model()
    made = generate(
        model, [" w1 w2 w3", " w4"], max_new_tokens=4,
        on_step=lambda tokens: seen.append([len(ids) for ids in tokens[0]]),
    )  # fmt: skip
    ids = generate_from_ids(model, [[[1, 2, 3], [4]]], Raw(), max_new_tokens=4)
    assert made.token_ids == ids.token_ids
    assert made.texts[0][0] == "".join(f" w{token}" for token in made.token_ids[0][0])
    assert seen == [[1, 1], [2, 2], [3, 3], [4, 4]][: len(seen)]
    single = generate(model, " w1 w2 w3", max_new_tokens=4)
    assert single.token_ids == generate(model, [[" w1 w2 w3"]], max_new_tokens=4).token_ids


def test_sampling_follows_the_distribution_and_its_seed():
    model = family_model("llama")
    group = prompts(5, 5)
    settings = {"do_sample": True, "max_new_tokens": 10}
    first = continued(model, group, **settings, seed=3)
    assert first == continued(model, group, **settings, seed=3)
    assert first != continued(model, group, **settings, seed=4)
    assert first[0][0] != first[0][1]  # streams draw on their own
    assert continued(model, group, do_sample=True, top_k=1) == continued(model, group)
    assert continued(model, group, do_sample=True, top_p=1e-6) == continued(model, group)
    assert continued(model, group, do_sample=True, temperature=1e-6) == continued(model, group)
    many = group * 4000
    drawn = continued(model, many, do_sample=True, max_new_tokens=1, temperature=2.0)
    counts = torch.bincount(torch.tensor(drawn).flatten(), minlength=VOCABULARY).double()
    with torch.no_grad():
        expected = (MixedPass(model, Raw()).start(group)[0, 0] / 2.0).softmax(-1).double()
    assert float((counts / counts.sum() - expected).abs().sum()) < 0.1


def test_unused_logits_are_never_chosen():
    model = word_model()
    with torch.no_grad():
        model.model.lm_head.weight[NUM_WORDS + 1 :] = model.model.lm_head.weight[:7] * 100
    made = continued(model, [[[1, 2], [3, 4]]], do_sample=True, temperature=5.0, max_new_tokens=40)
    assert max(max(ids) for ids in made[0]) <= NUM_WORDS


def test_right_alignment_keeps_bos_in_front():
    ids, present = right_aligned([[[7, 1, 2, 3], [7, 4]], [[7, 5], [7]]], num_bos=1)
    assert ids.tolist() == [[[7, 1, 2, 3], [7, 0, 0, 4]], [[0, 0, 7, 5], [0, 0, 7, 0]]]
    assert present.tolist() == [
        [[1, 1, 1, 1], [1, 0, 0, 1]], [[0, 0, 1, 1], [0, 0, 1, 0]],
    ]  # fmt: skip


def test_widths_may_differ_but_token_maps_may_not(caplog):
    model, guide = word_model(), word_model(seed=1)
    guide.model.resize_token_embeddings(NUM_WORDS + 30)
    JointContrastive(model, guide)
    shuffled = guide.tokenizer
    vocabulary = {token: NUM_WORDS - index for token, index in shuffled.get_vocab().items()}
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<end>")),
        eos_token="<end>",
    )
    with pytest.raises(ValueError, match=r"guide.path=tiny-llama and .* name tokens differently"):
        JointContrastive(model, LanguageModel(guide.model, other, "tiny-llama"))
    with caplog.at_level(logging.WARNING):
        JointContrastive(LanguageModel(word_model("gpt2").model, guide.tokenizer, "small"), guide)
    assert "more than the" in caplog.text


@pytest.mark.parametrize(
    ("groups", "settings", "message"),
    [
        ([], {}, "no prompts were given"),
        ([[" w1", " w2"], [" w1"]], {}, "group 2 has 1 prompts, group 1 has 2"),
        ([[" w1", ""]], {}, r"prompt 2 is empty \(''\)"),
        ([[" w1" * 40, " w2"]], {"max_new_tokens": 10}, "set max_new_tokens to at most 9"),
        ([[" w1", " w2"]], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ([[" w1", " w2"]], {"do_sample": True, "temperature": 0}, "temperature must be above 0"),
        ([[" w1", " w2"]], {"do_sample": True, "top_k": 0}, "top_k must be at least 1"),
        ([[" w1", " w2"]], {"do_sample": True, "top_p": 1.5}, "top_p must lie above 0"),
    ],
)
def test_mistakes_name_what_to_do(groups, settings, message):
    with pytest.raises(ValueError, match=message):
        generate(word_model(), groups, **{"max_new_tokens": 5, **settings})


def test_a_head_for_another_number_of_streams_is_refused():
    model = word_model()
    with pytest.raises(ValueError, match="trained for 3 streams; set streams.num_streams=3"):
        generate(model, [" w1", " w2"], TwoHead(output_head(model.model), 3), max_new_tokens=5)


def test_the_longest_possible_continuation_fits():
    made = generate(word_model(), [" w1" * 40, " w2"], max_new_tokens=MAX_LENGTH - 40 + 1)
    assert len(made.token_ids[0][0]) <= 9
