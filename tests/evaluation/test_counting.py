"""RULER's vt, cwe and fwe: their strings letter by letter, their counts, and the answers counted again."""

import collections
import re

import pytest

from titans_jax.evaluation.needles import NOISE, Essay
from titans_jax.evaluation.ruler_tasks import TASKS, make_sample, score

ESSAY = Essay("Nothing.")


def words(text):
    """A tokenizer of words, blanks and marks: a length is then about that of a real one."""
    return len(re.findall(r"\w+|\s|[^\w\s]", text))


def sample(task, length=4096, seed=0, count=words):
    return make_sample(TASKS[task], ESSAY, count, length, seed)


def test_variables_are_tracked_in_the_words_of_ruler():
    found = sample("vt")
    example, question = found.prompt.split("\n\nMemorize")
    question = "Memorize" + question
    for text, letters in ((example, 3), (question, 5)):
        head, body = text.split("\n\n", 1)
        assert head == "Memorize and track the chain(s) of variable assignment hidden in the following text."
        *lines, ask = body.split("\n")
        value = re.fullmatch(rf"VAR [A-Z]{{{letters}}} = (\d{{5}})", next(x for x in lines if x.startswith("VAR")))[1]
        chain = [line for line in lines if line != NOISE]
        names = [line.split()[1] for line in chain]
        assert len(names) == len(set(names)) == 5
        assert chain[1:] == [f"VAR {b} = VAR {a} " for a, b in zip(names, names[1:], strict=False)]
        said = (
            f"Question: Find all variables that are assigned the value {value} in the text above. Answer: According to "
            f"the chain(s) of variable assignment in the text above, 5 variables are assigned the value {value}, they "
            "are: "
        )
        assert ask == said + (" " + " ".join(names) if text is example else "")
    assert tuple(names) == found.answers and words(example) <= 500 < words(example) + words(NOISE) + 20


@pytest.mark.parametrize("length, often, seldom, example", [(2048, 6, 1, (3, 1, 20)), (8192, 30, 3, (10, 3, 40))])
def test_common_words_stand_as_often_as_ruler_has_them(length, often, seldom, example):
    found = sample("cwe", length)
    head = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often.\n"
    )
    parts = found.prompt.split(head)
    assert parts[0] == "" and len(parts) == 3
    asks = (
        "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most "
        "often in the list are:"
    )
    for part, (many, few, total) in zip(parts[1:], [example, (often, seldom, None)], strict=True):
        text, after = part.split(asks)
        counts = collections.Counter(re.findall(r"\d+\. (\S+)", text))
        common = [word for word, count in counts.items() if count == many]
        assert len(common) == 10 and set(counts.values()) == {many, few}
        assert total is None or len(counts) == total
        assert [int(x) for x in re.findall(r"(\d+)\. ", text)] == list(range(1, counts.total() + 1))
        if total:
            assert sorted(re.findall(r"\d+\. (\S+)", after)) == sorted(common)
    assert after == "" and sorted(found.answers) == sorted(common)


def test_frequent_words_follow_the_zeta_distribution():
    found = sample("fwe", 8192)
    head = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. "
    )
    tail = (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
        "appeared words are:"
    )
    assert found.prompt.startswith(head) and found.prompt.endswith(tail)
    counts = collections.Counter(found.prompt[len(head) : -len(tail)].split(" "))
    (dots, most), *coded = counts.most_common()
    assert dots == "..." and all(re.fullmatch("[a-z]{6}", word) for word, _ in coded)
    assert {word for word, _ in coded[:3]} == set(found.answers) and coded[2][1] > coded[3][1]
    for rank, (_, count) in enumerate(coded[:20], 2):
        assert abs(count - most / rank**2) <= 1


@pytest.mark.parametrize("task", ["vt", "cwe", "fwe"])
@pytest.mark.parametrize("length", [2048, 5000])
def test_a_text_is_as_long_as_fits_with_its_answer(task, length):
    found, generated = sample(task, length), {"vt": 30, "cwe": 120, "fwe": 50}[task]
    assert length - 60 < words(found.prompt) + generated <= length
    assert sample(task, length) == found and sample(task, length, seed=1).answers != found.answers


@pytest.mark.parametrize("length, pairs, least", [(2048, 0, 200), (4096, 0, 80), (16384, 1, 400), (40_000, 1, 1000)])
def test_no_word_of_a_list_tells_by_its_form_that_it_is_common(length, pairs, least):
    """The share of pairs among the answers is that of all words, at lengths that need more words than there are."""
    found = sample("cwe", length)
    example, question = (
        re.findall(r"\d+\. (\S+)", part.split("\nQuestion")[0]) for part in found.prompt.split("Below is")[1:]
    )
    for some in (found.answers, set(question), set(example)):
        assert sum("-" in word for word in some) == pairs * len(some)
    assert len(set(question)) > least and set(found.answers) < set(question)
    assert score(found.answers, " ".join(found.answers)) == 1


def test_a_list_longer_than_all_words_is_refused():
    with pytest.raises(ValueError, match="cwe has 26,216 words, too few for so long a list; use a smaller length"):
        sample("cwe", 50_000, count=lambda text: len(text) // 1000)


@pytest.mark.parametrize("task, length", [("vt", 800), ("cwe", 900), ("fwe", 300)])
def test_a_length_without_room_is_refused(task, length):
    with pytest.raises(ValueError, match=f"length is {length} tokens, too few for a question and"):
        sample(task, length, count=len)
