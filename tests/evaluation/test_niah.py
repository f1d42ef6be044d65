"""Needle tasks: RULER's strings, lengths, answers and scores, and the evaluator on a model that knows nothing."""

import collections
import csv
import dataclasses
import json
import lzma
import re

import pytest

from tests.evaluation.test_paragraphs import write_sets
from tests.evaluation.test_positions import run_of
from titans_jax import cli
from titans_jax.evaluation import EvaluationError, EvaluationOptions, asking, needles, niah
from titans_jax.evaluation.needles import NOISE, Essay, split_sentences
from titans_jax.evaluation.ruler_tasks import TASKS, make_sample, score
from titans_jax.evaluation.show import print_numbers
from titans_jax.inference import Generator, NotFiniteLogits

NEEDLES = list(TASKS)[:8]
ESSAY = Essay("The sea was calm. Nobody spoke for an hour! Was it over? It was, at 3.5 knots. " * 20)


def sample(task, length=2500, seed=0):
    return make_sample(TASKS[task], ESSAY, len, length, seed)


def test_a_haystack_of_needles_has_no_other_value_of_the_key_that_is_asked_for(monkeypatch):
    """With 4 keys in all, so that every third line or so would have that one."""
    monkeypatch.setattr(needles, "ADJECTIVES", ("calm", "wide"))
    monkeypatch.setattr(needles, "NOUNS", ("sea", "hour"))
    for seed in range(5):
        asked = sample("niah_multikey_2", 3000, seed)
        key = re.search(r"for ([a-z]+-[a-z]+) mentioned", asked.prompt)[1]
        assert re.findall(rf" for {key} is: (\d+)", asked.prompt) == [*asked.answers]


def test_one_needle_is_asked_for_in_the_words_of_ruler():
    """The whole prompt of S-NIAH-1, letter by letter; the needle keeps its plural."""
    prompt, (value,) = sample("niah_single_1", 900).prompt, sample("niah_single_1", 900).answers
    key = re.search(r"for ([a-z]+-[a-z]+) is: ", prompt)[1]
    lines = prompt.split("\n")
    needle = lines.index(f"One of the special magic numbers for {key} is: {value}.")
    assert lines[0] == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards."
    )
    assert {*lines[1:needle], *lines[needle + 1 : -1]} <= {NOISE} and lines[-2] == NOISE
    assert lines[-1] == (
        f"What is the special magic number for {key} mentioned in the provided text? The special magic number for "
        f"{key} mentioned in the provided text is"
    )
    assert re.fullmatch(r"[1-9]\d{6}", value)


def test_several_needles_are_asked_for_in_the_plural():
    found = sample("niah_multiquery")
    assert len(found.answers) == 4 and found.prompt.startswith("Some special magic numbers are hidden within")
    keys = r"([a-z]+-[a-z]+), ([a-z]+-[a-z]+), ([a-z]+-[a-z]+), and ([a-z]+-[a-z]+)"
    question = rf"What are all the special magic numbers for {keys} mentioned in the provided text\? The special"
    asked = re.search(question, found.prompt).groups()
    for key, answer in zip(asked, found.answers, strict=True):
        assert f"One of the special magic numbers for {key} is: {answer}." in found.prompt
    assert found.prompt.endswith("and " + asked[-1] + " mentioned in the provided text are")


@pytest.mark.parametrize("task", NEEDLES)
@pytest.mark.parametrize("length", [2500, 6001])
def test_a_text_is_as_long_as_fits_with_128_tokens_of_answer(task, length):
    """A further unit of the haystack, a line or a word of at most 130 characters, would not."""
    prompt = sample(task, length).prompt
    assert length - 130 < len(prompt) + 128 <= length


