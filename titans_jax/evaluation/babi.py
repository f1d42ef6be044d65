"""bAbI stories and BABILong's questions about them (arXiv 2406.10149): prompts, samples and the score.

The strings, and the rule for a right answer, are BABILong's (babilong/prompts.py, babilong_utils.py and metrics.py).
These differ: sentences of the background are split by `needles.split_sentences`, not nltk's Punkt; any white space in
it becomes one blank; and the choice of the story and book of a question.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titans_jax.data import Tokenizer
from titans_jax.data.packing import encode_after
from titans_jax.evaluation.needles import split_sentences

GENERATED = 20
"""Tokens of an answer."""
ROOM = 300
"""Tokens of a length that BABILong reserves for the answer and the words around the context (in GPT-2's tokens)."""
TOKENS_OF_A_FACT = 8
"""A story is asked only if the context has room for its facts at this many tokens each."""
SHORTEST_SENTENCE = 10
"""Tokens; shorter ones of the background are left out."""

_ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
LABELS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), _ROOMS),
    "qa5": ("Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"),
}
"""All possible answers, by task."""

_ITEMS = (
    "If a person got an item in the first location and travelled to the second location the item is also in the second "
    "location. If a person dropped an item in the first location and moved to the second location the item remains in "
    "the first location."
)
INSTRUCTIONS = {
    "qa1": "I will give you context with the facts about positions of different persons hidden in some random text and "
    "a question. You need to answer the question based only on the information from the facts. If a person was in "
    "different locations, use the latest location to answer the question.",
    "qa2": "I give you context with the facts about locations and actions of different persons hidden in some random "
    "text and a question.You need to answer the question based only on the information from the facts.\n" + _ITEMS,
    "qa3": "I give you context with the facts about locations and actions of different persons hidden in some random "
    "text and a question. You need to answer the question based only on the information from the facts.\n" + _ITEMS,
    "qa4": "I will give you context with the facts about different people, their location and actions, hidden in "
    "some random text and a question. You need to answer the question based only on the information from the facts.",
    "qa5": "I will give you context with the facts about locations and their relations hidden in some random text and "
    "a question. You need to answer the question based only on the information from the facts.",
}
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "qa1": (
        (
            "Charlie went to the hallway. Judith come back to the kitchen. Charlie travelled to balcony. Where is "
            "Charlie?",
            "The most recent location of Charlie is balcony.",
        ),
        (
            "Alan moved to the garage. Charlie went to the beach. Alan went to the shop. Rouse travelled to balcony. "
            "Where is Alan?",
            "The most recent location of Alan is shop.",
        ),
    ),
    "qa2": (
        (
            "Charlie went to the kitchen. Charlie got a bottle. Charlie moved to the balcony. Where is the bottle?",
            "The bottle is in the balcony.",
        ),
        (
            "Alan moved to the garage. Alan got a screw driver. Alan moved to the kitchen. Where is the screw driver?",
            "The screw driver is in the kitchen.",
        ),
    ),
    "qa3": (
        (
            "John journeyed to the bedroom. Mary grabbed the apple. Mary went back to the bathroom. Daniel journeyed "
            "to the bedroom. Daniel moved to the garden. Mary travelled to the kitchen. Where was the apple before the "
            "kitchen?",
            "Before the kitchen the apple was in the bathroom.",
        ),
        (
            "John went back to the bedroom. John went back to the garden. John went back to the kitchen. Sandra took "
            "the football. Sandra travelled to the garden. Sandra journeyed to the bedroom. Where was the football "
            "before the bedroom?",
            "Before the bedroom the football was in the garden.",
        ),
    ),
    "qa4": (
        (
            "The hallway is south of the kitchen. The bedroom is north of the kitchen. What is the kitchen south of?",
            "bedroom",
        ),
        (
            "The garden is west of the bedroom. The bedroom is west of the kitchen. What is west of the bedroom?",
            "garden",
        ),
    ),
    "qa5": (
        (
            "Mary picked up the apple there. Mary gave the apple to Fred. Mary moved to the bedroom. Bill took the "
            "milk there. Who did Mary give the apple to?",
            "Fred",
        ),
        (
            "Jeff took the football there. Jeff passed the football to Fred. Jeff got the milk there. Bill travelled "
            "to the bedroom. Who gave the football?",
            "Jeff",
        ),
        (
            "Fred picked up the apple there. Fred handed the apple to Bill. Bill journeyed to the bedroom. Jeff went "
            "back to the garden. What did Fred give to Bill?",
            "apple",
        ),
    ),
}
"""By task, worked examples: (a story with its question, the answer)."""
FORMATS = {
    "qa1": "Always return your answer in the following format: The most recent location of ’person’ is ’location’. Do "
    "not write anything else after that.",
    "qa2": "Always return your answer in the following format: The ’item’ is in ’location’. Do not write anything else "
    "after that.",
    "qa3": "Always return your answer in the following format: Before the $location_1$ the $item$ was in the "
    "$location_2$. Do not write anything else after that.",
    "qa4": "Your answer should contain only one word - location. Do not write anything else after that.",
    "qa5": "Your answer should contain only one word. Do not write anything else after that. Do not explain your "
    "answer.",
}


