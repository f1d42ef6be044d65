"""lm-evaluation-harness: the model class against the model itself, and the papers' tasks from local files."""

import csv
import gzip
import json
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.evaluation.test_positions import run_of
from titans_jax.evaluation import EVALUATORS, EvaluationError, EvaluationOptions, harness

pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval and what it imports
DATA = Path(__file__).parents[3] / "shared" / "data"
SIZES = {
    "piqa": 1838, "hellaswag": 10042, "winogrande": 1267, "arc_easy": 2376, "arc_challenge": 1172, "social_iqa": 1954,
    "boolq": 3270, "lambada_openai": 5153,
}  # fmt: skip


def needs(file):
    if not any((DATA / (file + ending)).exists() for ending in ("", ".gz", ".xz")):
        pytest.skip(f"there is no {DATA / file}")


def test_wikitext_has_the_official_pages_words_and_bytes():
    needs("wikitext-2/wiki.test.raw")
    file = harness.find_file(DATA, "wikitext-2/wiki.test.raw")
    pages = [page["page"] for page in harness.read_documents(file, harness.TASKS["wikitext"])[0]]
    assert len(pages) == 62
    assert sum(len(re.split(r"\s+", page)) for page in pages) == 241_335
    assert sum(len(page.encode()) for page in pages) == 1_290_527


@pytest.mark.parametrize("task", SIZES)
def test_the_files_of_the_tasks_hold_the_published_numbers_of_documents(task):
    needs(harness.TASKS[task].file)
    documents, bad = harness.read_documents(harness.find_file(DATA, harness.TASKS[task].file), harness.TASKS[task])
    assert (len(documents), bad) == (SIZES[task], "")


def test_pages_begin_with_headings_of_the_first_level():
    text = " \n = One = \n \n a b \n = = Part = = \n c \n = Two = \n d \n"
    assert harness.wikitext_pages(text) == [" = One = \n \n a b \n = = Part = = \n c ", " = Two = \n d \n"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("run"), "attention")


@pytest.fixture(scope="module")
def model(run):
    pytest.importorskip("lm_eval")
    return harness._import_model()(run)


def asked(*arguments):
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, args, number) for number, args in enumerate(arguments)]


def nats(run, context, continuation):
    """By the model itself: (log-likelihood, greedy) of bytes after the token between documents and a context."""
    ids = np.array([run.tokenizer.bos_id, *context.encode(), *continuation.encode()], np.int32)
    logits = jax.nn.log_softmax(jax.jit(run.model.__call__)(np.pad(ids, (0, 128 - len(ids)))[None]))[0]
    after = ids[len(context.encode()) + 1 :]
    own = np.asarray(logits)[len(context.encode()) : len(ids) - 1]
    return own[np.arange(len(after)), after].sum(dtype=np.float64), bool((own[:, :257].argmax(axis=1) == after).all())


def test_likelihoods_are_the_model_s_own(run, model):
    """To 1e-5: with a context, without one, and with a blank at its end, which counts to the continuation."""
    pairs = [("It reads", " and learns"), ("", "It"), ("It reads ", "and learns"), ("x" * 90, " y")]
    found = model.loglikelihood(asked(*pairs), disable_tqdm=True)
    for (context, continuation), (value, greedy) in zip(
        [pairs[0], *pairs[:2], pairs[3]], [found[2], *found[:2], found[3]], strict=True
    ):
        expected, likeliest = nats(run, context, continuation)
        assert value == pytest.approx(expected, rel=1e-5) and greedy == likeliest


def test_rolling_in_one_piece_and_in_windows(run, model):
    """Each token once: in one piece after all before it, in windows after those of its window alone."""
    text = "A text of more than two windows of sixteen tokens."
    (whole,) = model.loglikelihood_rolling(asked((text,)), disable_tqdm=True)
    assert whole == pytest.approx(nats(run, "", text)[0], rel=1e-5)
    model.window = 16
    (cut,) = model.loglikelihood_rolling(asked((text,)), disable_tqdm=True)
    model.window = None
    ids = [run.tokenizer.bos_id, *text.encode()]
    expected = 0.0
    for start in range(1, len(ids), 16):
        # The harness fills the last window up with what is before; a window begins with the token before its first.
        end = min(start + 16, len(ids))
        begin = max(0, min(start - 1, end - 17))
        logits = jax.jit(run.model.__call__)(
            np.pad(np.array(ids[begin : end - 1], np.int32), (0, 32 - (end - 1 - begin)))[None]
        )
        own = np.asarray(jax.nn.log_softmax(logits))[0]
        expected += sum(own[t - 1 - begin, ids[t]] for t in range(start, end))
    assert cut == pytest.approx(expected, rel=1e-5) and abs(cut - whole) > 1e-3