@pytest.mark.parametrize("task", NEEDLES)
def test_every_answer_stands_once_in_the_text_and_another_seed_is_another_question(task):
    counts = {"niah_multivalue": 4, "niah_multiquery": 4}
    found = sample(task)
    assert len(set(found.answers)) == len(found.answers) == counts.get(task, 1)
    assert all(found.prompt.count(answer) == 1 for answer in found.answers)
    assert sample(task) == found and sample(task, seed=1).answers != found.answers


def test_needles_stand_anywhere():
    depths = collections.Counter(int(5 * sample("niah_single_2", seed=seed).depth) for seed in range(100))
    assert len(depths) == 5 and max(depths.values()) < 40


def test_sentences_end_where_a_reader_would_end_them():
    text = 'He left. "Why?" she asked. It was "so." Then 3.5 miles, e.g. two. And?'
    assert split_sentences(text) == [
        "He left.",
        '"Why?" she asked.',
        'It was "so."',
        "Then 3.5 miles, e.g. two.",
        "And?",
    ]


def test_no_sentence_of_an_essay_ends_behind_a_title():
    text = "Here Mr. Darcy bowed. Mrs. Hill and Capt. Fitz Roy left St. Jago. Dr. Smith is no Mr. He stayed with them."
    assert Essay(text).first_sentences(len(text.split())) == [
        "Here Mr. Darcy bowed.",
        "Mrs. Hill and Capt. Fitz Roy left St. Jago.",
        "Dr. Smith is no Mr. He stayed with them.",
    ]
    assert split_sentences("Here Mr. Darcy bowed. He, too.") == ["Here Mr.", "Darcy bowed.", "He, too."]
    assert Essay("He was last. Most. Do.").first_sentences(5) == ["He was last.", "Most.", "Do."]


def test_an_essay_is_read_again_from_its_first_word():
    assert " ".join(Essay("One two.\n\nThree").first_sentences(8)) == "One two. Three One two. Three One two."


def test_an_answer_counts_by_what_stands_in_it():
    assert (
        score(("12",), " the number\x0012 ") == 1 and score(("AB", "cd"), "ab only") == 0.5 and score(("1",), "") == 0
    )


def test_a_length_without_room_for_a_question_is_refused():
    with pytest.raises(ValueError, match="length is 300 tokens, too few for a question"):
        sample("niah_single_1", 300)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("run"), "lmm", num_persistent=0)


def short_answers(monkeypatch, names):
    """The tasks with these names, with answers of two tokens."""
    chosen = {name: dataclasses.replace(TASKS[name], generated=2) for name in names}
    monkeypatch.setattr(niah, "TASKS", chosen)


def test_a_model_that_knows_nothing_finds_nothing_and_all_is_written(run, monkeypatch, tmp_path):
    text = tmp_path / "essay.txt"
    text.write_text("The sea was calm. Nobody spoke. " * 200)
    short_answers(monkeypatch, NEEDLES[:3])
    numbers = niah.niah(run, EvaluationOptions(length=1024, samples=2, text=text))
    row = {"length": 1024, "trained_on_rows_of": 16, "samples": 2, "accuracy": 0.0, "titans_lmm": ""}
    assert numbers == {name: [row] for name in NEEDLES[:3]}
    saved = json.loads((run.folder / "niah.json").read_text())
    assert saved["essays"] == str(text) and saved["trained_on_rows_of"] == 16 and saved["tables"] == numbers
    assert len(saved["answers"]) == 6 and (run.folder / "niah.png").stat().st_size > 10_000
    with (run.folder / "niah.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["task"] for row in rows] == NEEDLES[:3]
    for row in rows:
        assert {name: row[name] for name in ("length", "trained_on_rows_of", "tokenizer", "essays")} == {
            "length": "1024", "trained_on_rows_of": "16", "tokenizer": "byte", "essays": str(text),
        }  # fmt: skip
        assert "RULER before June 2025, whose contexts fall short by up to 500 words" in row["published"]


def test_what_a_reader_must_know_is_printed_once_above_the_tables(run, all_knowing, capsys):
    print_numbers({"step": run.step} | niah.niah(run, EvaluationOptions(length=2048, samples=1)))
    printed = capsys.readouterr().out
    head = printed[: printed.index("niah single 1")]
    lines = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in head.splitlines()}
    assert lines["essays"] == "the run's validation documents" and lines["tokenizer"] == "byte"
    assert head.count("RULER before June 2025") == printed.count("RULER before June 2025") == 1
    assert printed.index("niah single 3") > printed.index("niah single 2") > len(head)