@dataclass(frozen=True)
class Story:
    """Facts, a question about them, and its answer."""

    facts: tuple[str, ...]
    question: str
    answer: str


def read_stories(text: str) -> list[Story]:
    """The stories of a bAbI file, one for every question, with the facts before it.

    Raises:
      ValueError: a line is none of bAbI's.
    """
    stories, facts = [], []
    for line in text.splitlines():
        number, _, rest = line.partition(" ")
        if not number.isdigit() or not rest:
            raise ValueError(f"{line[:40]!r} is no line of bAbI: a number, and a fact or a question with its answer")
        if number == "1":
            facts = []
        if "\t" in rest:
            question, answer, *_ = rest.split("\t")
            stories.append(Story(tuple(facts), question, answer))
        else:
            facts.append(rest)
    return stories


def ask(task: str, context: str, question: str) -> str:
    """The prompt: instruction, worked examples, how to answer, the context and the question."""
    # qa1 alone has an empty line between its examples.
    between = "\n\n" if task == "qa1" else "\n"
    examples = between.join(f"<example>\n{told}\nAnswer: {said}\n</example>" for told, said in EXAMPLES[task])
    around = f"{INSTRUCTIONS[task]}\n\n{examples}\n\n{FORMATS[task]}"
    return f"{around}\n\n<context>\n{context.strip()}\n</context>\n\nQuestion: {question}".strip()


def is_right(task: str, story: Story, said: str) -> bool:
    """BABILong's compare_answers: whether the right answer is the only label in the first sentence, not counting labels
    that the question names."""
    first = said.lower().split(".")[0].split("<context>")[0].split("<example>")[0]
    labels = {label.lower() for label in LABELS[task]}
    found = {label for label in labels if label in first and label not in story.question.lower()}
    return found == {story.answer.lower()}


class Background:
    """Sentences of books, to hide facts in."""

    def __init__(self, books: Sequence[str], tokenizer: Tokenizer):
        self._books, self._tokenizer = [book for book in books if book.strip()], tokenizer
        if not self._books:
            raise ValueError("the books to hide facts in hold no text; give others")
        self._size = functools.cache(lambda fact: len(self.encode(fact)))

    def size(self, facts: Sequence[str]) -> int:
        """Tokens of the facts, each placed after another sentence."""
        return sum(map(self._size, facts))

    def encode(self, sentence: str) -> np.ndarray:
        """The tokens of a sentence that follows another, with the blank before it; int32 [tokens]."""
        return encode_after(self._tokenizer, "a", " " + sentence)

    def sentences(self, chance: random.Random, tokens: int) -> list[str]:
        """Sentences from random places, each with a blank in front, of `tokens` tokens together; the last is cut."""
        found: list[str] = []
        tries = 0
        while tokens > 0:
            tries += 1
            if tries > 1000:
                raise ValueError(f"the books have no sentence of {SHORTEST_SENTENCE} tokens; give others")
            book = chance.choice(self._books)
            start = chance.randrange(len(book))
            # The first and last sentence are incomplete and left out. Titles such as "Mr." count as ends of sentences,
            # as in BABILong, whose Punkt is untrained.
            for sentence in split_sentences(" ".join(book[start : start + 10 * max(tokens, 100)].split()))[1:-1]:
                ids = self.encode(sentence)
                if len(ids) < SHORTEST_SENTENCE:
                    continue
                # Some tokenizers decode the first token without its blank.
                cut = sentence if len(ids) <= tokens else self._tokenizer.decode(ids[:tokens]).lstrip()
                found.append(" " + cut)
                tokens -= len(ids)
                if tokens <= 0:
                    break
        return found

    def hide(self, chance: random.Random, facts: Sequence[str], tokens: int) -> str:
        """A context of `tokens` tokens with the facts, in their order, at random places between its sentences.

        Raises:
          ValueError: the facts alone are longer.
        """
        room = tokens - self.size(facts)
        if room < 0:
            raise ValueError(f"facts of {tokens - room:,} tokens are longer than the context")
        sentences = self.sentences(chance, room)
        places = sorted(chance.choices(range(len(sentences) + 1), k=len(facts)))
        before: list[list[str]] = [[] for _ in range(len(sentences) + 1)]
        for place, fact in zip(places, facts, strict=True):
            before[place].append(" " + fact)
        woven = [text for some, sentence in zip(before, [*sentences, ""], strict=True) for text in (*some, sentence)]
        return "".join(woven).strip()
