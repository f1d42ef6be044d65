"""Loss by position in long texts: what carried and empty states measure, and what cannot be measured."""

import csv
import dataclasses
import json
import math

import jax
import numpy as np
import pytest
import small_models as small
from flax import nnx

from tests.training.tiny import tiny_config
from titans_jax import cli, data
from titans_jax.evaluation import EvaluationError, EvaluationOptions, positions
from titans_jax.layers.prediction_gate import LAGS
from titans_jax.models import LanguageModel, without_writes
from titans_jax.training.run import Run

WINDOW = 16


def run_of(folder, *pattern, **fields):
    """A run of a small model that nothing was trained for: float32, rows of 16 tokens."""
    model = small.config(*pattern, dtype="float32", vocab_size=257, **fields)
    config = tiny_config(model)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, sequence_length=WINDOW))
    graphdef, params = nnx.split(small.build(model))
    return Run(config, data.load_tokenizer("byte"), graphdef, nnx.to_pure_dict(params), 7, folder)


def rows_of(run, length, rows=2):
    stream = np.random.default_rng(0).integers(0, 256, rows * length + 1)
    return positions.long_rows(stream, length, WINDOW)


def losses(run, rows, **how):
    return positions.LongReader(run.graphdef).loss_by_position(run.params, rows, WINDOW, **how)


@pytest.mark.slow_but_for("attention")
@pytest.mark.parametrize("pattern", [("attention",), ("mac",), ("lmm", "attention"), ("mag",)], ids="-".join)
def test_a_carried_state_reads_a_row_at_once_and_an_empty_one_reads_windows(tmp_path, pattern):
    run = run_of(tmp_path, *pattern)
    rows = rows_of(run, 4 * WINDOW)
    score = jax.jit(lambda tokens: jax.nn.log_softmax(run.model(tokens)))

    def expected(tokens, targets):
        return -np.take_along_axis(np.asarray(score(tokens)), targets[..., None], axis=-1)[..., 0]

    whole = expected(rows[:, :-1], rows[:, 1:]).sum(axis=0)
    np.testing.assert_allclose(losses(run, rows, fresh=False), whole, rtol=2e-3)
    windows = [rows[:, t : t + WINDOW + 1] for t in range(0, 4 * WINDOW, WINDOW)]
    alone = np.concatenate([expected(piece[:, :-1], piece[:, 1:]).sum(axis=0) for piece in windows])
    np.testing.assert_allclose(losses(run, rows, fresh=True), alone, rtol=2e-3)
    assert np.abs(whole - alone)[WINDOW:].max() > 0.01


def test_one_function_is_compiled_for_both_states_and_any_length(tmp_path, monkeypatch):
    traced, extend = [], LanguageModel.extend
    monkeypatch.setattr(LanguageModel, "extend", lambda *inputs, **how: traced.append(1) or extend(*inputs, **how))
    run = run_of(tmp_path, "lmm")
    reader = positions.LongReader(run.graphdef)
    for length in (3, 6):
        for fresh in (False, True):
            reader.loss_by_position(run.params, rows_of(run, length * WINDOW), WINDOW, fresh=fresh)
    assert len(traced) == 1


def test_without_writes_an_lmm_is_worth_nothing_beyond_its_last_inputs(tmp_path):
    run = run_of(tmp_path, "lmm", depth=1)
    run = dataclasses.replace(run, graphdef=without_writes(run.graphdef))
    rows = rows_of(run, 3 * WINDOW)
    carried, fresh = (losses(run, rows, fresh=fresh).reshape(3, WINDOW) for fresh in (False, True))
    # A convolution has the inputs of 3 tokens before; the gate sees the reads of 4 (`prediction_gate`).
    known = run.config.model.conv_size - 1 + LAGS
    np.testing.assert_allclose(carried[:, known:], fresh[:, known:], rtol=1e-4)
    assert np.abs(carried[1:] - fresh[1:])[:, :known].max() > 0.01


