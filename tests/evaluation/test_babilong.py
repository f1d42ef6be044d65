"""BABILong: bAbI's files, prompts letter by letter, contexts of the length, the score, and the evaluator."""

import csv
import hashlib
import io
import json
import lzma
import random
import tarfile
from pathlib import Path

import pytest

from tests.evaluation.test_positions import run_of
from titans_jax.data import ByteTokenizer, load_tokenizer
from titans_jax.evaluation import EvaluationError, EvaluationOptions, babi, babilong
from titans_jax.inference import Generator

DATA = Path(__file__).parents[3] / "shared" / "data"
MISTRAL = DATA / "tokenizers" / "mistral-v1" / "tokenizer.model"
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


@pytest.mark.parametrize(
    "task, published",
    [
        ("qa1", "9739beca48d3fd4aff83d6774b34ff73f5ee714f8b35228d00b3ae7ad382416c"),
        ("qa2", "42f040ae99e2dc39fc2cfda5a1ca33bddbb89d438d10e23b5f40a8a0ec926cb9"),
        ("qa3", "d400da9c4ed89983897dfa1209957e9b3a3fb6695e1b0ce06b4cee179a4baa3c"),
        ("qa4", "4b0b50d7f24c1e9cb978bc9fa4097e654a64dca0190b4660808010dce141f399"),
        ("qa5", "66fdb07306e6a61ac8bea4137ffcb9d49decb8c81122ea38e271c4015a172231"),
    ],
)
def test_prompts_are_babilongs_letter_by_letter(task, published):
    """sha256 of what BABILong's get_formatted_input (babilong/prompts.py, 7a6efee) makes of DEFAULT_PROMPTS."""
    prompt = babi.ask(task, " Mary left. ", "Where is Mary? ")
    assert hashlib.sha256(prompt.encode()).hexdigest() == published


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


@pytest.mark.parametrize("tokenizer", ["byte", str(MISTRAL)], ids=["byte", "mistral"])
def test_a_sentence_has_the_tokens_that_it_has_behind_another(tokenizer):
    """A text of sentences has as many tokens as its sentences, but for the first, which has no blank in front."""
    if tokenizer != "byte" and not MISTRAL.exists():
        pytest.skip(f"there is no {MISTRAL}")
    tokenizer = load_tokenizer(tokenizer)
    background = babi.Background([NOVEL], tokenizer)
    sentences = ["Mary moved to the bathroom.", "It was over.", "“Why?” asked Zoë."] * 40
    assert len(tokenizer.encode("So." + "".join(f" {each}" for each in sentences))) == len(
        tokenizer.encode("So.")
    ) + background.size(sentences)
    for tokens in (300, 1234):
        context = background.hide(random.Random(0), ["Mary moved to the bathroom."] * 5, tokens)
        assert tokens <= len(tokenizer.encode("So. " + context)) - len(tokenizer.encode("So.")) <= tokens + 1
        assert "  " not in context


def questions_of(tokenizer, stories=None):
    stories = stories or {task: babilong.read_task(DATA, task) for task in babi.LABELS}
    return babilong.Questions(stories, babi.Background([NOVEL], tokenizer), tokenizer)


@pytest.mark.parametrize("tokenizer", ["byte", str(MISTRAL)], ids=["byte", "mistral"])
@pytest.mark.parametrize("task", babi.LABELS)
def test_a_prompt_with_its_answer_has_at_most_the_length(tokenizer, task):
    """And nearly that, or BABILong's 300 tokens more than its context has, where the words around have fewer."""
    if not (DATA / "babi").exists() or not MISTRAL.exists():
        pytest.skip(f"there is no {DATA / 'babi'} or {MISTRAL}")
    tokenizer = load_tokenizer(tokenizer)
    asked = questions_of(tokenizer)
    for length in (2048, 4096):
        for number in range(8):
            prompt = asked.ask(task, length, number).prompt
            context = prompt.split("<context>\n")[-1].split("\n</context>")[0]
            tokens = 1 + len(tokenizer.encode(prompt)) + 20
            assert tokens <= length
            assert tokens > length - 5 or length - 305 < len(tokenizer.encode(context)) <= length - 299


