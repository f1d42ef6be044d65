"""RULER's qa_1 and qa_2: the prompt letter by letter, which paragraphs it has, and files that cannot be read."""

import json
import re

import pytest

from titans_jax.evaluation import EvaluationError
from titans_jax.evaluation.needles import Essay
from titans_jax.evaluation.paragraphs import PARAGRAPH_TASKS, hotpotqa, read_task, squad
from titans_jax.evaluation.ruler_tasks import make_sample, score

ESSAY = Essay("Nothing.")


def question(text, *answers, impossible=False):
    return {"question": text, "answers": [{"text": answer} for answer in answers], "is_impossible": impossible}


ARTICLES = {"data": [
    {"paragraphs": [
        {"context": "The sea is {blue}.", "qas": [
            question("Why?", impossible=True), question("Which is the sea?", "blue", "blue", "the blue one"),
        ]},
        {"context": "The sun is red.", "qas": [question("Which is the sun?", "red")]},
        {"context": "The moon is grey.", "qas": []},
    ]},
    {"paragraphs": [{"context": f"Paragraph {number} of another.", "qas": []} for number in range(9)]},
]}  # fmt: skip
RECORDS = [
    {"question": f"Who is {record}?", "answer": "yes", "context": [
        [f"Title {record} {text}", ["One. ", "Two."]] for text in range(10)
    ]} for record in range(3)
]  # fmt: skip
TASKS = {"qa_1": squad(ARTICLES), "qa_2": hotpotqa(RECORDS)}


def write_sets(folder):
    """The two files in a folder of data sets."""
    for (_, path, _), content in zip(PARAGRAPH_TASKS.values(), (ARTICLES, RECORDS), strict=True):
        (folder / path).parent.mkdir()
        (folder / path).write_text(json.dumps(content))


def documents(prompt):
    """The numbered paragraphs of a prompt, after a check of all around them."""
    ask = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    begin, end = f"{ask}\n\nThe following are given documents.\n\nDocument 1:\n", f"\n\n{ask}\n\nQuestion: "
    assert prompt.startswith(begin) and prompt.count(end) == 1 and re.search(r"\?( Answer:)$", prompt)
    first, *others = re.split(r"\n\nDocument (\d+):\n", prompt[len(begin) : prompt.index(end)])
    assert list(map(int, others[::2])) == list(range(2, 2 + len(others) // 2))
    return [first, *others[1::2]]


def test_a_question_of_squad_in_the_words_of_ruler():
    found = make_sample(TASKS["qa_1"], ESSAY, len, 400, 0)
    assert found.prompt.endswith("\n\nQuestion: Which is the sea? Answer:")
    assert found.answers == ("blue", "the blue one") and found.one_is_enough and found.depth is None
    assert {"The sea is {blue}."} <= set(documents(found.prompt)) <= {"The sea is {blue}.", "The sun is red.",
                                                                     "The moon is grey."}  # fmt: skip


def test_its_own_paragraph_then_those_of_its_article_then_others_then_all_again():
    own, article = {"The sun is red."}, {"The sun is red.", "The sea is {blue}.", "The moon is grey."}
    draft = TASKS["qa_1"].draft(1, ESSAY, len, 1000)
    texts = [documents(draft.prompt(units)) for units in range(1, 26)]
    assert [len(each) for each in texts] == list(range(1, 26)) and draft.least == 1
    assert set(texts[0]) == own and set(texts[2]) == article and article < set(texts[3])
    assert len(set(texts[11])) == 12 and sorted(texts[23]) == sorted(2 * texts[11])
    orders = {tuple(documents(TASKS["qa_1"].draft(number, ESSAY, len, 1000).prompt(3))) for number in range(1, 41, 2)}
    firsts = {documents(TASKS["qa_1"].draft(1, ESSAY, len, length).prompt(9))[-1] for length in range(1000, 1040)}
    assert len(firsts) > 1  # and for every length
    assert len(orders) == 6  # the order of the paragraphs is drawn for every sample


def test_a_question_of_hotpotqa_has_its_ten_paragraphs():
    found = TASKS["qa_2"].draft(4, ESSAY, len, 10_000)
    assert found.least == 10 and found.answers == ("yes",)
    assert sorted(documents(found.prompt(10))) == [f"Title 1 {text}\nOne. Two." for text in range(10)]
    assert len(set(documents(found.prompt(30)))) == 30
    with pytest.raises(ValueError, match="length is 300 tokens, too few for a question and 32 of an answer"):
        make_sample(TASKS["qa_2"], ESSAY, len, 300, 0)


@pytest.mark.parametrize("task", TASKS)
def test_a_text_is_as_long_as_fits_with_32_tokens_of_answer(task):
    found = make_sample(TASKS[task], ESSAY, len, 2000, 5)
    assert 2000 - 60 < len(found.prompt) + 32 <= 2000
    assert found == make_sample(TASKS[task], ESSAY, len, 2000, 5)


def test_one_of_the_answers_is_enough():
    assert score(("blue", "the blue one"), " It is BLUE.", one_is_enough=True) == 1
    assert score(("blue",), "red", one_is_enough=True) == 0


@pytest.mark.parametrize(
    "content, words",
    [
        (None, r"there is no .*dev-v2.0.json \(nor .gz, .xz\); titans data list says where it comes from"),
        ("{", r"cannot be read as squad \(Expecting .*\); fetch it again"),
        ("[]", r"cannot be read as squad \(list indices .*\); fetch it again"),
        ('{"rows": []}', r"cannot be read as squad \(no 'data'\); fetch it again"),
        ('{"data": []}', "has no questions with an answer; fetch it again"),
    ],
)
def test_a_file_that_is_missing_or_another_is_a_sentence(tmp_path, content, words):
    if content is not None:
        (tmp_path / "squad").mkdir()
        (tmp_path / "squad" / "dev-v2.0.json").write_text(content)
    with pytest.raises(EvaluationError, match=words) as refused:
        read_task(tmp_path, "qa_1")
    assert "\n" not in str(refused.value)


def test_both_are_read_from_the_folder_of_data_sets(tmp_path):
    write_sets(tmp_path)
    for task, made in TASKS.items():
        found = read_task(tmp_path, task)
        assert (found.questions, found.paragraphs) == (made.questions, made.paragraphs)
