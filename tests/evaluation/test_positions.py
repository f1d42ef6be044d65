"""Loss by position in long texts: what carried and empty states measure, and what cannot be measured."""

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


def test_without_writes_an_lmm_is_worth_nothing_beyond_its_convolutions(tmp_path):
    run = run_of(tmp_path, "lmm", depth=1)
    run = dataclasses.replace(run, graphdef=without_writes(run.graphdef))
    rows = rows_of(run, 3 * WINDOW)
    carried, fresh = (losses(run, rows, fresh=fresh).reshape(3, WINDOW) for fresh in (False, True))
    taps = run.config.model.conv_size - 1
    np.testing.assert_allclose(carried[:, taps:], fresh[:, taps:], rtol=1e-4)


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


def test_what_is_written_and_returned(tmp_path):
    run = run_of(tmp_path / "run", "lmm", depth=1)
    text = tmp_path / "documents"
    text.mkdir()
    (text / "first.txt").write_text("abcdefgh" * 188)
    (text / "second.txt").write_text("abcdefgh" * 112)
    options = EvaluationOptions(length=1200, text=text)
    result = positions.positions(run, options)
    assert (result["rows"], result["window"]) == (2, WINDOW)
    assert [(row["first"], row["last"]) for row in result["positions"]] == [(0, 511), (512, 1023), (1024, 1199)]
    # The first document goes on for 304 tokens of the second row.
    assert [row["documents"] for row in result["positions"]] == [2, 1, 1]
    for row in result["positions"]:
        assert row["tokens"] == 2 * (row["last"] - row["first"] + 1)
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2), rel=1e-2)
        assert row["gain"] == pytest.approx(row["fresh_bits_per_byte"] - row["bits_per_byte"])
    rows = positions.long_rows(positions.read_stream(run, text), 1200, WINDOW)
    nats = positions.LongReader(run.graphdef, closed=True).loss_by_position(run.params, rows, WINDOW, fresh=False)
    means = [nats[row["first"] : row["last"] + 1].sum() / row["tokens"] for row in result["positions"]]
    np.testing.assert_allclose([row["loss"] for row in result["positions"]], means, rtol=1e-6)
    saved = json.loads((run.folder / "positions.json").read_text())
    assert saved["buckets"] == result["positions"] and saved["step"] == 7
    assert len((run.folder / "positions.csv").read_text().splitlines()) == 4
    assert (run.folder / "positions.png").read_bytes().startswith(b"\x89PNG")

    fresh = positions.positions(run, dataclasses.replace(options, memory="fresh"))
    for row, other in zip(fresh["positions"], result["positions"], strict=True):
        assert row["gain"] == 0 and row["bits_per_byte"] == other["fresh_bits_per_byte"]
    assert (run.folder / "positions_fresh.csv").exists()


@pytest.mark.slow
def test_evaluate_with_the_memory_on_off_and_fresh(tmp_path, capsys):
    """From the command line: perplexity knows no fresh state, and a model without memory has none to turn off."""
    file = tmp_path / "small.py"
    small_run = "tiny_config(dataclasses.replace(MODEL, pattern={!r}), steps=2, sample_tokens=0)"
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
    assert ["rows", "4"] in printed and ["0", "511", "2,048"] in [words[:3] for words in printed]
    assert cli.main(["evaluate", str(tmp_path / "lmm"), "positions", "--memory", "none"]) == 2
    assert "memory is 'none'; use on, off or fresh" in capsys.readouterr().err
