"""The embedded corpus: seeded short stories whose last word follows only from an earlier sentence.

A story introduces two or three characters, each by three words - the nurse Ida Stone, a red iron
kettle - comes back to them several times, and ends with one of them; between stand sentences that
lead nowhere:

    There was the nurse Ida Stone. They packed a big red kettle. It rained all night. Everyone liked
    the nurse Ida Stone. They lost the big red kettle. Nobody believed the nurse Ida Stone.

The last sentence has the first words of a character and ends with the last one, which only earlier
sentences have told, among the last words of other characters. All are drawn anew for each story.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from superpose.data import lexicon
from superpose.data.lambada import ClozeExample

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Plot:
    """What a story is about.

    Attributes:
        words: for each of the three words of a character, those it is drawn from.
        opening: sentences that introduce a character ``{}``.
        recall: sentences that come back to it, and end with it.
    """

    words: tuple[tuple[str, ...], ...]
    opening: tuple[str, ...]
    recall: tuple[str, ...]


PLOTS = (
    Plot(
        (lexicon.JOBS, lexicon.NAMES, lexicon.SURNAMES),
        (
            "There was the {}.",
            "They met the {}.",
            "Then came the {}.",
        ),
        (
            "Everyone liked the {}.",
            "She thanked the {}.",
            "He called the {}.",
            "They waited for the {}.",
            "Nobody believed the {}.",
        ),
    ),
    Plot(
        (lexicon.COMPANIONS, lexicon.NAMES, lexicon.SURNAMES),
        (
            "First came {}.",
            "They knew {}.",
            "At the door stood {}.",
        ),
        (
            "He waved to {}.",
            "She danced with {}.",
            "They thought of {}.",
            "It was the turn of {}.",
            "Nobody saw {}.",
        ),
    ),
    Plot(
        (lexicon.RANKS, lexicon.NAMES, lexicon.SURNAMES),
        (
            "The war began under {}.",
            "From the north came {}.",
            "The people feared {}.",
        ),
        (
            "The town was held by {}.",
            "He wrote to {}.",
            "She ran to {}.",
            "Bells rang for {}.",
            "They all followed {}.",
        ),
    ),
    Plot(
        (lexicon.COLORS, lexicon.ANIMALS, lexicon.NAMES),
        (
            "They kept the {}.",
            "In the barn slept the {}.",
            "There was also the {}.",
        ),
        (
            "She fed the {}.",
            "He looked for the {}.",
            "They found the {}.",
            "Children loved the {}.",
            "Nobody could catch the {}.",
        ),
    ),
    Plot(
        (lexicon.VESSELS, lexicon.CITIES, lexicon.SIGNS),
        (
            "In the harbor lay the {}.",
            "They boarded the {}.",
            "From the west came the {}.",
        ),
        (
            "A storm caught the {}.",
            "He dreamed of the {}.",
            "She sailed on the {}.",
            "They repaired the {}.",
            "Nobody heard of the {}.",
        ),
    ),
    Plot(
        (lexicon.QUALITIES, lexicon.HOUSES, lexicon.CITIES),
        (
            "On the hill stood the {}.",
            "They opened the {}.",
            "He worked at the {}.",
        ),
        (
            "She went to the {}.",
            "They met at the {}.",
            "There was a fire at the {}.",
            "Nobody knew the {}.",
            "He sold the {}.",
        ),
    ),
    Plot(
        (lexicon.COLORS, lexicon.MATERIALS, lexicon.OBJECTS),
        (
            "There was a {}.",
            "He had a {}.",
            "Somebody left a {}.",
        ),
        (
            "She wanted the {}.",
            "The thief took the {}.",
            "He looked for the {}.",
            "They broke the {}.",
            "Nobody used the {}.",
        ),
    ),
    Plot(
        (lexicon.QUALITIES, lexicon.COLORS, lexicon.OBJECTS),
        (
            "They packed a {}.",
            "She bought a {}.",
            "He found a {}.",
        ),
        (
            "They lost the {}.",
            "She gave away the {}.",
            "He paid for the {}.",
            "Somebody asked for the {}.",
            "Nobody wanted the {}.",
        ),
    ),
    Plot(
        (lexicon.TASTES, lexicon.INGREDIENTS, lexicon.FOODS),
        (
            "There was {}.",
            "The cook made {}.",
            "They brought {}.",
        ),
        (
            "She wanted more of the {}.",
            "The dog ate the {}.",
            "He never forgot the {}.",
            "They shared the {}.",
            "Nobody touched the {}.",
        ),
    ),
)


# Plots by the list that their last word is from: the characters of a story are of different kinds.
KINDS = tuple(
    tuple(plot for plot in PLOTS if plot.words[-1] is last_words)
    for last_words in dict.fromkeys(plot.words[-1] for plot in PLOTS)
)


def story(split: str, seed: int, index: int) -> str:
    """Story number ``index``: a pure function of its arguments.

    Args:
        split: ``train``, ``validation`` or ``test``; stories of different splits are drawn from
            different seeds.
        seed: of the corpus.
        index: at least 0.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    draw = random.Random(f"superpose-stories-{split}-{seed}-{index}")
    count = draw.choice((2, 3, 3))
    plots = [draw.choice(KINDS[kind]) for kind in draw.sample(range(len(KINDS)), count)]
    characters = [" ".join(draw.choice(words) for words in plot.words) for plot in plots]
    sentences = [
        draw.choice(plot.opening).format(character)
        for plot, character in zip(plots, characters, strict=True)
    ]
    # Drawn apart: what was told before says nothing of who comes last. No sentence is told twice.
    forms = [draw.sample(plot.recall, len(plot.recall)) for plot in plots]
    for _ in range(6 - count):
        index = draw.randrange(count)
        sentences.append(forms[index].pop().format(characters[index]))
    if draw.random() < 0.5:
        sentences.insert(draw.randint(0, len(sentences) - 1), draw.choice(lexicon.FILLERS))
    return " ".join(sentences)


def documents(split: str, seed: int) -> Iterator[str]:
    """All stories of a split and seed, without end."""
    return (story(split, seed, index) for index in itertools.count())


def cloze_examples(count: int, seed: int, split: str = "test") -> list[ClozeExample]:
    """Stories in LAMBADA's form: everything but the last word, and the last word."""
    examples = []
    for text in itertools.islice(documents(split, seed), count):
        context, word = text.rstrip(".").rsplit(" ", 1)
        examples.append(ClozeExample(context, f" {word}"))
    return examples