def test_texts_are_continued_until_they_end(run, model):
    greedy = {"until": ["e"], "max_gen_toks": 8, "do_sample": False, "temperature": 0.0}
    long = {"until": [], "max_gen_toks": 12}
    empty = {"until": [""], "max_gen_toks": 12}  # an empty text ends nothing
    contexts = ["It reads", "abc", "It reads"]
    found = model.generate_until(asked(*zip(contexts, [greedy, long, empty], strict=True)), disable_tqdm=True)
    generator = model._generators[0.0]
    alone = generator.complete(run.params, contexts[1:], 12)
    assert found[1:] == alone and found[0] == generator.complete(run.params, contexts[:1], 8)[0].split("e")[0]


def test_an_answer_without_text_is_never_the_likeliest(model):
    model.empty = 0
    assert model.loglikelihood(asked(("It", ""), ("", "")), disable_tqdm=True) == [(-float("inf"), False)] * 2
    assert model.empty == 2


PIQA = [{"goal": f"Do {n}", "sol1": "so" * n, "sol2": "thus", "label": n % 2} for n in range(1, 5)]


@pytest.fixture
def data(tmp_path):
    """Files of four tasks, one of them with a document that lacks a field."""
    pytest.importorskip("lm_eval")
    folder = tmp_path / "data"
    (folder / "commonsense").mkdir(parents=True)
    (folder / "wikitext-2").mkdir()
    lines = "".join(json.dumps(document) + "\n" for document in [*PIQA[:3], {"goal": "x", "sol1": "y"}, PIQA[3]])
    (folder / "commonsense" / "piqa.val.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    boolq = {"passage": "It rained.", "question": "did it rain", "answer": True}
    (folder / "commonsense" / "boolq.val.jsonl").write_text(json.dumps(boolq))
    arc = {"question": "Which?", "choices": ["this", "that", "those"], "gold": 2}
    (folder / "commonsense" / "arc_easy.test.jsonl").write_text(json.dumps(arc))
    (folder / "wikitext-2" / "wiki.test.raw.xz").write_bytes(
        lzma.compress(b" = One = \n \n a b \n = Two = \n \n c d \n")
    )
    return folder


@pytest.mark.slow
def test_tasks_are_those_of_the_harness_on_local_files(run, model, data, monkeypatch, capsys):
    """Scores counted again from the model's own likelihoods; what is not there, or not whole, is said."""
    monkeypatch.setattr(harness, "_import_model", lambda: lambda run: model)
    results = harness.harness(run, EvaluationOptions(data=data))["results"]
    assert [(row["task"], row["metric"]) for row in results] == [
        ("wikitext", "word_perplexity"), ("wikitext", "bits_per_byte"), ("wikitext_2k", "word_perplexity"),
        ("wikitext_2k", "bits_per_byte"), ("piqa", "acc"), ("piqa", "acc_norm"), ("arc_easy", "acc"), ("boolq", "acc"),
    ]  # fmt: skip
    rows = {row["task"]: row for row in reversed(results)}  # the first metric of each
    by_length = {row["task"]: row for row in results}  # the last
    right = right_by_length = 0
    for document in PIQA:
        choices = [
            nats(run, f"Question: {document['goal']}\nAnswer:", f" {document[name]}")[0] for name in ("sol1", "sol2")
        ]
        right += int(np.argmax(choices)) == document["label"]
        characters = [len(document["sol1"]), len(document["sol2"])]
        right_by_length += int(np.argmax(np.divide(choices, characters))) == document["label"]
    assert by_length["piqa"]["score"] == pytest.approx(100 * right_by_length / 4)
    assert (rows["piqa"]["chance"], rows["piqa"]["majority"], rows["arc_easy"]["majority"]) == (50, 50, 100)
    assert rows["wikitext"]["majority"] == ""
    assert rows["piqa"]["documents"] == 4 and rows["piqa"]["score"] == pytest.approx(100 * right / 4)
    yes, no = (nats(run, "It rained.\nQuestion: did it rain?\nAnswer:", f" {word}")[0] for word in ("yes", "no"))
    assert rows["boolq"]["score"] == 100 * (yes > no)
    pages = [" = One = \n \n a b ", " = Two = \n \n c d \n"]
    words = sum(len(re.split(r"\s+", page)) for page in pages)
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    total = sum(nats(run, "", wikitext_detokenizer({"page": page}))[0] for page in pages)
    assert rows["wikitext"]["score"] == pytest.approx(np.exp(-total / words), rel=1e-4)
    num_bytes = sum(len(page.encode()) for page in pages)
    assert by_length["wikitext"]["score"] == pytest.approx(-total / num_bytes / np.log(2), rel=1e-4)
    assert rows["wikitext_2k"]["score"] == pytest.approx(rows["wikitext"]["score"])
    saved = json.loads((run.folder / "harness.json").read_text())
    assert "piqa: 1 of 5 documents left out, the first, 4, has no 'sol2'" in saved["left_out"]
    assert any(each.startswith("lambada_openai: there is no ") for each in saved["left_out"])
    assert "titans: piqa: 1 of 5 documents left out" in capsys.readouterr().err
    with (run.folder / "harness.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["metric"] for line in lines] == [row["metric"] for row in results] and len(lines) == 8
    assert [line["documents"] for line in lines] == [str(row["documents"]) for row in results]
    for name in ("step", "tokenizer", "memory", "trained_on_rows_of"):
        assert {line[name] for line in lines} == {str(saved[name])}
    assert lines[4]["file"] == str(data / "commonsense" / "piqa.val.jsonl.gz") and lines[0]["majority"] == ""
    assert [line["split"] for line in lines] == ["test"] * 4 + ["validation"] * 2 + ["test", "validation"]
    assert set(saved["all"]) == set(rows) and saved["all"]["piqa"]["acc_norm"] == by_length["piqa"]["score"]
    assert (run.folder / "harness.png").read_bytes().startswith(b"\x89PNG")


def test_every_line_of_the_table_says_of_which_run_it_is(tmp_path):
    header = {"step": 7, "trained_on_rows_of": 16, "tokenizer": "byte", "memory": "off", "documents": "all"}
    row = {"task": "piqa", "documents": 4, "metric": "acc", "score": 50.0, "chance": 50, "majority": None}
    harness._write(tmp_path / "harness", header, [row, row | {"task": "boolq"}], {}, [])
    with (tmp_path / "harness.csv").open() as file:
        lines = list(csv.DictReader(file))
    said = {name: str(value) for name, value in header.items()} | {"documents": "4"}
    assert [line["task"] for line in lines] == ["piqa", "boolq"]
    assert all({name: line[name] for name in said} == said for line in lines)


def test_the_majority_of_boolq_s_labels_is_not_chance():
    """62.2 %, as spec/evaluations.md has it: a model that always says yes."""
    needs("commonsense/boolq.val.jsonl")
    file = harness.find_file(DATA, "commonsense/boolq.val.jsonl")
    documents, _ = harness.read_documents(file, harness.TASKS["boolq"])
    assert harness.share_of_most(document["answer"] for document in documents) == pytest.approx(62.2, abs=0.05)


@pytest.mark.slow
def test_the_harness_s_own_command_line_knows_the_model(tmp_path):
    """In a process of its own: the model is found, and asked for a run that is not there."""
    pytest.importorskip("lm_eval")
    command = [sys.executable, "-m", "titans_jax.evaluation.lm_eval_model", "--model", "titans_jax", "--tasks", "piqa"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--model_args", f"run={tmp_path}"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode and "no model for this name" not in done.stderr and f"{tmp_path}" in done.stderr


@pytest.mark.slow
def test_logits_that_are_not_finite_end_in_a_sentence_and_keep_what_was_scored(run, model, data, monkeypatch):
    from titans_jax.inference import NotFiniteLogits

    known = model._loglikelihood_tokens

    def fails(requests, *rest):
        if "rain" in requests[0][0][0]:
            raise NotFiniteLogits("the model's logits are not finite")
        return known(requests, *rest)

    monkeypatch.setattr(model, "_loglikelihood_tokens", fails)
    monkeypatch.setattr(harness, "_import_model", lambda: lambda run: model)
    with pytest.raises(
        EvaluationError, match="boolq: the model's logits are not finite; the results of wikitext, .* kept"
    ):
        harness.harness(run, EvaluationOptions(data=data))
    assert "piqa" in (run.folder / "harness.csv").read_text()


def test_no_file_and_no_harness_are_a_sentence(run, model, tmp_path, monkeypatch):
    with pytest.raises(EvaluationError, match=r"piqa: there is no .*piqa.val.jsonl \(nor .gz, .xz\); titans data list"):
        EVALUATORS["piqa"](run, EvaluationOptions(data=tmp_path))
    file = tmp_path / "piqa.jsonl"
    file.write_text('{"goal": 1}\n')
    with pytest.raises(EvaluationError, match="has no document with the fields goal, sol1, sol2, label"):
        harness.read_documents(file, harness.TASKS["piqa"])
    file.write_text("no json")
    with pytest.raises(EvaluationError, match="cannot be read"):
        harness.read_documents(file, harness.TASKS["piqa"])
    monkeypatch.setitem(sys.modules, "titans_jax.evaluation.lm_eval_model", None)
    with pytest.raises(EvaluationError, match=r"cannot be imported .*pip install 'titans-jax\[eval\]'"):
        EVALUATORS["piqa"](run, EvaluationOptions(data=tmp_path))
