"""BABILong: bAbI's files, prompts letter by letter, contexts of the length, the score, and the evaluator."""

import csv
import io
import json
import lzma
import random
import tarfile
from pathlib import Path

import pytest

from tests.evaluation.test_positions import run_of
from titans_jax.data import ByteTokenizer
from titans_jax.evaluation import EvaluationError, EvaluationOptions, babi, babilong
from titans_jax.inference import Generator

DATA = Path(__file__).parents[3] / "shared" / "data"
STORY = (
    "1 Mary moved to the bathroom.\n2 John went to the hallway.\n3 Where is Mary? \tbathroom\t1\n4 Mary went to the "
    "office.\n5 Where is Mary? \toffice\t4\n1 Sandra got the milk.\n2 What did Sandra get?\tmilk\t1\n"
)


def test_every_question_has_the_facts_before_it_and_no_questions():
    first, second, third = babi.read_stories(STORY)
    assert first == babi.Story(
        ("Mary moved to the bathroom.", "John went to the hallway."), "Where is Mary? ", "bathroom"
    )
    assert second.facts == (*first.facts, "Mary went to the office.") and second.answer == "office"
    assert third == babi.Story(("Sandra got the milk.",), "What did Sandra get?", "milk")
    with pytest.raises(ValueError, match="'no number' is no line of bAbI"):
        babi.read_stories("no number\n")


@pytest.mark.parametrize("task", babi.LABELS)
def test_the_test_files_hold_a_thousand_questions_of_known_answers(task):
    if not (DATA / "babi").exists():
        pytest.skip(f"there is no {DATA / 'babi'}")
    stories = babilong.read_task(DATA, task)
    assert len(stories) == 999  # the last is never asked
    assert {story.answer for story in stories} <= set(babi.LABELS[task])
    counts = [len(story.facts) for story in stories]
    assert min(counts) >= 2 and (max(counts) == min(counts) == 2) == (task == "qa4")


def test_the_prompt_of_qa1_letter_by_letter():
    assert babi.ask("qa1", " Mary left. ", "Where is Mary? ") == (
        "I will give you context with the facts about positions of different persons hidden in some random text and "
        "a question. You need to answer the question based only on the information from the facts. If a person was in "
        "different locations, use the latest location to answer the question.\n\n"
        "<example>\nCharlie went to the hallway. Judith come back to the kitchen. Charlie travelled to balcony. Where "
        "is Charlie?\nAnswer: The most recent location of Charlie is balcony.\n</example>\n\n"
        "<example>\nAlan moved to the garage. Charlie went to the beach. Alan went to the shop. Rouse travelled to "
        "balcony. Where is Alan?\nAnswer: The most recent location of Alan is shop.\n</example>\n\n"
        "Always return your answer in the following format: The most recent location of ’person’ is ’location’. Do not "
        "write anything else after that.\n\n<context>\nMary left.\n</context>\n\nQuestion: Where is Mary?"
    )


@pytest.mark.parametrize("task", babi.LABELS)
def test_a_copied_example_is_wrong(task):
    labels = babi.LABELS[task]
    for _, said in babi.EXAMPLES[task]:
        wrong = [label for label in labels if not babi.is_right(task, babi.Story((), "Where?", label), said)]
        assert len(wrong) >= len(labels) - 1


@pytest.mark.parametrize(
    "said, right",
    [
        ("The most recent location of Mary is office.", True),
        ("OFFICE", True),
        ("the kitchen or the office", False),
        ("in the garden. office", False),
        ("office<context>kitchen", True),
        ("office <example> kitchen", True),
        ("hallway, office", True),  # the question names the hallway
        ("", False),
        ("nowhere", False),
    ],
)
def test_an_answer_is_the_only_label_of_the_first_sentence(said, right):
    assert babi.is_right("qa1", babi.Story((), "Who was in the hallway?", "office"), said) == right


NOVEL = (
    "The sea was calm that morning. Nobody spoke. It was over before anyone had time to look at the old clock. " * 60
)