def test_buckets_double():
    assert list(positions.bucket_ends(300)) == [(0, 299)]
    assert list(positions.bucket_ends(4096)) == [(0, 511), (512, 1023), (1024, 2047), (2048, 4095)]
    assert list(positions.bucket_ends(1100)) == [(0, 511), (512, 1023), (1024, 1099)]
    assert list(positions.bucket_ends(48, 16)) == [(0, 15), (16, 31), (32, 47)]


def test_rows_follow_each_other_and_are_cut_to_windows():
    stream = np.arange(1000)
    rows = positions.long_rows(stream, 100, WINDOW)
    assert rows.shape == (4, 97)  # 6 windows and the target of the last token
    assert np.shares_memory(rows, stream)  # a text of millions of tokens is there once
    np.testing.assert_array_equal(rows[1], np.arange(96, 193))
    assert positions.long_rows(np.arange(200), 96, WINDOW).shape[0] == 2


@pytest.mark.parametrize(
    "tokens, length, message",
    [
        (100, 15, "length is 15; use at least one window, data.sequence_length 16"),
        (100, 1600, "the text holds 99 tokens to predict and length is 1,600; use length 96 or a longer text"),
        (10, 32, "the text holds 9 tokens to predict and length is 32; give a longer text"),
    ],
)
def test_a_text_that_is_too_short_is_refused_in_a_sentence(tokens, length, message):
    with pytest.raises(EvaluationError, match=message):
        positions.long_rows(np.arange(tokens), length, WINDOW)


def corpus_of(run, *texts):
    return data.tokenize(list(texts), run.tokenizer, show_progress=False)


def test_a_row_is_a_document_from_its_first_token_in_whole_windows(tmp_path):
    run = run_of(tmp_path, "lmm")
    corpus = corpus_of(run, "a" * 600, "b" * 511, "c" * 510, "d" * 5000, "e" * 40)
    mark = run.tokenizer.eos_id
    rows = positions.document_rows(corpus, 2000, WINDOW)
    # With the token in front of it a document of 511 bytes is 512 inputs: one of 510 does not fill the first bucket.
    assert [len(row) - 1 for row in rows] == [592, 512, 2000]
    np.testing.assert_array_equal(rows[0], [mark, *b"a" * 592])
    np.testing.assert_array_equal(rows[1], [mark, *b"b" * 511, mark])
    assert all(np.shares_memory(row, corpus.tokens) for row in rows)
    assert [len(row) - 1 for row in positions.document_rows(corpus, 2000, WINDOW, most=1)] == [592]


def test_documents_that_fill_no_second_window_make_no_rows(tmp_path):
    corpus = corpus_of(run_of(tmp_path, "lmm"), "a" * 1300, "b" * 900)
    assert positions.document_rows(corpus, 32768, 1024) == []
    assert [len(row) - 1 for row in positions.document_rows(corpus, 1024, 1024)] == [1024]
    assert [len(row) - 1 for row in positions.document_rows(corpus, 32768, 512)] == [1024, 512]
    with pytest.raises(EvaluationError, match="length is 500; use at least one window, data.sequence_length 512"):
        positions.document_rows(corpus, 500, 512)


def test_rows_of_several_lengths_are_those_of_each_alone(tmp_path):
    run = run_of(tmp_path, "attention")
    rows = [np.random.default_rng(seed).integers(0, 256, length + 1) for seed, length in enumerate((64, 16, 48))]
    expected = np.zeros(64)
    for row in rows:
        expected[: len(row) - 1] += losses(run, row[None], fresh=False)
    np.testing.assert_allclose(losses(run, rows, fresh=False), expected, rtol=1e-4)