@pytest.mark.parametrize(
    "pattern, column, percent",
    [(("lmm", "attention"), "titans_lmm", (98.4, 99.8, 89.4)), (("attention",), "titans_lmm", (98.4, 99.8, 89.4)),
     (("mag",), "titans_mag", (98.0, 98.8, 98.0)), (("attention", "mac"), "titans_mac", (98.8, 98.2, 98.2))],
)  # fmt: skip
def test_what_the_paper_found_with_such_a_model_stands_beside(
    tmp_path, monkeypatch, all_knowing, pattern, column, percent
):
    """Table 2 at 4K; nothing at 1K, where it has none."""
    monkeypatch.setattr(niah, "TASKS", {name: TASKS[name] for name in (*NEEDLES[:3], "fwe")})
    found = niah.ruler(run_of(tmp_path, *pattern), EvaluationOptions(length=4096, samples=1))
    for name, number in zip(NEEDLES[:3], percent, strict=True):
        beside = {row["length"]: row[column] for row in found[name]}
        assert beside[4096] == number and beside[1024] == ""
    assert column not in found["fwe"][0]
    with (tmp_path / "ruler.csv").open() as file:
        assert {row["task"]: row[column] for row in csv.DictReader(file) if row["length"] == "4096"} == {
            **{name: str(number) for name, number in zip(NEEDLES[:3], percent, strict=True)}, "fwe": ""
        }  # fmt: skip


@pytest.mark.parametrize("ending, pack", [("", bytes), (".xz", lzma.compress)])
def test_essays_are_those_of_the_data_sets_where_they_are(run, monkeypatch, all_knowing, tmp_path, ending, pack):
    (tmp_path / "haystack").mkdir()
    file = tmp_path / "haystack" / f"nonfiction.jsonl{ending}"
    file.write_bytes(pack(json.dumps({"text": "Whales are no fish. " * 200}).encode() + b"\n"))
    niah.niah(run, EvaluationOptions(length=1024, samples=1, data=tmp_path))
    essays = [prompt for prompt in all_knowing if "grass is green" not in prompt]
    assert len(essays) == 2 and all("Whales are no fish." in prompt for prompt in essays)
    assert json.loads((run.folder / "niah.json").read_text())["essays"] == str(file)


@pytest.fixture
def all_knowing(monkeypatch):
    """A model that says every answer."""
    answers = {}

    def made(*inputs):
        found = make_sample(*inputs)
        answers[found.prompt] = " and ".join(found.answers)
        return found

    monkeypatch.setattr(niah, "make_sample", made)
    said = lambda self, params, prompts, count: [answers[prompt] for prompt in prompts]  # noqa: E731
    monkeypatch.setattr(Generator, "complete", said)
    return answers


def test_a_model_that_says_the_answer_finds_all(run, all_knowing):
    """ruler takes the mean over its tasks whose questions fit: in bytes, three do not fit 1,024 and one not 2,048."""
    numbers = niah.ruler(run, EvaluationOptions(length=2500, samples=1))
    assert [(row["length"], row["accuracy"]) for row in numbers["mean"]] == [(1024, 100.0), (2048, 100.0)]
    counts = {row["length"]: row["tasks"] for row in numbers["mean"]}
    for length, count in counts.items():
        assert count == sum(length in [row["length"] for row in numbers.get(name, [])] for name in TASKS)
    left_out = json.loads((run.folder / "ruler.json").read_text())["left_out"]
    assert counts[1024] < 11 and len(left_out) == 2 + 22 - sum(counts.values())
    assert left_out[0].startswith("qa_1: there is no data/squad/dev-v2.0.json (nor .gz, .xz); titans data list says")
    assert any(
        sentence.startswith("vt: length is 1,024 tokens, too few for a question and 30") for sentence in left_out
    )