def test_stories_have_room_by_their_facts_and_come_once_each():
    """Facts and the question are at most (2048 - 300) / 8 = 218 rows; behind them come the same stories again."""
    stories = [babi.Story(("A b.",) * count, "Who?", "office") for count in (1, 216, 217, 218, 219)]
    asked = questions_of(ByteTokenizer(), {"qa4": stories})
    assert asked.describe("qa4", 2048) == {"stories_that_fit": 3, "of_stories": 5, "mean_facts": 144.7}
    assert asked.describe("qa4", 0) == {"stories_that_fit": 5, "of_stories": 5, "mean_facts": 174.2}
    counts = [asked.ask("qa4", 2048, number).prompt.count("A b.") for number in range(6)]
    assert sorted(counts[:3]) == [1, 216, 217] and counts[3:] == counts[:3]
    assert asked.ask("qa4", 2048, 0).prompt != asked.ask("qa4", 2048, 3).prompt  # another place in the novels
    long = babi.Story(("The apple is here, in the kitchen of the house.",) * 40, "Who?", "office")
    asked = questions_of(ByteTokenizer(), {"qa1": [long, stories[0]], "qa4": [long]})  # 41 rows, but 1,920 bytes
    assert asked.describe("qa1", 2048)["stories_that_fit"] == 1
    with pytest.raises(ValueError, match="length is 2,048 tokens, too few for the facts of its stories; use a larger"):
        asked.ask("qa4", 2048, 0)


def test_a_hundred_questions_are_of_a_hundred_stories():
    if not (DATA / "babi").exists():
        pytest.skip(f"there is no {DATA / 'babi'}")
    asked = questions_of(ByteTokenizer(), {"qa1": babilong.read_task(DATA, "qa1")})
    drawn = {length: [asked.ask("qa1", length, number) for number in range(100)] for length in (0, 4096)}
    facts = [each.prompt.split("<context>\n")[-1] for each in drawn[0]]
    assert len(set(facts)) == 100
    assert [each.answers for each in drawn[0]] != [each.answers for each in drawn[4096]]
    assert drawn[0][7].prompt == questions_of(ByteTokenizer()).ask("qa1", 0, 7).prompt


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
    numbers = babilong.babilong(run, EvaluationOptions(length=4096, samples=4, data=data))
    assert [row["length"] for row in numbers["mean"]] == [0, 1024, 2048, 4096]
    assert all(row["accuracy"] == 100 for row in numbers["qa1"]) and all(row["accuracy"] == 0 for row in numbers["qa5"])
    # qa1 to qa4 have the same stories here, all of them right; qa2 and qa3 have more than 1,024 bytes of words around.
    rows = [(row["length"], row["trained_on_rows_of"], row["tasks"], row["accuracy"]) for row in numbers["mean"]]
    assert rows == [(0, 16, 5, 80.0), (1024, 16, 3, pytest.approx(200 / 3)), (2048, 16, 5, 80.0), (4096, 16, 5, 80.0)]
    assert max(1 + len(prompt.encode()) + 20 for prompt in asked) in range(4090, 4097) and len(asked) == 18 * 4
    assert numbers["qa1"][1] == {
        "length": 1024, "trained_on_rows_of": 16, "samples": 4, "accuracy": 100.0,
        "stories_that_fit": 2, "of_stories": 2, "mean_facts": 2.5,
    }  # fmt: skip
    saved = json.loads((run.folder / "babilong.json").read_text())
    assert saved["books"].endswith("valid.jsonl") and len(saved["answers"]) == 72
    assert saved["tables"]["qa1"] == numbers["qa1"] and len(saved["left_out"]) == 2
    with (run.folder / "babilong.csv").open() as file:
        rows = list(csv.DictReader(file))
    said = "1,024 x 2^k tokens of byte; the published ones are 1,000 x 2^k tokens of GPT-2's tokenizer"
    assert len(rows) == 18 and {row["lengths"] for row in rows} == {said}
    assert {row["of_stories"] for row in rows} == {"2"}
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
