"""What a study does with its cells: it keeps what is finished, goes on after a kill, and hides no failure."""

import dataclasses
import json
import math

import numpy as np
import pytest
from tiny_studies import LANGUAGE, RECALL, RECALL_OPTIONS

from titans_jax import cli
from titans_jax.config import DataConfig, MemoryConfig
from titans_jax.config.saved import DEFAULTS
from titans_jax.config.schema import replaced
from titans_jax.studies import STUDIES, Cell, run, tasks
from titans_jax.studies.models import small_model
from titans_jax.studies.results import Result, ResultsFile, finite_numbers
from titans_jax.studies.table import best_of, make_rows, spread

MODEL = RECALL.fit_to(small_model("attention", "lmm", 8, 1, 4, STUDIES["mqar"].options().memory))


def cell(seed=1, **labels):
    return Cell({"kind": "a"} | labels, MODEL, RECALL, seed)


def finite(accuracy):
    return Result("finite", 10, 20, 30, 0.5, "", {"accuracy": accuracy})


def lines(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_study_that_was_killed_goes_on_where_it_was(tmp_path, monkeypatch):
    """Killed in its third model, and while it wrote a line; the others' numbers are those of a run without a kill."""
    command = ["study", "mqar", *RECALL_OPTIONS, "--seeds", "3", "--output"]
    ran, run_cell = [], run.run_cell

    def counted(cell, after_step):
        ran.append(cell.seed)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return run_cell(cell, after_step)

    monkeypatch.setattr(run, "run_cell", counted)
    assert cli.main([*command, str(tmp_path / "killed")]) == 130
    assert [line["cell"]["seed"] for line in lines(tmp_path / "killed")] == [1, 2]
    assert not (tmp_path / "killed" / "mqar.csv").exists()
    with (tmp_path / "killed" / "results.jsonl").open("a") as out:
        out.write('{"of": "another version"}\n{"cell": {"model"')
    assert cli.main([*command, str(tmp_path / "killed")]) == 0
    assert ran == [1, 2, 3, 3]
    assert cli.main([*command, str(tmp_path / "killed")]) == 0
    assert ran == [1, 2, 3, 3]  # all are there

    monkeypatch.setattr(run, "run_cell", run_cell)
    assert cli.main([*command, str(tmp_path / "whole")]) == 0
    killed, whole = lines(tmp_path / "killed"), lines(tmp_path / "whole")
    assert killed.pop(2) == {"of": "another version"}  # which may still read it
    one, other = ([line["numbers"] for line in found] for found in (killed, whole))
    assert len(one) == 3 and one == other


def test_a_cell_is_identified_by_its_whole_configuration(tmp_path):
    file = ResultsFile(tmp_path / "results.jsonl")
    file.add(cell(), finite(0.5))
    file = ResultsFile(tmp_path / "results.jsonl")
    assert file.finished(cell()) and file.get(cell()) == finite(0.5)
    assert file.finished(cell(kind="b"))  # a row of another name
    remat = dataclasses.replace(MODEL, remat="names")  # how the same numbers are computed
    assert MODEL.remat != "names" and file.finished(dataclasses.replace(cell(), model=remat))
    lines = [json.loads(line) for line in file.file.read_text().splitlines()]
    for line in lines:  # as they were written when `remat` was part of the identity
        line["cell"]["model"]["remat"] = "none"
    file.file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = ResultsFile(file.file)
    assert file.finished(cell())
    assert not file.finished(cell(seed=2))
    for other in (
        dataclasses.replace(cell(), model=dataclasses.replace(MODEL, norm_eps=1e-5)),
        dataclasses.replace(cell(), task=dataclasses.replace(RECALL, steps=3)),
        dataclasses.replace(cell(), task=dataclasses.replace(RECALL, learning_rate=1e-4)),
    ):
        assert not file.finished(other)


def test_a_cell_of_an_earlier_version_whose_defaults_were_others_is_trained_again(tmp_path):
    file = tmp_path / "results.jsonl"
    shares = dataclasses.replace(cell(), model=replaced(MODEL, ["memory"], "retention", "chi_squared"))
    same = dataclasses.replace(cell(), model=replaced(MODEL, ["memory"], "preset", "gated_deltanet"))
    for one in (same, shares):
        ResultsFile(file).add(one, finite(0.5))
    assert ResultsFile(file).finished(shares)
    earlier = [json.loads(line) for line in file.read_text().splitlines()]
    for line in earlier:  # as they were written when values of weights made of logits were as projected
        assert line.pop("defaults") == DEFAULTS
    file.write_text("".join(json.dumps(line) + "\n" for line in earlier))
    assert ResultsFile(file).finished(same) and not ResultsFile(file).finished(shares)
    projected = replaced(replaced(shares.model, ["memory"], "normalize_values", False), ["memory"], "value_skip", None)
    assert ResultsFile(file).finished(dataclasses.replace(shares, model=projected))


def test_a_cell_whose_gates_started_elsewhere_is_trained_again(tmp_path):
    """Steps of several matrices without momentum, Yaad's thresholds also token by token; later, steps with momentum."""
    file = tmp_path / "results.jsonl"

    def of(**fields):
        return dataclasses.replace(cell(), model=dataclasses.replace(MODEL, memory=MemoryConfig(**fields)))

    others, momentum = [of(preset="ttt_mlp"), of(preset="yaad", chunk_size=1)], [of(), of(chunk_size=1)]
    same = [of(preset="gated_deltanet"), of(preset="ttt_mlp", chunk_size=1)]
    cells = others + momentum + same
    for each in cells:
        ResultsFile(file).add(each, finite(0.5))
    assert all(ResultsFile(file).finished(each) for each in cells)
    for version, differ in ((5, momentum), (2, others + momentum)):
        earlier = [json.loads(line) | {"defaults": version} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(line) + "\n" for line in earlier))
        found = ResultsFile(file)
        assert [found.finished(each) for each in cells] == [each not in differ for each in cells]


