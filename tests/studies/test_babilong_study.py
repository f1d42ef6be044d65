"""`titans study babilong`: the tokens of a sample, who reads which stories and books, stages, and the score."""

import collections
import dataclasses
import io
import json
import lzma
import random
import tarfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from titans_jax import cli
from titans_jax.data import ByteTokenizer
from titans_jax.evaluation.babi import LABELS, Story, read_stories
from titans_jax.evaluation.babilong import read_task
from titans_jax.studies import babilong, run
from titans_jax.studies.babilong import Babilong, BabilongOptions, BabilongStudy
from titans_jax.studies.babilong_rows import WordTokenizer, batch_of, books, is_exact, questions, sample_of, stories
from titans_jax.training.run import init_model

DATA = Path(__file__).parents[3] / "shared" / "data"
ROOMS = LABELS["qa1"]


def events(first, second, count):
    """Courses of events with two questions each, after two and three facts; the first answer is mostly the bathroom."""
    text = ""
    for number in range(count):
        moved = ("moved", "went", "journeyed", "travelled")[number // 6]
        one, two = ROOMS[0 if number % 3 else number % 6], ROOMS[(number + 1) % 6]
        text += f"1 {first} {moved} to the {one}.\n2 {second} went to the {two}.\n3 Where is {first}? \t{one}\t1\n"
        text += f"4 {first} went to the {ROOMS[number % 5]}.\n5 Where is {second}? \t{two}\t2\n"
    return text


BEFORE, LATER = events("Mary", "John", 20), events("Sandra", "Daniel", 9)
SEA = "The sea was calm that morning and nobody of the crew spoke. A cold wind came up before the old clock struck. "
HILL = "Far over the green hill went a narrow path to the mill. Its wheel had not turned since the last war was lost. "


def pack(folder, **files):
    """An archive like bAbI's; names are without .txt, and "__" stands for a slash."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"tasks_1-20_v1-2/{name.replace('__', '/').replace('en10k', 'en-10k')}.txt")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    (folder / "babi").mkdir(exist_ok=True)
    (folder / "babi" / "tasks_1-20_v1-2.en-10k.tar.xz").write_bytes(lzma.compress(packed.getvalue()))


@pytest.fixture
def folder(tmp_path):
    """Stories of two files, and a novel each for training and test. The train file has one story of the test file."""
    at = tmp_path / "data"
    (at / "books").mkdir(parents=True)
    shared = "".join(line + "\n" for line in LATER.splitlines()[:3])
    pack(at, en__qa1_x_train="1 A b.\n2 C? \td\t1\n", en10k__qa1_x_train=shared + BEFORE, en10k__qa1_x_test=LATER)
    (at / "books" / "train.jsonl").write_text(json.dumps({"text": SEA * 400}) + "\n")
    (at / "books" / "valid.jsonl").write_text(json.dumps({"text": HILL * 400}) + "\n")
    return at


def tiny(folder, **changes):
    fields = {
        "steps": 2, "batch_size": 2, "folder": str(folder), "segment": 64, "stages": (1, 2), "validate_every": 1,
        "validation_samples": 2, "test_segments": (1, 2, 3), "samples": 4,
    }  # fmt: skip
    return Babilong(**fields | changes)


def tiny_cell(folder, **changes):
    options = BabilongOptions(
        tasks=("qa1",), blocks=("lmm",), presets=("gated_deltanet",), reference=(), dim=8, head_dim=4, depth=1, seeds=1,
        babilong=tiny(folder, **changes),
    )  # fmt: skip
    (cell,) = BabilongStudy().cells(options)
    return cell


def test_the_tokens_of_a_sample_by_hand():
    """Context, question, G of GEN, answer, end; asked for is what comes behind GEN, and nothing else."""
    short = sample_of(ByteTokenizer(), "A b.", Story((), "Where? ", "cd"))
    long = sample_of(ByteTokenizer(), "A b. E", Story((), "Who?", "f"))
    assert short.tokens.tolist() == [*b"A b.Where? Gcd", 256] and (short.gen, short.answer) == (11, "cd")
    batch = batch_of([short, long], 18)
    assert batch["tokens"].tolist() == [[*b"A b.Where? Gcd"] + [256] * 4, [*b"A b. EWho?Gf"] + [256] * 6]
    assert batch["targets"].tolist() == [
        [-1] * 11 + [ord("c"), ord("d"), 256] + [-1] * 4,
        [-1] * 10 + [ord("f"), 256] + [-1] * 6,
    ]
    assert batch["segment_ids"] is None and batch["tokens"].dtype == batch["targets"].dtype == np.int32


def test_words_are_tokens():
    words = WordTokenizer(["Mary left."], ["a sea, the sea", "the sea the bay"], most=5)
    assert words.encode("Mary saw the sea.").tolist() == [0, 5, 4, 3, 2]  # sea was seen first of the two that are alike
    assert words.decode([0, 4, 6, 3]) == "Mary the sea" and (words.eos_id, words.vocab_size) == (6, 7)
    assert words.encode(words.decode([5, 0])).tolist() == [5, 0] and words.encode(" ").dtype == np.int32


def test_facts_stand_in_order_and_are_at_most_a_fifth(folder):
    """A fact has 6 words with its full stop: two of them take 60 tokens of a row, three 90."""
    asked = questions(str(folder), "words", "qa1", "train")
    counts = {length: {len(asked.stories[n].facts) for n in asked.fitting(length)} for length in (59, 60, 89, 90)}
    assert asked.shortest == 60 and counts == {59: set(), 60: {2}, 89: {2}, 90: {2, 3}}
    words, chance = babilong.tokenizer_of(str(folder), "words", "qa1"), random.Random(0)
    places = collections.Counter()
    for _ in range(30):
        number = int(chance.choice(asked.fitting(200)))
        story, sample = asked.stories[number], asked.draw(chance, 200, number)
        text = words.decode(sample.tokens)
        assert len(sample.tokens) == 200 - 20 and sample.answer == story.answer
        assert text.endswith(f" {words.decode(words.encode(story.question))} GEN {story.answer}")
        found, start = [], 0
        for fact in story.facts:
            found.append(text.find(words.decode(words.encode(fact)), start))
            start = found[-1] + 1
        assert min(found) >= 0 and found == sorted(found)
        places[found[0] // 100] += 1
    assert len(places) > 3


def test_every_sample_has_one_segment_up_to_those_of_the_stage(folder):
    first, last = tiny(folder, stages=(1, 4), batch_size=50).trainings()
    assert {b["tokens"].shape for b, _ in zip(first.batches(1), range(2), strict=False)} == {(50, 64)}
    seen = collections.Counter()
    for batch, _ in zip(last.batches(1), range(8), strict=False):
        assert batch["tokens"].shape == (50, 256)
        ends = 256 - np.argmax(batch["targets"][:, ::-1] >= 0, axis=1)  # behind the token that predicts the end
        assert np.all((ends + 1 + 20) % 64 == 0)
        seen.update(((ends + 1 + 20) // 64).tolist())
    assert set(seen) == {1, 2, 3, 4}
    assert sum((count - 100) ** 2 / 100 for count in seen.values()) < 16.3  # chi squared, 3 degrees: 0.1 %
    again = [next(last.batches(seed))["tokens"] for seed in (1, 1, 2)]
    assert np.array_equal(again[0], again[1]) and not np.array_equal(again[0], again[2])


def test_no_part_knows_the_stories_and_books_of_another(folder):
    parts = stories(str(folder), "qa1")
    train, validation, test = (set(parts[name]) for name in ("train", "validation", "test"))
    assert not (train & validation or train & test or validation & test)
    assert test == set(read_stories(LATER)[:-1]) and train | validation <= set(read_stories(BEFORE))
    # The last two of 21 courses of events, and in the train file nobody asks the last question.
    assert validation == set(read_stories(BEFORE)[-4:-1]) and len(parts["train"]) == 36
    for part, own, other in (("train", "sea", "hill"), ("validation", "sea", "hill"), ("test", "hill", "sea")):
        words = babilong.tokenizer_of(str(folder), "byte", "qa1")
        text = words.decode(questions(str(folder), "byte", "qa1", part).exam(2000, 1)[0].tokens)
        assert own in text and other not in text


@pytest.mark.parametrize("task", LABELS)
def test_no_part_of_babi_itself_knows_the_stories_of_another(task):
    if not (DATA / "babi").exists():
        pytest.skip(f"there is no {DATA / 'babi'}")
    parts = stories(str(DATA), task)
    train, validation, test = (set(parts[name]) for name in ("train", "validation", "test"))
    assert not (train & validation or train & test or validation & test)
    assert len(parts["test"]) == 999 and {story.answer for story in train | validation} <= set(LABELS[task])
    least = {"qa3": 850, "qa4": 6500}.get(task, 8900)
    assert len(parts["train"]) > least and len(parts["validation"]) > least / 10


def test_no_novel_is_in_training_and_test():
    if not (DATA / "books").exists():
        pytest.skip(f"there is no {DATA / 'books'}")
    train, test = books(str(DATA), "train"), books(str(DATA), "test")
    assert (len(train), len(test)) == (101, 6) and not {text[5000:6000] for text in train} & {
        text[5000:6000] for text in test
    }


def test_the_larger_train_file_is_read_where_there_are_two(folder):
    assert len(read_task(folder, "qa1", "train")) == 40
    pack(folder, en__qa3_x_train=BEFORE, en10k__qa3_x_test=LATER)
    assert len(read_task(folder, "qa3", "train")) == 39


@pytest.mark.parametrize(
    "said, right",
    [
        ([*b"office", 256], True),
        ([*b" office", 256], True),
        ([*b"office", 256, *b"garden"], True),
        ([*b"office"], False),  # it does not end there
        ([*b"offices", 256], False),
        ([*b"Office", 256], False),
        ([*b"the office", 256], False),
        ([256, *b"office", 256], False),
        ([], False),
    ],
)
def test_right_is_the_whole_answer_before_the_end(said, right):
    assert is_exact(ByteTokenizer(), said, "office") == right


def test_right_answers_are_counted(folder, monkeypatch):
    """By a reader that knows the next token, by one that always says bathroom, and by one that never ends."""
    task = tiny(folder, samples=7)
    words = babilong.tokenizer_of(str(folder), "words", "qa1")
    (bathroom,) = words.encode("bathroom")
    answers = [sample.answer for sample in task.of("test").exam(2 * 64, 7)]

    def following(tokens):
        return np.concatenate([tokens[:, 1:], tokens[:, -1:]], axis=1)

    def bathrooms(tokens):
        return np.where(following(tokens) == words.eos_id, words.eos_id, bathroom)

    for says, expected in (
        (following, 1.0),
        (bathrooms, answers.count("bathroom") / 7),
        (lambda tokens: np.where(following(tokens) == words.eos_id, bathroom, following(tokens)), 0.0),
    ):
        reader = (lambda *_: 0, lambda params, state, tokens, says=says: (says(tokens), state))
        monkeypatch.setattr(babilong, "make_reader", lambda graphdef, reader=reader: reader)
        assert task.exact_match(None, {}, "test", 2, 7) == pytest.approx(expected)
    words, numbers = task.baseline()
    assert words == "the most frequent answer of qa1, bathroom" and 0 < answers.count("bathroom") < 7
    assert numbers["exact_match_2"] == pytest.approx(answers.count("bathroom") / 7)


def test_segments_one_after_another_say_what_the_whole_row_says(folder):
    cell = tiny_cell(folder)
    graphdef, params = init_model(cell.model, 0)
    tokens = batch_of(cell.task.of("test").exam(3 * 64, 2), 3 * 64)["tokens"]
    empty, read = babilong.make_reader(graphdef)
    state, said = empty(params, 2, 3 * 64), []
    for start in (0, 64, 128):
        likely, state = read(params, state, tokens[:, start : start + 64])
        said.append(likely)
    logits = jax.jit(lambda params: nnx.merge(graphdef, params)(jnp.asarray(tokens)))(params)
    chosen = np.take_along_axis(np.asarray(logits), np.concatenate(said, axis=1)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(chosen, np.max(logits, axis=-1), atol=1e-5)  # the same, or as likely to rounding


def test_a_stage_begins_with_the_best_parameters_of_the_one_before(folder, monkeypatch):
    """Scores of the first stage are 0.5, then 0.25: its first step is the best."""
    cell, seen, calls, plain = tiny_cell(folder), [], [], run.fit
    scores = iter([0.5, 0.25, 0.1, 0.2])

    def exact_match(self, graphdef, params, part, segments, count):
        if part == "test":
            return 0.0
        seen.append((segments, jax.device_get(params)))
        return next(scores)

    def recorded(model, optimizer, batches, steps, seed, after_step, selection, start):
        calls.append(jax.device_get(start))
        return plain(model, optimizer, batches, steps, seed, after_step, selection, start)

    monkeypatch.setattr(Babilong, "exact_match", exact_match)
    monkeypatch.setattr(run, "fit", recorded)
    result = run.run_cell(cell)
    assert [segments for segments, _ in seen] == [1, 1, 2, 2] and calls[0] is None and len(calls) == 2
    same = lambda one, other: jax.tree.all(jax.tree.map(np.array_equal, one, other))  # noqa: E731
    assert same(calls[1], seen[0][1]) and not same(calls[1], seen[1][1])
    assert result.status == "finite" and result.tokens == 2 * 2 * 64 + 2 * 2 * 128  # of both stages
    assert run.steps_of(cell) == 4


def test_patience_ends_a_stage(folder):
    task = dataclasses.replace(tiny(folder), patience=3, validate_every=100)
    assert (task.selection().patience, task.selection().every, task.selection().enough) == (3, 2, 1.0)
    assert (task.optimizer.schedule, task.optimizer.final_learning_rate_ratio) == ("linear", 0)


SMALL = {
    "tasks": "qa1", "blocks": "lmm", "presets": "gated_deltanet", "reference": "attention", "dim": 8, "head_dim": 4,
    "depth": 1, "seeds": 1, "babilong.steps": 2, "babilong.batch_size": 2, "babilong.segment": 64,
    "babilong.stages": "1 2", "babilong.validate_every": 1, "babilong.validation_samples": 2,
    "babilong.test_segments": "1 2 3", "babilong.samples": 4,
}  # fmt: skip


def command(folder, output, **changes):
    """`titans study babilong` on the tiny files, with other values of these flags."""
    flags = SMALL | {"babilong.folder": folder, "output": output} | changes
    return ["study", "babilong", *(word for flag, said in flags.items() for word in (f"--{flag}", *str(said).split()))]


def test_end_to_end_and_on_after_a_kill(folder, tmp_path, monkeypatch):
    arguments = command(folder, tmp_path / "out")
    ran, run_cell = [], run.run_cell

    def killed(cell, after_step):
        ran.append(cell.labels["preset"])
        if len(ran) == 2:
            raise KeyboardInterrupt
        return run_cell(cell, after_step)

    monkeypatch.setattr(run, "run_cell", killed)
    assert cli.main(arguments) == 130 and not (tmp_path / "out" / "babilong.csv").exists()
    assert cli.main(arguments) == 0 and ran == ["gated_deltanet", "attention", "attention"]
    saved = json.loads((tmp_path / "out" / "babilong.json").read_text())
    assert [tuple(row["labels"].values()) for row in saved["rows"]] == [
        ("qa1", "lmm", "gated_deltanet"), ("qa1", "", "attention")
    ]  # fmt: skip
    for row in saved["rows"]:
        assert row["tokens"] == [768] and row["not_finite"] == row["failed"] == 0
        assert all(4 * row["numbers"][f"exact_match_{n}"]["mean"] in range(5) for n in (1, 2, 3))
    (baseline,) = saved["baselines"]
    assert baseline["what"] == "the most frequent answer of qa1, bathroom"
    assert (tmp_path / "out" / "babilong.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "babilong.csv").read_text().count("\n") == 4


@pytest.mark.parametrize(
    "flag, said, message",
    [
        ("tasks", "qa9", "tasks has 'qa9'; use qa1, qa2, qa3, qa4, qa5"),
        ("babilong.stages", "1 4 2", "stages is (1, 4, 2); use numbers of segments that grow, such as 1 2 4"),
        ("babilong.stages", "0 1", "stages is (0, 1); use numbers of segments that grow"),
        ("babilong.segment", "48", "segment is 48 tokens of 'words', too few for the facts of any story of qa1, which "
         "may be a 5th of it; use at least 60"),
        ("babilong.tokenizer", "byte", "segment is 64 tokens of 'byte', too few"),
        ("babilong.test_segments", "2 0", "test_segments has 0; use at least 1"),
        ("babilong.patience", "0", "patience is 0; use at least 1"),
        ("babilong.tokenizer", "nowhere.model", "data.tokenizer='nowhere.model' is no file"),
        ("babilong.folder", "nowhere", "there is no nowhere/babi/tasks_1-20_v1-2.en-10k.tar (nor .gz, .xz)"),
        ("presets", "titan", "there is no preset 'titan' in presets; did you mean titans?"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_sentence(flag, said, message, folder, tmp_path, capsys):
    assert cli.main(command(folder, tmp_path / "out", **{flag: said})) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "break_it, message",
    [
        (lambda at: (at / "books" / "valid.jsonl").unlink(), "books/valid.jsonl (nor .gz, .xz)"),
        (lambda at: (at / "books" / "train.jsonl").unlink(), "has no file for data.source='jsonl'"),
        (lambda at: (at / "books" / "valid.jsonl").write_text('{"text": "So it was. No. "}\n'), "no sentence of 10"),
        (lambda at: (at / "books" / "train.jsonl").write_text('{"text": " "}\n'), "hold no text; give others"),
        (lambda at: pack(at, en10k__qa1_x_test=LATER), "has no train file of qa1; fetch it again"),
        (lambda at: pack(at, en10k__qa1_x_test=LATER, en10k__qa1_x_train=events("Mary", "John", 1)), "too few stories"),
    ],
)
def test_data_that_is_missing_is_told_before_anything_runs(break_it, message, folder, tmp_path, capsys):
    break_it(folder)
    assert cli.main(command(folder, tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_the_quick_version_is_one_task_of_one_seed():
    study = BabilongStudy()
    default, quick = (study.defaults(BabilongOptions(quick=quick)) for quick in (False, True))
    assert default.tasks == tuple(LABELS) and default.seeds == 3 and default.babilong.segment == 512
    assert (quick.tasks, quick.seeds) == (("qa1",), 1) and max(quick.babilong.test_segments) > quick.babilong.stages[-1]
