"""The studies of the papers: what they train, what they refuse, and each from end to end on the tiniest of models."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from tiny_studies import LANGUAGE, RECALL

from titans_jax import cli
from titans_jax.config import MemoryConfig, memory_rule
from titans_jax.memory.rule.presets import PRESETS
from titans_jax.studies import STUDIES, run
from titans_jax.studies.ablation import VARIANTS, AblationOptions, AblationStudy
from titans_jax.studies.length import LengthOptions, LengthStudy
from titans_jax.studies.models import NEVER, bounded, small_model
from titans_jax.studies.step_size import StepSizeOptions, StepSizeStudy
from titans_jax.training.run import init_model

SMALL = {"dim": 8, "depth": 1, "seeds": 1}


def finish(study, name, options, folder):
    """Run a study with these options, past the command line."""
    run.run(run.Plan(name, study, options, study.cells(options), folder, f"titans study {name}"))
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.exhaustive  # test_length_end_to_end sees another study
@pytest.mark.slow
def test_step_size_end_to_end(tmp_path):
    options = StepSizeOptions(
        presets=("ttt_linear",), head_dims=(4,), max_step_sizes=(0.5,), recall=RECALL,
        language=dataclasses.replace(LANGUAGE, positions=0), **SMALL,
    )  # fmt: skip
    saved = finish(StepSizeStudy(), "step_size", options, tmp_path)
    rows = [(row["labels"]["max_step_size"], row["labels"]["mark"]) for row in saved["rows"]]
    assert rows == sorted([(0.5, ""), (options.memory.max_step_size, "default")])
    for row in saved["rows"]:
        assert 0 <= row["numbers"]["accuracy"]["mean"] <= 1 and 7 < row["numbers"]["bits_per_byte"]["mean"] < 10
    assert len(saved["baselines"]) == 2 and 3 < saved["baselines"][1]["bits_per_byte"] < 6


@pytest.mark.exhaustive  # test_length_end_to_end sees another study
@pytest.mark.slow
def test_ablation_end_to_end(tmp_path):
    options = AblationOptions(
        head_dim=4, variants=("without convolution",), recall=RECALL, language=LANGUAGE, num_persistent=2, **SMALL
    )
    saved = finish(AblationStudy(), "ablation", options, tmp_path)
    full, without = (row["numbers"] for row in saved["rows"])
    assert full["bits_per_byte_lost"]["mean"] == full["accuracy_lost"]["mean"] == 0
    lost = without["bits_per_byte"]["mean"] - full["bits_per_byte"]["mean"]
    assert without["bits_per_byte_lost"]["mean"] == pytest.approx(lost) and lost != 0
    assert full["memory_gain"]["mean"] != without["memory_gain"]["mean"]
    assert without["accuracy_lost"]["mean"] == pytest.approx(full["accuracy"]["mean"] - without["accuracy"]["mean"])


@pytest.mark.slow
def test_length_end_to_end(tmp_path):
    options = LengthOptions(
        blocks=("lmm",), presets=(), reference=("gated_deltanet",), head_dim=4, segment=16, language=LANGUAGE, **SMALL
    )
    (row,) = finish(LengthStudy(), "length", options, tmp_path)["rows"]
    numbers = row["numbers"]
    carried, fresh = ([bucket["mean"] for bucket in numbers[name]] for name in ("carried", "fresh"))
    assert [bucket["mean"] for bucket in numbers["ends"]] == [16, 32, 64]
    assert carried[0] == pytest.approx(fresh[0]) and carried[1] != fresh[1]
    assert numbers["last_over_best"]["mean"] == pytest.approx(carried[-1] / min(carried))
    assert numbers["last_over_fresh"]["mean"] == pytest.approx(carried[-1] / fresh[-1])


def test_what_the_ablation_takes_away():
    cells = AblationStudy().cells(AblationOptions(language=LANGUAGE, recall=RECALL, seeds=1))
    models = {cell.labels["variant"]: cell.model for cell in cells if cell.task == RECALL}
    assert list(models) == list(VARIANTS)
    full = models["full"]
    assert models["never written"].memory.max_step_size == NEVER
    assert not memory_rule(models["without momentum"].memory).algorithm.has_momentum
    assert models["without convolution"].conv_size == 1 and models["without persistent tokens"].num_persistent == 0
    assert memory_rule(models["linear memory"].memory).architecture.linear
    for depth in (1, 2, 3, 4):
        assert len(memory_rule(models[f"depth {depth}"].memory).shapes(8)) == depth
    assert [memory_rule(models[f"chunk {size}"].memory).chunk_size for size in (1, 4, 16, 64)] == [1, 4, 16, 64]
    assert models["depth 2"] == models["chunk 16"] == full
    assert len({*models.values()}) == len(models) - 2


def test_attention_of_a_reference_has_convolutions_where_its_name_says_so():
    made = {name: small_model(name, "lmm", 8, 1, 4, MemoryConfig()) for name in ("attention", "attention_conv")}
    assert [made[name].attention_conv for name in made] == [False, True]
    assert {model.pattern for model in made.values()} == {("attention",)}


@pytest.mark.slow
def test_without_forgetting_everything_is_kept():
    (cell, *_) = AblationStudy().cells(
        AblationOptions(variants=("without forgetting",), head_dim=4, language=LANGUAGE, recall=RECALL, **SMALL)
    )[1:]
    assert cell.labels["variant"] == "without forgetting"
    from flax import nnx

    graphdef, params = init_model(cell.model, 0)
    model = nnx.merge(graphdef, params)
    _, report = jax.jit(lambda tokens: model(tokens, return_diagnostics=True))(np.ones((1, 8), np.int32))
    assert np.all(report["retention"] == 1)


def test_every_preset_with_a_bound_is_tried():
    cells = StepSizeStudy().cells(StepSizeOptions(recall=RECALL, tasks=("recall",), seeds=1))
    names = {cell.labels["preset"] for cell in cells}
    assert names == {name for name in PRESETS if bounded(name)} >= {"titans", "moneta", "yaad", "memora", "ttt_linear"}
    default = StepSizeOptions().memory.max_step_size
    assert all((cell.labels["max_step_size"] == default) == (cell.labels["mark"] == "default") for cell in cells)
    assert sum(cell.labels["mark"] == "default" for cell in cells) == 2 * len(names)


@pytest.mark.parametrize("name", ["step_size", "ablation", "length"])
def test_the_quick_version_is_smaller(name):
    study = STUDIES[name]()
    default, quick = (study.defaults(study.options(quick=quick)) for quick in (False, True))
    sizes = [sum(cell.task.steps for cell in study.cells(options)) for options in (default, quick)]
    assert default.seeds == 3 and quick.quick and 10 * sizes[1] < sizes[0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("step_size --presets deltanet", "presets has 'deltanet', whose step has no largest size; use "),
        ("step_size --tasks recal", "tasks has 'recal'; use recall, language or both"),
        ("step_size --block window", "blocks has 'window'; use lmm, mac, mag"),
        ("step_size --max_step_sizes 0 --tasks recall", "model.memory.max_step_size is 0"),
        ("ablation --variants without", "variants has 'without'; use full, never written, without momentum"),
        ("ablation --language.data.packing documents", "data.packing is 'documents'; use stream"),
        ("ablation --head_dim 24", "head_dim is 24; use a divisor of dim 128"),
        ("length --language.positions 1000", "positions is 1000; use 0 or a multiple of data.sequence_length 512"),
        ("length --language.positions 0", "language.positions is 0; use a multiple of"),
        ("length --language.positions_rows 500", "positions_rows is 500; use 1 to "),
        ("length --blocks", "blocks is empty; name at least one"),
        ("length --hidden_dim 0", "hidden_dim is 0; use at least 1"),
        ("length --embedding_scale 0", "embedding_scale is 0.0; use a number above 0"),
        ("length --language.data.source text --language.data.path /nowhere", "'/nowhere' does not exist"),
        ("lenght", "NAME is 'lenght'; use ablation, babilong, distance, dna, "),
        ("lenght", " or yaad; did you mean length?"),
        ("nothing.py", "NAME is nothing.py, and nothing.py is no file"),
    ],
)
def test_a_mistake_ends_in_one_sentence(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.setattr(run, "run_cell", None)  # nothing is compiled
    name, *rest = arguments.split()
    if name == "ablation":
        rest = ["--variants", "full", *rest] if "--variants" not in rest else rest
    if name == "length" and "--presets" not in rest:
        rest = ["--presets", "titans", *rest]
    assert cli.main(["study", name, *rest, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_memory_gain_is_what_never_writing_costs():
    """A memory whose writes are nearly nothing has no gain; a model without memory has no such number."""

    task = dataclasses.replace(LANGUAGE, positions=0)

    def numbers(preset, **memory):
        model = small_model(preset, "lmm", dim=8, depth=1, head_dim=4, memory=MemoryConfig(chunk_size=8, **memory))
        return task.measure(*init_model(task.fit_to(model), 0))

    assert abs(numbers("titans", max_step_size=1e-20)["memory_gain"]) < 1e-6 < abs(numbers("titans")["memory_gain"])
    assert "memory_gain" not in numbers("attention")