def test_a_cell_of_hope_that_started_elsewhere_is_trained_again(tmp_path):
    """Its steps, too, in a block without its other parts."""
    file = tmp_path / "results.jsonl"
    kinds = [("hope", "hope"), ("hope_attention", "gated_deltanet"), ("lmm", "hope"), ("lmm", "gated_deltanet")]
    models = [dataclasses.replace(MODEL, pattern=(block,), memory=MemoryConfig(preset=name)) for block, name in kinds]
    cells = [dataclasses.replace(cell(), model=model) for model in models]
    for each in cells:
        ResultsFile(file).add(each, finite(0.5))
    assert all(ResultsFile(file).finished(each) for each in cells)
    earlier = [json.loads(line) | {"defaults": 3} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in earlier))
    assert [ResultsFile(file).finished(each) for each in cells] == [False, False, False, True]


def test_a_cell_is_another_where_its_text_has_changed(tmp_path):
    (tmp_path / "a.txt").write_text("one two three " * 40)
    (tmp_path / "b.txt").write_text("four five six " * 40)
    found = []
    for word in ("four", "nine"):
        (tmp_path / "b.txt").write_text(f"{word} five six " * 40)
        tasks._corpus.cache_clear(), tasks._fingerprint.cache_clear()
        text = DataConfig(source="text", path=str(tmp_path), packing="stream", sequence_length=16, validation_every=2)
        found.append(dataclasses.replace(cell(), task=dataclasses.replace(LANGUAGE, data=text)).identity)
    assert found[0].pop("data") != found[1].pop("data") and found[0] == found[1]
    assert "data" not in cell().identity


def test_seconds_are_those_of_models_that_did_not_fail():
    (row,) = make_rows([(cell(1), finite(0.5)), (cell(2), Result("failed", 10, 20, error="x"))])
    assert row.seconds == 0.5


