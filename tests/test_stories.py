"""The embedded stories: seeded, disjoint by split, the last word bound by an earlier sentence."""

import itertools
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

from superpose.data import stories
from superpose.models import tiny

WORDS = {word for plot in stories.PLOTS for column in plot.words for word in column}


LAST_WORDS = {word for plot in stories.PLOTS for word in plot.words[-1]}


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+", text)


def _told(context: str) -> list[str]:
    """Last words of characters, in the order told."""
    return [word for word in re.findall(r"([A-Za-z]+)\.", context) if word in LAST_WORDS]


def _first(split: str, seed: int, count: int) -> list[str]:
    return list(itertools.islice(stories.documents(split, seed), count))


def test_story_is_a_pure_function_of_split_seed_and_index() -> None:
    first = _first("train", 5, 50)
    assert first == [stories.story("train", 5, index) for index in range(50)]
    assert first == _first("train", 5, 50)
    assert first != _first("train", 6, 50)


def test_story_does_not_depend_on_the_hash_seed_of_the_process() -> None:
    program = "from superpose.data.stories import story; print(story('train', 3, 4))"
    told = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == stories.story("train", 3, 4)


def test_splits_share_no_story() -> None:
    pools = [set(_first(split, 0, 20_000)) for split in stories.SPLITS]
    for one, other in itertools.combinations(pools, 2):
        assert not one & other
    assert all(len(pool) > 19_900 for pool in pools)


def test_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split must be one of train, validation, test"):
        stories.story("dev", 0, 0)


def test_cloze_examples_are_the_test_stories_parted_before_their_last_word() -> None:
    examples = stories.cloze_examples(30, seed=2)
    texts = _first("test", 2, 30)
    assert [example.context + example.continuation + "." for example in examples] == texts
    assert all(re.fullmatch(r" [A-Za-z]+", example.continuation) for example in examples)


def test_answer_stands_earlier_among_distractors_of_its_kind() -> None:
    for example in stories.cloze_examples(500, seed=0):
        answer = example.continuation.strip()
        words = _words(example.context)
        last_sentence = _words(example.context.rsplit(". ", 1)[1])
        assert answer in words
        assert answer not in last_sentence  # the last sentence alone does not say it
        assert len(set(_told(example.context))) >= 2


def test_answer_cannot_be_guessed_without_the_name() -> None:
    """Who sees which last words were told, but not after which, has only chance: 7 / 18."""
    hits: Counter[str] = Counter()
    examples = stories.cloze_examples(4_000, seed=0)
    for example in examples:
        answer = example.continuation.strip()
        told = _told(example.context)
        counts = Counter(told)  # in the order of first mention
        guesses = {
            "first": told[0],
            "latest": told[-1],
            "most often": max(counts, key=counts.__getitem__),
            "least often": min(counts, key=counts.__getitem__),
        }
        hits.update(rule for rule, guess in guesses.items() if guess == answer)
    assert set(hits) == {"first", "latest", "most often", "least often"}
    assert all(0.34 < count / len(examples) < 0.44 for count in hits.values()), hits


def test_same_last_sentence_ends_differently() -> None:
    endings: dict[str, set[str]] = {}
    for example in stories.cloze_examples(5_000, seed=0, split="train"):
        opening = example.context.rsplit(". ", 1)[1]
        endings.setdefault(opening, set()).add(example.continuation)
    repeated = [answers for answers in endings.values() if len(answers) > 1]
    assert len(repeated) > 100  # e.g. "In summer Nora picked the" apples, or cabbage


def test_no_answer_is_frequent() -> None:
    answers = Counter(example.continuation for example in stories.cloze_examples(2_000, seed=0))
    assert answers.most_common(1)[0][1] < 0.03 * 2_000


def test_vocabulary_is_several_hundred_words() -> None:
    words = {word for text in _first("train", 0, 5_000) for word in _words(text)}
    assert 500 <= len(words) <= 700
    assert words >= WORDS


def test_tokenizer_fits_the_stories() -> None:
    tokenizer = tiny.train_tokenizer(_first("train", 0, 3_000))
    assert tokenizer.eos_token == tokenizer.pad_token == tiny.END
    assert tokenizer.bos_token is None
    lengths = [len(ids) for ids in tokenizer(_first("test", 0, 1_000))["input_ids"]]
    assert min(lengths) >= 20
    assert max(lengths) <= 63  # with the end token one story fits into 64 tokens
    text = "Bytes of any text: ünïcode, 123\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_no_sentence_is_told_twice() -> None:
    for text in _first("train", 0, 3000):
        sentences = re.findall(r"[^.]+\.", text)
        assert len(set(sentences)) == len(sentences), text


def test_packaged_tokenizer_is_the_one_the_stories_give(tmp_path) -> None:
    from superpose.models.loading import PACKAGED

    tiny.write_untrained(tmp_path)
    for name in ("tokenizer.json", "config.json"):
        ours, packaged = ((folder / name).read_text() for folder in (tmp_path, PACKAGED["tiny"]))
        assert ours == packaged, name


def test_packaged_model_is_small_and_says_how_it_was_made() -> None:
    from superpose.models.loading import PACKAGED

    folder = PACKAGED["tiny"]
    assert sum(file.stat().st_size for file in folder.iterdir()) < 5_000_000
    card = (folder / "README.md").read_text()
    assert "python train.py experiment=tiny method=pretrain" in card


def test_packaged_model_knows_its_stories() -> None:
    from superpose.config import LambadaSettings
    from superpose.models.loading import load
    from superpose.suites.lambada import lambada

    examples = stories.cloze_examples(200, seed=1)
    result = lambada(load("tiny"), examples, LambadaSettings(batch_size=50), num_streams=2)
    assert result.single.accuracy >= 0.9
