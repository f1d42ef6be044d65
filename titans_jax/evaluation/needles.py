"""Needle tasks of RULER (arXiv 2404.06654): a sentence with a key and a value, hidden in a long text, and asked for.

The strings and counts are RULER's (scripts/data/synthetic/niah.py). Four things differ, and numbers printed beside
published ones must say so: keys are pairs of the words below, not of the package wonderwords; the essays are a text
given by the caller; it is split into sentences by `split_sentences`, not by nltk's Punkt; and each question is drawn
with its task, length and number as the seed, where RULER draws all questions of a length one after another.
"""

from __future__ import annotations

import itertools
import random
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
TEMPLATE = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided "
    "text?"
)
PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = [round(100 * number / 39) for number in range(40)]
"""Where a needle may stand in an essay, in percent of its sentences."""
TITLES = (
    "Mr Mrs Ms Messrs Mme Mlle Dr Prof Rev Hon St Sr Jr Capt Col Lt Lieut Maj Gen Adm Sgt Sergt Gov Sen Rep Pres"
).split()
"""Words whose full stop does not end a sentence of an essay; nltk's English Punkt knows them too."""

ADJECTIVES = (
    "able ancient amber angry basic bitter blue bold brave brief bright broad busy calm careful cheap civil clean "
    "clear clever close cloudy cold common cool crisp cruel curious daily damp dark dear deep dense dirty distant "
    "double dry dull eager early easy eastern empty equal even exact faint fair famous fancy fast fatal fierce final "
    "fine firm flat foreign formal fragile free fresh front full funny gentle giant glad golden good grand grave "
    "great green grim happy hard harsh heavy hidden hollow honest huge human humble hungry icy ideal idle inner "
    "junior keen kind large late lazy lean level light little lively local lonely long loose loud loyal lucky mad "
    "major merry mild minor misty modern"
).split()
NOUNS = (
    "acorn actor anchor apple apron arch arrow atlas attic autumn badge baker bamboo banner barn barrel basin basket "
    "beach beacon beard beetle bell bench berry bishop blade blanket board bottle branch bread breeze brick bridge "
    "broom brush bucket bundle button cabin cable camera candle canoe canvas captain carpet castle cattle cedar "
    "cellar chain chair chalk cherry chest chimney circle clerk cliff clock cloud clover coach coast coffee comet "
    "copper coral corner cotton cousin cradle crane crystal curtain dancer desert diamond doctor dragon drawer drum "
    "eagle easel elbow ember engine fabric falcon farmer feather fence fiddle field finger flame flute forest fossil "
    "fountain garden garlic glacier glove goose grain grape gravel guitar hammer harbor harvest hazel helmet heron "
    "hill honey horse hunter island ivory jacket jewel juice kettle kitchen kite ladder lantern lemon letter linen "
    "lizard locket lumber magnet mantle maple marble market meadow medal mirror monkey mountain museum needle nephew "
    "nickel novel oak ocean olive onion orchard otter oven oyster paddle palace paper parrot pasture peach pebble "
    "pencil pepper piano pigeon pillow pine pirate planet plum pocket poem pony poplar potato prairie prince puzzle "
    "quarry quilt rabbit raven ribbon river robin rocket saddle sailor salmon shadow shelter signal silver spider "
    "spoon statue stone summer sunset table tailor temple thunder tiger timber tower tractor trumpet tulip tunnel "
    "turtle valley velvet violin wagon walnut weather wheel willow window"
).split()

Haystack = Literal["noise", "essay", "needles"]
Kind = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True)
class Draft:
    """A question whose text does not have its length yet."""

    prompt: Callable[[int], str]
    """(number of units of text) -> the prompt, up to where the answer begins; more units are more tokens."""
    answers: tuple[str, ...]
    least: int = 1
    """The fewest units."""
    mark: str | None = None
    """The string of the prompt whose place is the depth of the question, if it has one."""
    one_is_enough: bool = False
    """True: the answers are alternatives, and one of them is enough; False: each counts for its share of the score."""


