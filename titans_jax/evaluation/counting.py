"""RULER's tasks that no single sentence answers: variables followed through a text (vt), and words counted in a
numbered list (cwe) or in coded text (fwe).

The strings and counts are RULER's (scripts/data/synthetic/{variable_tracking,common_words_extraction,
freq_words_extraction}.py). Two things differ. The words of cwe are those of `needles`, not of the package wonderwords:
a list has single words only, or pairs of words only where a text needs more words than there are. And the worked
example of vt has at least five lines of noise, even where these take more than RULER's 500 tokens.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from titans_jax.evaluation.needles import ADJECTIVES, NOISE, NOUNS, Draft, Essay, chance_of

TRACK = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: "
    "Find all variables that are assigned the value {value} in the text above. Answer: According to the chain(s) of "
    "variable assignment in the text above, {count} variables are assigned the value {value}, they are: "
)
COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 "
    "words that appear most often in the list are:"
)
FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text? Answer: According to the coded text above, the "
    "three most frequently appeared words are:"
)
EXAMPLE_TOKENS = 500
LETTERS = 5
"""Letters of a variable's name; in the example names have 3."""
SHORT = 4096
"""In texts of fewer tokens than this, the words of cwe are repeated less often."""
SINGLE_WORDS = sorted({*ADJECTIVES, *NOUNS})
WORD_PAIRS = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]


@dataclass(frozen=True)
class VariableTracking:
    """A chain of variables, each assigned the one before, in separate lines among noise; all of them are asked for."""

    hops: int = 4
    generated: int = 30

    def draft(self, number: int, essay: Essay, count_tokens: Callable[[str], int], length: int) -> Draft:
        """Units are lines of noise; see `RulerTask.draft`."""
        chance = chance_of(self, length, number)
        example, question = self._chain(chance, LETTERS - 2), self._chain(chance, LETTERS)
        lines = example.least
        while count_tokens(example.prompt(lines + 1)) <= EXAMPLE_TOKENS:
            lines += 1
        worked = f"{example.prompt(lines)} {' '.join(example.answers)}\n\n"
        return Draft(lambda units: worked + question.prompt(units), question.answers, question.least, question.mark)

    def _chain(self, chance: random.Random, letters: int) -> Draft:
        names: dict[str, None] = {}
        while len(names) <= self.hops:
            names["".join(chance.choices(string.ascii_uppercase, k=letters))] = None
        variables, value = tuple(names), str(chance.randrange(10000, 99999))
        pairs = zip(variables[1:], variables, strict=False)
        chain = [f"VAR {variables[0]} = {value}", *(f"VAR {name} = VAR {before} " for name, before in pairs)]
        seed = chance.getrandbits(64)

        def prompt(units: int) -> str:
            lines, places = [NOISE] * units, sorted(random.Random(seed).sample(range(units), len(chain)))
            for moved, (place, link) in enumerate(zip(places, chain, strict=True)):
                lines.insert(place + moved, link)
            return TRACK.format(context="\n".join(lines), value=value, count=len(variables))

        return Draft(prompt, variables, least=len(chain), mark=chain[0])


@dataclass(frozen=True)
class CommonWords:
    """A numbered list, after a worked example, in which ten words appear thirty times and all others three times."""

    common: int = 10
    generated: int = 120

    def draft(self, number: int, essay: Essay, count_tokens: Callable[[str], int], length: int) -> Draft:
        """Units are words that are not common; see `RulerTask.draft`.

        Where all single words together do not fill the length, all words are pairs: if only the rarer ones were pairs,
        their form would tell them from the answers.
        """
        single = self._draft(chance_of(self, length, number), length, SINGLE_WORDS)
        all_fit = count_tokens(single.prompt(len(SINGLE_WORDS) - self.common)) + self.generated <= length
        return self._draft(chance_of(self, length, number), length, WORD_PAIRS) if all_fit else single

    def _draft(self, chance: random.Random, length: int, vocabulary: list[str]) -> Draft:
        short = length < SHORT
        words, often, seldom = (20, 3, 1) if short else (40, 10, 3)
        example = self._list(chance, vocabulary, often, seldom)
        question = self._list(chance, vocabulary, *((6, 1) if short else (30, 3)))
        worked = f"{example.prompt(words - self.common)} {_numbered(example.answers)}\n"
        return Draft(lambda units: worked + question.prompt(units), question.answers)

    def _list(self, chance: random.Random, vocabulary: list[str], often: int, seldom: int) -> Draft:
        words, seed = chance.sample(vocabulary, len(vocabulary)), chance.getrandbits(64)
        common, others = words[: self.common], words[self.common :]

        def prompt(units: int) -> str:
            if vocabulary is WORD_PAIRS and units > len(others):
                raise ValueError(f"cwe has {len(words):,} words, too few for so long a list; use a smaller length")
            text = common * often + others[:units] * seldom
            random.Random(seed).shuffle(text)
            return COMMON.format(context=_numbered(text))

        return Draft(prompt, tuple(common))


@dataclass(frozen=True)
class FrequentWords:
    """Coded words, each with a frequency in proportion to 1 / rank^2; the first is dots, and the next three are the
    answers."""

    generated: int = 50

    def draft(self, number: int, essay: Essay, count_tokens: Callable[[str], int], length: int) -> Draft:
        """Units are words; see `RulerTask.draft`."""
        chance = chance_of(self, length, number)
        coded: dict[str, None] = {}
        while len(coded) < max(4, (length - self.generated) // 50):
            coded["".join(chance.choices(string.ascii_lowercase, k=6))] = None
        words, seed = ["...", *list(coded)[1:]], chance.getrandbits(64)
        whole = math.pi**2 / 6  # the sum of 1 / rank^2

        def prompt(units: int) -> str:
            counts = (int(units / rank**2 / whole) for rank in range(1, len(words) + 1))
            text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
            random.Random(seed).shuffle(text)
            return FREQUENT.format(context=" ".join(text))

        # With fewer words the fourth would not appear.
        return Draft(prompt, tuple(words[1:4]), least=math.ceil(whole * 4**2))


def _numbered(words: list[str] | tuple[str, ...]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
