"""`titans bench memory` and `train`: what they time, what they save, and what they refuse."""

import csv

import jax
import pytest

from titans_jax import cli
from titans_jax.bench import timing
from titans_jax.bench.memory import CASES, LENGTHS, Options, cases, random_inputs
from titans_jax.config import ConfigError
from titans_jax.memory.rule.presets import PRESETS

SMALL = "--time 32 --batch 1 --num_heads 1 --head_dim 8 --chunk_size 4 --repeats 1 --output".split()


@pytest.mark.slow
def test_one_rule_is_timed_in_both_forms_and_saved(tmp_path, capsys):
    assert cli.main(["bench", "memory", "--preset", "rwkv7", *SMALL, str(tmp_path)]) == 0
    with open(tmp_path / "memory.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["preset"], row["form"], row["time"]) for row in rows] == [
        ("rwkv7", "chunked", "32"),
        ("rwkv7", "recurrent", "32"),
    ]
    chunked, recurrent = (float(row["tokens_per_second"]) for row in rows)
    assert chunked > 0 and recurrent > 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"rwkv7: the chunked form is {chunked / recurrent:.1f} times as fast as the recurrent one" in printed
    assert (tmp_path / "memory.png").stat().st_size > 1000


def test_what_is_timed():
    assert [case.preset for case in cases(Options(all=True))] == list(PRESETS)
    assert {case.time for case in cases(Options(all=True))} == {4096}
    standard = [(case.time, case.expansion, case.chunk_size) for case in cases(Options())]
    assert standard[: len(CASES)] == list(CASES) and {time for time, *_ in standard} == set(LENGTHS)
    assert {case.preset for case in cases(Options())} == {"titans"}


@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_memory_is_timed_with_the_gates_that_it_has_in_models(preset):
    """Without its preconditioner, preconditioned Gated DeltaNet would be timed as Gated DeltaNet."""
    made, choices = PRESETS[preset].make(), PRESETS[preset].gates
    _, queries, keys, _, gates = jax.eval_shape(lambda: random_inputs(made, choices, 1, 1, 4, 8))
    present = {name for name, value in vars(gates).items() if value is not None}
    expected = {name for name, value in vars(choices.example(made)).items() if value is not None}
    assert present - {"bias_gate"} == expected
    assert queries.shape == (keys.shape if preset == "mamba3_mimo" else (1, 1, 4, 8))


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--preset moneto", " or None; did you mean moneta?"),
        ("--form chunky", "form is 'chunky'; use chunked, associative or recurrent"),
        ("--architecture cnn", "architecture is 'cnn'; use residual_mlp"),
    ],
)
def test_unknown_names_are_refused_in_a_sentence(arguments, sentence, capsys):
    assert cli.main(["bench", "memory", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_rows_that_devices_cannot_share_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    timing.check_rows("batch", 16)
    with pytest.raises(ConfigError, match="^batch is 12; use a multiple of 8, the devices that share the rows$"):
        timing.check_rows("batch", 12)


def test_contexts_that_are_not_read_whole_are_refused(capsys):
    """A shorter last piece would be read as 256 tokens, and the row be of another context than it says."""
    assert cli.main(["bench", "train", "--contexts", "256", "300"]) == 2
    assert "contexts has 300; use multiples of 256, the tokens that are read at once" in capsys.readouterr().err
