"""RULER's templates as they are published, how long its texts are made, and by what its questions are drawn."""

import hashlib
import math
import re

import pytest

from titans_jax.evaluation import counting, needles, paragraphs
from titans_jax.evaluation.needles import Draft, Essay
from titans_jax.evaluation.ruler_tasks import TASKS, make_sample, most_units

ESSAY = Essay("The sea was calm. Nobody spoke for an hour! Was it over? It was, at 3.5 knots. " * 20)


@pytest.mark.parametrize(
    "template, published",
    [
        (needles.TEMPLATE + needles.PREFIX, "e3bce52f7074079c044b6c322cdbb167469e64aa1552352b1834fe34b1c6309e"),
        (counting.TRACK, "9d4c5a20bbaa3d324217d815c92244725b4092684294522e10ecc7d0d2754bda"),
        (counting.COMMON, "07425c62b2f3cc50e59526d1832cf6c2d78a837c6b4206e218f9183b87663b04"),
        (counting.FREQUENT, "4119b6f531854cc62a9a79ded95765877b89f44d5dcae6c83866730f5755a151"),
        (paragraphs.TEMPLATE, "1e0d6be4092f1e5c2344330ef9c39b7e944875b0fb4510b3ebaed336316d0232"),
    ],
    ids=["niah", "vt", "cwe", "fwe", "qa"],
)
def test_templates_are_rulers_letter_by_letter(template, published):
    """sha256 of RULER's scripts/data/synthetic/constants.py (c3f5e3b), template and answer prefix, with their fields
    filled with these words."""
    filled = template.format(kind="KIND", query="QUERY", value="QUERY", context="CONTEXT", count="COUNT")
    assert hashlib.sha256(filled.encode()).hexdigest() == published


@pytest.mark.parametrize(
    "tokens",
    [
        lambda units: 40 + 2 * units,
        lambda units: 7 * units // 3,
        lambda units: units**2,
        lambda units: 10 * math.isqrt(units),
        lambda units: 500 * (units // 50),  # long flat stretches, then steps
        lambda units: units if units < 700 else 50 * units,
        lambda units: 0 if units < 700 else 10**9,
    ],
)
@pytest.mark.parametrize("least", [1, 5])
def test_the_units_found_fit_and_one_more_does_not(tokens, least):
    draft = Draft(prompt=lambda units: units, answers=(), least=least)
    for room in [tokens(least), *range(41, 60), 999, 1000, 1001, 5004]:
        if tokens(least) <= room:
            found = most_units(draft, tokens, room)
            assert found >= least and tokens(found) <= room < tokens(found + 1)


def test_where_none_fits_the_fewest_are_found():
    assert most_units(Draft(prompt=lambda units: units, answers=(), least=3), lambda units: units, 2) == 3


@pytest.mark.parametrize("task", TASKS)
def test_a_long_text_is_the_longest_and_few_long_prompts_are_made_for_it(task):
    read = []

    def count(text):
        read.append(len(re.findall(r"\w+|[^\w\s]", text)))
        return read[-1]

    length = 30_000
    room = length - TASKS[task].generated
    found = make_sample(TASKS[task], ESSAY, count, length, 0)
    assert sum(read) < 10 * length  # doubling and halving alone read twenty times as much
    draft = TASKS[task].draft(0, ESSAY, count, length)
    units = most_units(draft, count, room)
    assert draft.prompt(units) == found.prompt and count(found.prompt) <= room < count(draft.prompt(units + 1))


@pytest.mark.parametrize("task", TASKS)
def test_no_length_or_task_has_the_questions_of_another(task):
    def answers(name, length, number):
        return make_sample(TASKS[name], ESSAY, len, length, number).answers

    drawn = {answers(task, length, number) for length in (12_000, 13_000) for number in range(20)}
    assert len(drawn) == 40 and answers(task, 12_000, 3) in drawn
    others = {answers(name, 12_000, number) for name in TASKS if name != task for number in range(2)}
    assert not drawn & others