def documents_in(folder, **texts):
    folder.mkdir()
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def test_what_is_written_and_returned(tmp_path):
    """Three documents, of which 3, 2 and 1 reach the three buckets; every number against those of each one alone."""
    run = run_of(tmp_path / "run", "lmm", depth=1)
    lengths = {"long": 1500, "middle": 700, "short": 520, "tiny": 100}
    text = documents_in(tmp_path / "texts", **{name: ("abcdefg" * 300)[:length] for name, length in lengths.items()})
    options = EvaluationOptions(length=1200, text=text)
    result = positions.positions(run, options)
    assert (result["documents"], result["trained_on_rows_of"], result["chunk_size"]) == (3, WINDOW, small.CHUNK)
    assert result["tokens_per_second"] > 0
    saved = json.loads((run.folder / "positions.json").read_text())
    buckets = saved["buckets"]
    assert result["positions"] == [{column: row[column] for column in positions.SHOWN} for row in buckets]
    assert [(row["first"], row["last"]) for row in buckets] == [(0, 511), (512, 1023), (1024, 1199)]
    assert [row["documents"] for row in buckets] == [3, 2, 1]
    # With the token in front 701 and 521 inputs are 43 and 32 windows.
    assert [row["tokens"] for row in buckets] == [3 * 512, 512 + 43 * WINDOW - 512, 1200 - 1024]
    rows = positions.document_rows(positions.read_corpus(run, text), 1200, WINDOW)
    nats = np.zeros(1200)
    for row in rows:
        alone = positions.LongReader(run.graphdef, closed=True).loss_by_position(
            run.params, row[None], WINDOW, fresh=False
        )
        nats[: len(alone)] += alone
    read = lost = 0
    for row in buckets:
        here = nats[row["first"] : row["last"] + 1].sum()
        read, lost = read + row["tokens"], lost + here
        assert row["loss"] == pytest.approx(here / row["tokens"], rel=1e-5)
        assert row["perplexity"] == pytest.approx(np.exp(here / row["tokens"]), rel=1e-4)
        assert row["cumulative_perplexity"] == pytest.approx(np.exp(lost / read), rel=1e-4)
        assert row["bytes"] == row["tokens"]  # no document ends inside its row
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2), rel=1e-6)
        assert row["gain"] == pytest.approx(row["fresh_bits_per_byte"] - row["bits_per_byte"])
    assert saved["step"] == 7 and saved["text"] == str(text)
    assert (saved["tokenizer"], saved["memory"], saved["chunk_size"]) == ("byte", "on", small.CHUNK)
    assert (saved["documents"], saved["documents_of_the_text"]) == (3, 4)
    with (run.folder / "positions.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["documents"] for line in lines] == [str(row["documents"]) for row in buckets] and len(lines) == 3
    for name in ("step", "tokenizer", "memory", "trained_on_rows_of", "text"):
        assert {line[name] for line in lines} == {str(saved[name])}
    assert (run.folder / "positions.png").read_bytes().startswith(b"\x89PNG")

    fresh = positions.positions(run, dataclasses.replace(options, memory="fresh"))
    for row, other in zip(fresh["positions"], buckets, strict=True):
        assert row["gain"] == 0 and row["bits_per_byte"] == other["fresh_bits_per_byte"]
    assert (run.folder / "positions_fresh.csv").exists()
    assert positions.positions(run, dataclasses.replace(options, samples=1))["documents"] == 1


def test_more_documents_than_are_read_side_by_side(tmp_path):
    """Five documents in two groups, the second filled up: every token once."""
    run = run_of(tmp_path / "run", "lmm", depth=1)
    # Not one byte again and again, which multiplies rounding in a memory of drawn parameters.
    texts = ("".join(np.random.default_rng(n).choice(list("abcdefgh "), 600)) for n in range(5))
    text = documents_in(tmp_path / "texts", **dict(zip("abcde", texts, strict=True)))
    positions.positions(run, EvaluationOptions(length=1024, text=text))
    first, second = json.loads((run.folder / "positions.json").read_text())["buckets"]
    assert (first["documents"], first["tokens"]) == (5, 5 * 512)
    assert (second["documents"], second["tokens"]) == (5, 5 * (592 - 512))
    rows = positions.document_rows(positions.read_corpus(run, text), 1024, WINDOW)
    reader = positions.LongReader(run.graphdef, closed=True)
    nats = sum(reader.loss_by_position(run.params, row[None], WINDOW, fresh=False) for row in rows)
    assert first["loss"] == pytest.approx(nats[:512].sum() / (5 * 512), rel=1e-5)
    assert second["loss"] == pytest.approx(nats[512:].sum() / (5 * 80), rel=1e-5)


def test_a_text_of_short_documents_is_read_across_them_and_that_is_said(tmp_path, capsys):
    run = run_of(tmp_path / "run", "lmm", depth=1)
    text = documents_in(tmp_path / "texts", **{f"d{number:02}": f"text {number} " * 40 for number in range(10)})
    result = positions.positions(run, EvaluationOptions(length=1200, text=text))
    assert result["stretches"] == 2 and "documents" not in result
    assert [row["documents"] for row in result["positions"]] == [2, 2, 2]
    assert "no document of the text has 512 tokens" in capsys.readouterr().err
    assert json.loads((run.folder / "positions.json").read_text())["stretches"] == 2


def broken_run(folder, byte):
    """A run that knows no number for a byte: every logit behind it is not finite."""
    run = run_of(folder, "lmm", depth=1, tie_embeddings=False)
    table = np.array(run.params["embedding"]["embedding"])
    table[ord(byte)] = np.nan
    return dataclasses.replace(run, params=run.params | {"embedding": {"embedding": table}})


def test_logits_that_are_not_finite_end_in_a_sentence_and_keep_the_buckets_before(tmp_path):
    run = broken_run(tmp_path / "run", "z")
    text = documents_in(tmp_path / "texts", a="a" * 700 + "z" + "a" * 1000, b="b" * 1500)
    options = EvaluationOptions(length=1600, text=text)
    with pytest.raises(
        EvaluationError, match=r"logits at positions 512 to 1,023 are not finite; .*; the buckets before"
    ) as said:
        positions.positions(run, options)
    assert "\n" not in str(said.value) and "positions.csv" in str(said.value)
    (bucket,) = json.loads((run.folder / "positions.json").read_text())["buckets"]
    assert (bucket["last"], bucket["documents"]) == (511, 2) and math.isfinite(bucket["loss"])
    (run.folder / "positions.csv").unlink()
    with pytest.raises(EvaluationError, match="logits at positions 0 to 511 are not finite; .* makes them so$"):
        positions.positions(broken_run(tmp_path / "run", "b"), options)
    assert not (run.folder / "positions.csv").exists()


@pytest.mark.slow
def test_evaluate_with_the_memory_on_off_and_fresh(tmp_path, capsys):
    """From the command line: perplexity knows no fresh state, and a model without memory has none to turn off."""
    file = tmp_path / "small.py"
    small_run = "tiny_config(dataclasses.replace(MODEL, pattern={!r}, depth=1), steps=2, sample_tokens=0)"
    found = {}
    for pattern in (("lmm",), ("window",)):
        config = small_run.format(pattern)
        file.write_text(f"import dataclasses\nfrom tests.training.tiny import MODEL, tiny_config\nconfig = {config}\n")
        folder = str(tmp_path / pattern[0])
        assert cli.main(["train", str(file), "--training.run_dir", folder]) == 0
        for state in ("on", "off", "fresh"):
            capsys.readouterr()
            command = ["evaluate", folder, "--memory", state, "--batches", "1", "--json"]
            code = cli.main(command)
            out, error = capsys.readouterr()
            if (pattern, state) == (("window",), "off"):
                assert code == 2 and "memory is 'off', but the model of" in error and error.count("\n") == 1
            else:
                assert code == 0
                found[pattern, state] = json.loads(out)["loss"]
    assert found[("lmm",), "on"] == found[("lmm",), "fresh"] != found[("lmm",), "off"]
    assert cli.main(["evaluate", str(tmp_path / "lmm"), "positions", "--length", "640"]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert any(words[:1] == ["documents"] for words in printed) and ["0", "511"] in [words[:2] for words in printed]
    assert cli.main(["evaluate", str(tmp_path / "lmm"), "positions", "--memory", "none"]) == 2
    assert "memory is 'none'; use on, off or fresh" in capsys.readouterr().err
