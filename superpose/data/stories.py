"""The embedded corpus: seeded short stories whose last word follows only from an earlier sentence.

A story introduces two or three pairs - a nurse and her name, a color and the thing that has it -
comes back to them several times, and ends with one of them; between stand sentences that lead
nowhere:

    There was the nurse Ida. Then came the baker Otto. It rained all night. Everyone liked the
    baker Otto. They waited for the nurse Ida. Nobody believed the nurse Ida.

The last sentence has the first half of a pair and ends with the second half, which only an earlier
sentence has told; pairs are drawn anew for each story. Only a model that looks back for the last
time it read "the nurse" can know the last word.
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
    """What a story is about: pairs ``{first} {second}``.

    Attributes:
        firsts: words that open a pair; a story uses each once.
        seconds: words that close it: the last word of a story is one of them.
        opening: sentences that introduce a pair.
        recall: sentences that come back to it, and end with it.
    """

    firsts: tuple[str, ...]
    seconds: tuple[str, ...]
    opening: tuple[str, ...]
    recall: tuple[str, ...]


PLOTS = (
    Plot(
        lexicon.JOBS,
        lexicon.NAMES,
        (
            "There was the {first} {second}.",
            "They met the {first} {second}.",
            "Then came the {first} {second}.",
        ),
        (
            "Everyone liked the {first} {second}.",
            "She thanked the {first} {second}.",
            "He called the {first} {second}.",
            "They waited for the {first} {second}.",
            "Nobody believed the {first} {second}.",
        ),
    ),
    Plot(
        lexicon.COMPANIONS,
        lexicon.NAMES,
        (
            "First came {first} {second}.",
            "They knew {first} {second}.",
            "At the door stood {first} {second}.",
        ),
        (
            "He waved to {first} {second}.",
            "She danced with {first} {second}.",
            "They thought of {first} {second}.",
            "It was the turn of {first} {second}.",
            "Nobody saw {first} {second}.",
        ),
    ),
    Plot(
        lexicon.RANKS,
        lexicon.NAMES,
        (
            "The war began under {first} {second}.",
            "From the north came {first} {second}.",
            "The people feared {first} {second}.",
        ),
        (
            "The town was held by {first} {second}.",
            "He wrote to {first} {second}.",
            "She ran to {first} {second}.",
            "Bells rang for {first} {second}.",
            "They all followed {first} {second}.",
        ),
    ),
    Plot(
        lexicon.ANIMALS,
        lexicon.NAMES,
        (
            "They kept the {first} {second}.",
            "In the barn slept the {first} {second}.",
            "There was also the {first} {second}.",
        ),
        (
            "She fed the {first} {second}.",
            "He looked for the {first} {second}.",
            "They found the {first} {second}.",
            "Children loved the {first} {second}.",
            "Nobody could catch the {first} {second}.",
        ),
    ),
    Plot(
        lexicon.VESSELS,
        lexicon.CITIES,
        (
            "In the harbor lay the {first} {second}.",
            "They boarded the {first} {second}.",
            "From the west came the {first} {second}.",
        ),
        (
            "A storm caught the {first} {second}.",
            "He dreamed of the {first} {second}.",
            "She sailed on the {first} {second}.",
            "They repaired the {first} {second}.",
            "Nobody heard of the {first} {second}.",
        ),
    ),
    Plot(
        lexicon.HOUSES,
        lexicon.CITIES,
        (
            "On the hill stood the {first} {second}.",
            "They opened the {first} {second}.",
            "He worked at the {first} {second}.",
        ),
        (
            "She went to the {first} {second}.",
            "They met at the {first} {second}.",
            "There was a fire at the {first} {second}.",
            "Nobody knew the {first} {second}.",
            "He sold the {first} {second}.",
        ),
    ),
    Plot(
        lexicon.COLORS,
        lexicon.OBJECTS,
        (
            "There was a {first} {second}.",
            "He had a {first} {second}.",
            "Somebody left a {first} {second}.",
        ),
        (
            "She wanted the {first} {second}.",
            "The thief took the {first} {second}.",
            "He looked for the {first} {second}.",
            "They broke the {first} {second}.",
            "Nobody used the {first} {second}.",
        ),
    ),
    Plot(
        lexicon.QUALITIES,
        lexicon.OBJECTS,
        (
            "They packed a {first} {second}.",
            "She bought a {first} {second}.",
            "He found a {first} {second}.",
        ),
        (
            "They lost the {first} {second}.",
            "She gave away the {first} {second}.",
            "He paid for the {first} {second}.",
            "Somebody asked for the {first} {second}.",
            "Nobody wanted the {first} {second}.",
        ),
    ),
    Plot(
        lexicon.TASTES,
        lexicon.FOODS,
        (
            "There was {first} {second}.",
            "The cook made {first} {second}.",
            "They brought {first} {second}.",
        ),
        (
            "She wanted more of the {first} {second}.",
            "The dog ate the {first} {second}.",
            "He never forgot the {first} {second}.",
            "They shared the {first} {second}.",
            "Nobody touched the {first} {second}.",
        ),
    ),
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
    plot = draw.choice(PLOTS)
    count = draw.choice((2, 3, 3))
    pairs = [
        {"first": first, "second": second}
        for first, second in zip(
            draw.sample(plot.firsts, count), draw.sample(plot.seconds, count), strict=True
        )
    ]
    sentences = [
        opening.format(**pair)
        for opening, pair in zip(draw.sample(plot.opening, count), pairs, strict=True)
    ]
    # Every pair is as likely to come next as any other, the last one too; no sentence is told twice.
    told: set[str] = set()
    while len(told) < 7 - count:
        recall = draw.choice(plot.recall).format(**draw.choice(pairs))
        if recall not in told:
            told.add(recall)
            sentences.append(recall)
    for filler in draw.sample(lexicon.FILLERS, draw.choice((0, 1, 1))):
        sentences.insert(draw.randint(0, len(sentences) - 1), filler)
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