@pytest.mark.parametrize("tokens", [200, 1000, 5000])
def test_contexts_have_their_length_and_facts_their_order(tokens):
    facts = [f"Mary moved to room {number}." for number in range(5)]
    background = babi.Background([NOVEL], ByteTokenizer())
    places = set()
    for seed in range(10):
        context = background.hide(random.Random(seed), facts, tokens)
        assert tokens - 2 <= len(context) <= tokens  # blanks at its ends are cut off
        found = [context.index(fact) for fact in facts]
        assert found == sorted(found)
        places.add(found[2])
        rest = context
        for fact in facts:
            rest = rest.replace(fact, "")
        # All sentences but the last are whole.
        whole = {
            "The sea was calm that morning.",
            "Nobody spoke.",
            "It was over before anyone had time to look at the old clock.",
        }
        said = [each.strip() for each in rest.replace(".", ".|").split("|") if each.strip()]
        assert set(said[:-1]) <= whole
    assert len(places) > 3


def test_what_has_no_room_or_no_sentences_is_refused():
    background = babi.Background([NOVEL], ByteTokenizer())
    with pytest.raises(ValueError, match="facts of 31 tokens are longer than the context"):
        background.hide(random.Random(0), ["Mary moved to the bathroom now"], 30)
    with pytest.raises(ValueError, match="no sentence of 10 tokens"):
        babi.Background(["A. B. C. " * 99], ByteTokenizer()).hide(random.Random(0), [], 30)
    with pytest.raises(ValueError, match="hold no text"):
        babi.Background([" "], ByteTokenizer())


@pytest.fixture
def data(tmp_path):
    """An archive of five small tasks, and a novel."""
    (tmp_path / "babi").mkdir()
    (tmp_path / "books").mkdir()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as files:
        for task in babi.LABELS:
            info = tarfile.TarInfo(f"tasks/en-10k/{task}_some-facts_test.txt")
            info.size = len(STORY)
            files.addfile(info, io.BytesIO(STORY.encode()))
    (tmp_path / "babi" / "tasks_1-20_v1-2.en-10k.tar.xz").write_bytes(lzma.compress(packed.getvalue()))
    (tmp_path / "books" / "valid.jsonl").write_text(json.dumps({"text": NOVEL}) + "\n")
    return tmp_path


def test_a_model_that_reads_the_last_place_is_right_where_it_is_the_answer(data, tmp_path, monkeypatch):
    run = run_of(tmp_path / "run", "lmm")
    asked = []

    def last_place(self, params, prompts, count):
        asked.extend(prompts)
        assert count == 20
        places = [prompt.rsplit("<context>", 1)[1] for prompt in prompts]
        return [max(("bathroom", "office"), key=text.rfind) + ". Then more" for text in places]

    monkeypatch.setattr(Generator, "complete", last_place)
    numbers = babilong.babilong(run, EvaluationOptions(length=2048, samples=4, data=data))
    assert [row["length"] for row in numbers["mean"]] == [0, 1024, 2048]
    assert all(row["accuracy"] == 100 for row in numbers["qa1"]) and all(row["accuracy"] == 0 for row in numbers["qa5"])
    # qa1 to qa4 have the same stories here, all of them right.
    assert all(row == {"length": row["length"], "tasks": 5, "accuracy": 80.0} for row in numbers["mean"])
    contexts = [prompt.split("<context>\n")[-1].split("\n</context>")[0] for prompt in asked]
    assert max(map(len, contexts)) <= 2048 - 300 and len(asked) == 3 * 5 * 4
    saved = json.loads((run.folder / "babilong.json").read_text())
    assert saved["books"].endswith("valid.jsonl") and len(saved["answers"]) == 60
    with (run.folder / "babilong.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 15
    assert (run.folder / "babilong.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_missing_or_damaged_is_a_sentence(data, tmp_path):
    run = run_of(tmp_path / "run", "lmm")
    with pytest.raises(EvaluationError, match=r"there is no .*en-10k.tar \(nor .gz, .xz\); titans data list"):
        babilong.babilong(run, EvaluationOptions(data=tmp_path / "nowhere"))
    with pytest.raises(EvaluationError, match="has no test file of qa9; fetch it again"):
        babilong.read_task(data, "qa9")
    archive = data / "babi" / "tasks_1-20_v1-2.en-10k.tar.xz"
    archive.write_bytes(archive.read_bytes()[:100])
    with pytest.raises(EvaluationError, match="cannot be read .*; fetch it again"):
        babilong.read_task(data, "qa1")
