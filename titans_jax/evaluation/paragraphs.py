"""RULER's qa_1 and qa_2: a question of SQuAD or HotpotQA about paragraphs, among as many others as fit.

The strings are RULER's (scripts/data/synthetic/qa.py), and so are the questions: question n of a task is the n-th
question of the file that can be answered. The order of the paragraphs differs: here it is drawn for every sample; in
RULER it depends only on their number, so that the paragraph with the answer has the same place in most samples.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titans_jax.evaluation.documents import find_file, open_text
from titans_jax.evaluation.evaluators import EvaluationError
from titans_jax.evaluation.needles import Draft, Essay, chance_of

INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
TEMPLATE = (
    INSTRUCTION + "\n\nThe following are given documents.\n\n{context}\n\n" + INSTRUCTION + "\n\nQuestion: {query}"
    " Answer:"
)
DOCUMENT = "Document {number}:\n{text}"


@dataclass(frozen=True)
class Asked:
    """A question, its right answers, the paragraphs that a text always has, and those that are added to it first."""

    query: str
    answers: tuple[str, ...]
    paragraphs: tuple[str, ...]
    next_to_it: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class ParagraphTask:
    """The questions of a data set, with all of its paragraphs."""

    questions: tuple[Asked, ...]
    paragraphs: tuple[str, ...]
    generated: int = 32
    """Tokens of an answer, which count towards the length."""

    def draft(self, number: int, essay: Essay, count_tokens: Callable[[str], int], length: int) -> Draft:
        """Units are paragraphs, which are repeated where there are too few; see `RulerTask.draft`."""
        asked = self.questions[number % len(self.questions)]
        chance = chance_of(asked.query, length, number)
        own = {*asked.paragraphs, *asked.next_to_it}
        others = [text for text in self.paragraphs if text not in own]
        near = chance.sample(asked.next_to_it, len(asked.next_to_it))
        order, seed = [*asked.paragraphs, *near, *chance.sample(others, len(others))], chance.getrandbits(64)

        def prompt(units: int) -> str:
            texts = (order * -(-units // len(order)))[:units]
            random.Random(seed).shuffle(texts)
            context = "\n\n".join(DOCUMENT.format(number=n, text=text) for n, text in enumerate(texts, 1))
            return TEMPLATE.format(context=context, query=asked.query)

        return Draft(prompt, asked.answers, least=len(asked.paragraphs), one_is_enough=True)


def squad(articles: dict[str, Any]) -> ParagraphTask:
    """The questions of SQuAD 2.0 that have an answer; the other paragraphs of its article are added to a text first."""
    found = []
    for article in articles["data"]:
        texts = [paragraph["context"] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            near = tuple(dict.fromkeys(text for text in texts if text != paragraph["context"]))
            for each in paragraph["qas"]:
                if not each["is_impossible"]:
                    answers = tuple(dict.fromkeys(answer["text"] for answer in each["answers"]))
                    found.append(Asked(each["question"], answers, (paragraph["context"],), near))
    every = (paragraph["context"] for article in articles["data"] for paragraph in article["paragraphs"])
    return ParagraphTask(tuple(found), tuple(dict.fromkeys(every)))


def hotpotqa(records: list[dict[str, Any]]) -> ParagraphTask:
    """The questions of HotpotQA, each with the ten paragraphs that come with it, two of which it needs."""
    found = []
    for record in records:
        texts = tuple(f"{title}\n{''.join(sentences)}" for title, sentences in record["context"])
        found.append(Asked(record["question"], (record["answer"],), texts))
    return ParagraphTask(tuple(found), tuple(dict.fromkeys(text for asked in found for text in asked.paragraphs)))


PARAGRAPH_TASKS: dict[str, tuple[str, str, Callable[[Any], ParagraphTask]]] = {
    "qa_1": ("squad", "squad/dev-v2.0.json", squad),
    "qa_2": ("hotpotqa", "hotpotqa/hotpot_dev_distractor_v1.json", hotpotqa),
}
"""By RULER's name: the data set, its file, and the function that makes the task of its content."""


def read_task(folder: Path, task: str) -> ParagraphTask:
    """One of the two tasks, from the folder of data sets.

    Raises:
      EvaluationError: its file is missing, cannot be read or holds no questions.
    """
    name, path, make = PARAGRAPH_TASKS[task]
    file = find_file(folder, path)
    try:
        with open_text(file) as text:
            found = make(json.load(text))
    except (OSError, EOFError, ValueError, KeyError, TypeError, lzma.LZMAError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise EvaluationError(f"{file} cannot be read as {name} ({reason}); fetch it again") from error
    if not found.questions:
        raise EvaluationError(f"{file} has no questions with an answer; fetch it again")
    return found