@dataclass(frozen=True)
class NeedleTask:
    """The haystack, the kinds of keys and values, how many of both are hidden, and how many keys are asked for."""

    haystack: Haystack
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    """Values of every key."""
    queries: int = 1
    generated: int = 128
    """Tokens of an answer, which count towards the length."""

    def draft(self, number: int, essay: Essay, count_tokens: Callable[[str], int], length: int) -> Draft:
        """Units are words of an essay, or lines of another haystack; see `RulerTask.draft`."""
        chance = chance_of(self, length, number)
        keys = distinct(chance, self.key, max(self.keys, self.queries))
        values = [distinct(chance, self.value, self.values) for _ in keys]
        needles = [_needle(self, key, value) for key, own in zip(keys, values, strict=True) for value in own]
        asked = chance.sample(range(len(keys)), self.queries)
        first = needles[asked[0] * self.values]
        chance.shuffle(needles)
        places, lines = [chance.random() for _ in needles], _Lines(self, chance.getrandbits(64), keys)
        depths = sorted(chance.sample(DEPTHS, len(needles)))

        def prompt(units: int) -> str:
            if self.haystack == "essay":
                context = _hide_in_essay(essay.first_sentences(units), needles, depths)
            else:
                context = _hide_in_lines(lines.first(units), needles, places)
            return _ask(self, context, [keys[number] for number in asked])

        return Draft(prompt, tuple(value for number in asked for value in values[number]), mark=first)


class Essay:
    """A text as RULER uses it: any white space becomes one space, and the text is read from its first word on, again
    and again where it is too short. Raises ValueError for a text without words."""

    def __init__(self, text: str):
        self._words = text.split()
        if not self._words:
            raise ValueError("the text to hide needles in has no words; give another one")

    def first_sentences(self, words: int) -> list[str]:
        """The sentences of the first `words` words."""
        return split_sentences(" ".join(itertools.islice(itertools.cycle(self._words), words)), TITLES)


def split_sentences(text: str, titles: Sequence[str] = ()) -> list[str]:
    """Split a text after a full stop, question or exclamation mark, which a closing quote may follow, if a capital,
    digit or opening quote comes next.

    titles: words after whose full stop the text is not split.
    """
    end = r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))" + "".join(rf"(?<!\b{title}\.)" for title in titles)
    return re.split(end + r" (?=[\"'(\[A-Z0-9])", text)


def chance_of(task: Any, length: int, number: int) -> random.Random:
    """The random generator of question `number` of a task, given by what tells it from others, and a length, seeded by
    these three."""
    return random.Random(f"{task} {length} {number}")


class _Lines:
    """Lines of a haystack, all the same noise or needles for other keys than `keys`: as many as are asked for, always
    the same."""

    def __init__(self, task: NeedleTask, seed: int, keys: list[str]):
        self._task, self._chance, self._keys, self._made = task, random.Random(seed), keys, []

    def first(self, count: int) -> list[str]:
        if self._task.haystack == "noise":
            return [NOISE] * count
        while len(self._made) < count:
            (key,), (value,) = (distinct(self._chance, kind, 1) for kind in (self._task.key, self._task.value))
            if key in self._keys:  # a second value of it would be as right as the one that is asked for
                continue
            self._made.append(_needle(self._task, key, value))
        return self._made[:count]


def _needle(task: NeedleTask, key: str, value: str) -> str:
    return NEEDLE.format(kind=task.value, key=key, value=value)


def distinct(chance: random.Random, kind: Kind, count: int) -> list[str]:
    """Different keys or values of a kind."""
    draw = {
        "words": lambda: f"{chance.choice(ADJECTIVES)}-{chance.choice(NOUNS)}",
        "numbers": lambda: str(chance.randint(10**6, 10**7 - 1)),
        "uuids": lambda: str(uuid.UUID(int=chance.getrandbits(128), version=4)),
    }[kind]
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)


def _hide_in_lines(lines: list[str], needles: list[str], places: list[float]) -> str:
    """Insert each needle as a line of its own before one of the lines, never after the last; places are in [0, 1)."""
    before: dict[int, list[str]] = {}
    for needle, place in zip(needles, places, strict=True):
        before.setdefault(int(place * len(lines)), []).append(needle)
    return "\n".join(text for number, line in enumerate(lines) for text in (*before.get(number, ()), line))


def _hide_in_essay(sentences: list[str], needles: list[str], depths: list[int]) -> str:
    """Insert each needle before the sentence at its depth in percent of all sentences; 100 is after the last."""
    cuts = [0, *(int(len(sentences) * depth / 100) for depth in depths), len(sentences)]
    pieces = [" ".join(sentences[start:end]) for start, end in zip(cuts, cuts[1:], strict=False)]
    woven = [text for pair in zip(pieces, [*needles, ""], strict=True) for text in pair]
    return " ".join(text for text in woven if text)


def _ask(task: NeedleTask, context: str, queries: list[str]) -> str:
    """The question and the beginning of its answer; in the singular where one value is asked for, as RULER does it."""
    template, kind = TEMPLATE + PREFIX, task.value
    query = f"{', '.join(queries[:-1])}, and {queries[-1]}" if len(queries) > 1 else queries[0]
    if task.queries * task.values == 1:
        for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
            template = template.replace(plural, singular)
        kind = kind[:-1]
    return template.format(kind=kind, context=context, query=query)
