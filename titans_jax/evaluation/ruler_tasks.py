"""The tasks of RULER (arXiv 2404.06654) by name, samples of them at a length, and their score.

Eleven of its thirteen; qa_1 and qa_2, which read SQuAD and HotpotQA, are made by `paragraphs`. Strings, counts and
scores are RULER's; the modules of the tasks say what is not. The text of every sample is as long as fits, where
versions of RULER before June 2025 fell short of the length by up to 500 words.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from titans_jax.evaluation.counting import CommonWords, FrequentWords, VariableTracking
from titans_jax.evaluation.needles import Draft, Essay, NeedleTask


class RulerTask(Protocol):
    """A kind of question."""

    @property
    def generated(self) -> int:
        """Tokens of an answer, which a length includes."""

    def draft(self, number: int, essay: Essay, count_tokens: Callable[[str], int], length: int) -> Draft:
        """Question `number`, always the same one, for texts of `length` tokens, which are still to be filled.

        essay: the text to hide something in, of tasks that do; count_tokens: of a text, for a model's tokenizer.
        """


TASKS: dict[str, RulerTask] = {
    "niah_single_1": NeedleTask("noise"),
    "niah_single_2": NeedleTask("essay"),
    "niah_single_3": NeedleTask("essay", value="uuids"),
    "niah_multikey_1": NeedleTask("essay", keys=4),
    "niah_multikey_2": NeedleTask("needles"),
    "niah_multikey_3": NeedleTask("needles", key="uuids", value="uuids"),
    "niah_multivalue": NeedleTask("essay", values=4),
    "niah_multiquery": NeedleTask("essay", keys=4, queries=4),
    "vt": VariableTracking(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
}
"""RULER's tasks by its names; the first three are S-NIAH-1, 2 and 3 (PK, N and W in the Titans paper)."""


@dataclass(frozen=True)
class Sample:
    """A question and its answers: `prompt` ends where the answer begins."""

    prompt: str
    answers: tuple[str, ...]
    depth: float | None
    """Where the first needle that is asked for stands, from 0, the prompt's first character, to 1; None without one."""
    one_is_enough: bool = False
    """See `Draft`."""


def make_sample(task: RulerTask, essay: Essay, count_tokens: Callable[[str], int], length: int, number: int) -> Sample:
    """The sample with the longest text for which the prompt and `task.generated` tokens are at most `length` tokens.

    Raises:
      ValueError: not even the shortest text fits, or there is not enough to fill the length with.
    """
    draft = task.draft(number, essay, count_tokens, length)
    text = draft.prompt(most_units(draft, count_tokens, length - task.generated))
    if count_tokens(text) + task.generated > length:
        too_few = f"too few for a question and {task.generated} of an answer; use a larger length"
        raise ValueError(f"length is {length:,} tokens, {too_few}")
    depth = None if draft.mark is None else text.index(draft.mark) / len(text)
    return Sample(text, draft.answers, depth, draft.one_is_enough)


def most_units(draft: Draft, count_tokens: Callable[[str], int], room: int) -> int:
    """The most units with which a prompt has at most `room` tokens, while one more has not; its fewest where none has.

    Prompts grow almost evenly, so a line through two of them is nearly right, and few long prompts are made.
    """

    def beyond(units: int) -> int:
        return count_tokens(draft.prompt(units)) - room

    low = high = draft.least
    below = above = beyond(low)
    while above <= 0:
        per_unit = (above - below) / max(high - low, 1)
        low, below = high, above
        # A little further than the line says, so that the next is too long; at first it says little.
        further = 1.05 * -below / per_unit if per_unit > 0 else math.inf
        high = low + max(1, int(min(further, 3 * low)))
        above = beyond(high)
    for tries in itertools.count():
        if high - low <= 1:
            return low
        # Halves, where prompts grow so unevenly that the line does not find it.
        on_the_line = -below * (high - low) // (above - below) if tries < 9 else (high - low) // 2
        middle = low + min(max(on_the_line, 1), high - low - 1)
        tokens = beyond(middle)
        if tokens <= 0:
            low, below = middle, tokens
        else:
            high, above = middle, tokens


def score(answers: tuple[str, ...], prediction: str, one_is_enough: bool = False) -> float:
    """RULER's string_match_all: the share of the answers that stand in the prediction, whatever the case; or its
    string_match_part, whether one of them does."""
    said = re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).lower()
    stand = [answer.lower() in said for answer in answers]
    return float(any(stand)) if one_is_enough else sum(stand) / len(stand)