def test_a_model_that_two_rows_share_is_trained_once(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(run, "run_cell", lambda cell, after_step: ran.append(cell) or finite(0.5))
    plan = run.make_plan("mqar", [*RECALL_OPTIONS, "--seeds", "1", "--output", str(tmp_path)])
    (one,) = plan.cells
    plan = dataclasses.replace(plan, cells=[one, dataclasses.replace(one, labels=one.labels | {"preset": "again"})])
    run.run(plan)
    assert len(ran) == 1 and len(lines(tmp_path)) == 1
    assert len(json.loads((tmp_path / "mqar.json").read_text())["rows"]) == 2


def test_a_model_that_fails_is_recorded_and_tried_again(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nwhile running")

    command = ["study", "mqar", *RECALL_OPTIONS, "--seeds", "1", "--output", str(tmp_path)]
    monkeypatch.setattr(run, "fit", broken)
    assert cli.main(command) == 1
    printed = capsys.readouterr()
    assert "1 of 1 models of mqar failed" in printed.err and "1 of 1 failed" in " ".join(printed.out.split())
    (line,) = lines(tmp_path)
    assert line["status"] == "failed" and line["numbers"] is None
    assert line["error"] == "RuntimeError: RESOURCE_EXHAUSTED: out of memory while running"
    assert (tmp_path / "mqar.png").exists()
    monkeypatch.undo()
    assert cli.main(command) == 0
    assert [line["status"] for line in lines(tmp_path)] == ["failed", "finite"]


def test_a_model_that_is_not_finite_is_recorded(monkeypatch):
    monkeypatch.setattr(type(RECALL), "measure", lambda *_: {"accuracy": 0.0, "loss": math.nan, "c": [1.0, math.inf]})
    result = run.run_cell(cell())
    assert result.status == "not finite"
    assert result.numbers == {"accuracy": 0.0, "loss": None, "c": [1.0, None]}
    (row,) = make_rows([(cell(), dataclasses.replace(result, numbers={})), (cell(2), finite(0.5))])
    assert row.broken == "1 of 2 not finite"
    assert finite_numbers({"a": 1.0}) == ({"a": 1.0}, True)


def test_mean_and_standard_deviation_over_seeds():
    values = [0.25, 0.5, 0.9]
    (row,) = make_rows([(cell(seed), finite(value)) for seed, value in enumerate(values)])
    found = row.spread("accuracy")
    assert found.mean == pytest.approx(np.mean(values), rel=1e-12)
    assert found.sd == pytest.approx(np.std(values, ddof=1), rel=1e-12)
    assert (found.least, found.most, found.count) == (0.25, 0.9, 3)
    assert (row.parameters, row.state_floats, row.tokens, row.models) == ([10], [20], [30], 3)
    assert spread([0.5]) == (0.5, None, 0.5, 0.5, 1)
    assert spread([None]) == (None, None, None, None, 0)


def test_a_seed_that_failed_keeps_its_place():
    (row,) = make_rows([(cell(1), Result("failed", 10, 20)), (cell(2), finite(0.5))])
    assert row.numbers == {"accuracy": [None, 0.5]} and row.failed == 1
    assert row.spread("accuracy").mean == 0.5


def test_the_best_row_is_of_those_whose_seeds_are_all_known():
    values = {1: (0.9, 0.8), 2: (0.95, None), 3: (0.85, 0.9), 4: (None, None)}
    done = [
        (Cell({"rate": rate}, None, RECALL, seed), Result("finite", 1, 1, numbers={"accuracy": value}))
        for rate, seeds in values.items()
        for seed, value in enumerate(seeds)
    ]
    rows = make_rows(done)
    assert [row.labels for row in best_of(rows, ("rate",), "accuracy")] == [{"rate": 3}]
    assert [row.labels for row in best_of(rows[3:] + rows[1:2], ("rate",), "accuracy")] == [{"rate": 2}]


def test_curves_are_spread_entry_by_entry():
    numbers = [{"curve": [1.0, 2.0]}, {"curve": [3.0, None]}]
    results = [dataclasses.replace(finite(0), numbers=one) for one in numbers]
    (row,) = make_rows([(cell(seed), result) for seed, result in enumerate(results)])
    assert [s.mean for s in row.curve("curve")] == [2.0, 2.0]
    assert [s.count for s in row.curve("curve")] == [2, 1]


OWN = '''
from titans_jax.studies import STUDIES, Cell, Column, Study, register_study
from titans_jax.studies.models import small_model
from tiny_studies import RECALL

@register_study()
class TwoWidths(Study):
    """Two widths."""
    def cells(self, options):
        memory = STUDIES["mqar"].options().memory
        models = {dim: RECALL.fit_to(small_model("attention", "lmm", dim, 1, 4, memory)) for dim in (4, 8)}
        return [Cell({"dim": dim}, model, RECALL, seed=1) for dim, model in models.items()]
    def columns(self, options):
        return [Column("accuracy", "accuracy")]
    def draw(self, options, rows, file, note):
        file.write_text(note)
'''


@pytest.fixture
def own_studies():
    """Forgets studies that a test registers."""
    before = dict(STUDIES)
    yield
    for name in [name for name in STUDIES if name not in before]:
        del STUDIES._parts[name]


@pytest.mark.usefixtures("own_studies")
def test_a_study_of_one_s_own(tmp_path, monkeypatch, capsys):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    monkeypatch.setattr(run, "run_cell", lambda cell, after_step: finite(cell.model.dim / 16))
    output = ["--output", str(tmp_path / "out")]
    assert cli.main(["study", str(file), *output]) == 0
    assert cli.main(["study", f"{file}:two_widths", *output]) == 0
    saved = json.loads((tmp_path / "out" / "two_widths.json").read_text())
    assert [(row["labels"], row["numbers"]["accuracy"]["mean"]) for row in saved["rows"]] == [
        ({"dim": 4}, 0.25), ({"dim": 8}, 0.5)
    ]  # fmt: skip
    capsys.readouterr()
    assert cli.main(["study", f"{file}:widths", *output]) == 2
    assert "registers no such study" in capsys.readouterr().err


def test_help_lists_the_studies(capsys):
    assert cli.main(["study"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in STUDIES)
