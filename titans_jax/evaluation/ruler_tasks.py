"""The tasks of RULER (arXiv 2404.06654) by name, samples of them at a length, and their score.

Eleven of its thirteen tasks are here; qa_1 and qa_2, which read SQuAD and HotpotQA, are made by `paragraphs`. Strings,
counts and scores are RULER's; the modules of the tasks describe the differences. The text of every sample is as long as
fits, while versions of RULER before June 2025 fell short of the length by up to 500 words.
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
        """Tokens of an answer, which count towards the length."""

    def draft(self, number: int, essay: Essay, count_tokens: Callable[[str], int], length: int) -> Draft:
        """Question `number`, always the same one, for a text of `length` tokens, which is still to be filled.

        essay: the text of tasks that hide something in one; count_tokens: counts a text's tokens for a tokenizer.
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
    """Place of the first needle that is asked for, from 0 (the prompt's first character) to 1; None without needles."""
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
    """The most units with which a prompt has at most `room` tokens, or the draft's fewest where even these have more.

    Prompts grow almost linearly, so that linear interpolation needs to make only few long prompts.
    """

    def beyond(units: int) -> int:
        return count_tokens(draft.prompt(units)) - room

    low = high = draft.least
    below = above = beyond(low)
    while above <= 0:
        per_unit = (above - below) / max(high - low, 1)
        low, below = high, above
        # A little further than the line, so that the next is too long; at most fourfold, as the line is vague at first.
        further = 1.05 * -below / per_unit if per_unit > 0 else math.inf
        high = low + max(1, int(min(further, 3 * low)))
        above = beyond(high)
    for tries in itertools.count():
        if high - low <= 1:
            return low
        # Bisection, where prompts grow so unevenly that interpolation does not converge.
        on_the_line = -below * (high - low) // (above - below) if tries < 9 else (high - low) // 2
        middle = low + min(max(on_the_line, 1), high - low - 1)
        tokens = beyond(middle)
        if tokens <= 0:
            low, below = middle, tokens
        else:
            high, above = middle, tokens


def score(answers: tuple[str, ...], prediction: str, one_is_enough: bool = False) -> float:
    """RULER's string_match_all: the share of the answers that the prediction contains, ignoring case; with
    `one_is_enough` its string_match_part: 1 if the prediction contains any of them, else 0."""
    said = re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).lower()
    stand = [answer.lower() in said for answer in answers]
    return float(any(stand)) if one_is_enough else sum(stand) / len(stand)