def test_a_task_whose_second_question_does_not_fit_has_no_accuracy(run, all_knowing, monkeypatch):
    """The first one alone would be a sample of short questions."""
    make = niah.make_sample

    def first_only(*inputs):
        if inputs[-1]:
            raise ValueError("question 1 is too long")
        return make(*inputs)

    monkeypatch.setattr(asking, "SIDE_BY_SIDE", 1)
    monkeypatch.setattr(niah, "make_sample", first_only)
    monkeypatch.setattr(niah, "TASKS", {"fwe": TASKS["fwe"]})
    with pytest.raises(EvaluationError, match=r"^ruler: fwe: question 1 is too long"):
        niah.ruler(run, EvaluationOptions(length=1024, samples=2))


def test_questions_about_paragraphs_are_asked_where_their_files_are(run, all_knowing, monkeypatch, tmp_path):
    """Question after question of the file, from the first again; the mean is over all tasks that have room."""
    write_sets(tmp_path)
    monkeypatch.setattr(niah, "TASKS", {"fwe": TASKS["fwe"]})
    numbers = niah.ruler(run, EvaluationOptions(length=1024, samples=3, data=tmp_path))
    assert numbers["mean"] == [{"length": 1024, "trained_on_rows_of": 16, "tasks": 3, "accuracy": 100.0}]
    saved = json.loads((run.folder / "ruler.json").read_text())
    assert "left_out" not in saved
    assert [answer["answers"] for answer in saved["answers"] if answer["task"] == "qa_1"] == [
        ["blue", "the blue one"], ["red"], ["blue", "the blue one"],
    ]  # fmt: skip


def test_what_was_answered_before_logits_were_not_finite_is_kept(run, all_knowing, monkeypatch):
    known = Generator.complete

    def fails_late(self, params, prompts, count):
        if count == TASKS["fwe"].generated:
            raise NotFiniteLogits("logits are not finite")
        return known(self, params, prompts, count)

    monkeypatch.setattr(Generator, "complete", fails_late)
    monkeypatch.setattr(niah, "TASKS", {name: TASKS[name] for name in ("niah_single_1", "fwe")})
    with pytest.raises(EvaluationError, match="logits are not finite; the 1 answers before are in ruler.json"):
        niah.ruler(run, EvaluationOptions(length=1024, samples=1))
    (answer,) = json.loads((run.folder / "ruler.json").read_text())["answers"]
    assert answer["task"] == "niah_single_1" and answer["accuracy"] == 1


@pytest.mark.parametrize(
    "options, words",
    [
        ({"length": 1000}, "length is 1,000; use at least 1,024"),
        ({"length": 1024, "text": "nowhere.txt"}, "text is 'nowhere.txt', which cannot be used"),
    ],
)
def test_what_cannot_be_asked_is_refused(run, options, words, tmp_path):
    if "text" in options:
        options = options | {"text": tmp_path / options["text"]}
        words = words.replace("'nowhere", f"'{tmp_path}/nowhere")
    with pytest.raises(EvaluationError) as refused:
        niah.niah(run, EvaluationOptions(**options))
    assert str(refused.value).startswith(words) and "\n" not in str(refused.value)


def test_all_evaluators_are_listed(capsys):
    cli.main(["evaluate", "--list"])
    lines = capsys.readouterr().out.splitlines()
    assert {"niah", "ruler", "perplexity", "positions", "harness", "piqa"} <= {line.split()[0] for line in lines}
    assert all(len(line.split()) > 3 for line in lines)
