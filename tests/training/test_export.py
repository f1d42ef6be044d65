"""A model as a folder: what goes out comes back bit for bit, and what is not whole is refused."""

import csv
import dataclasses
import io
import json
import re
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

import titans_jax
from tests.training.tiny import tiny_config
from titans_jax import cli
from titans_jax.data import load_tokenizer
from titans_jax.evaluation import evaluate_run
from titans_jax.training import Run, load_run, train
from titans_jax.training.checkpoint import CheckpointError
from titans_jax.training.export import HEADER, WEIGHTS, export_orbax, export_safetensors
from titans_jax.training.run import init_model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run as training leaves it, as far as exporting looks at it."""
    config = tiny_config()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, depth=1, dtype="bfloat16"))
    folder = tmp_path_factory.mktemp("runs")
    line = {"kind": "validation", "step": 1, "loss": 1.5, "bits_per_byte": 2.25}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return Run(config, load_tokenizer("byte"), *init_model(config.model, 0), 1, folder)


@pytest.fixture
def exported(trained, tmp_path):
    export_safetensors(trained, tmp_path / "exported")
    return tmp_path / "exported"


def assert_same_model(one, other):
    assert (one.config, one.step) == (other.config, other.step)
    assert jax.tree.structure(one.params) == jax.tree.structure(other.params)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_import_is_the_inverse_of_export(trained, exported, tmp_path, capsys):
    assert_same_model(trained, titans_jax.load(exported))
    twice = tmp_path / "twice"
    assert cli.main(["export", str(exported), "--output", str(twice)]) == 0
    assert f"the model of step 1 is in {twice}" in capsys.readouterr().out
    assert_same_model(trained, load_run(twice))
    assert (twice / WEIGHTS).read_bytes() == (exported / WEIGHTS).read_bytes()


@pytest.mark.slow
def test_what_came_back_says_the_same(trained, exported):
    again = titans_jax.load(exported)
    assert evaluate_run(trained, 1) == evaluate_run(again, 1)
    assert trained.generate("def ", 4, temperature=0) == again.generate("def ", 4, temperature=0)


def test_an_orbax_export_is_a_run_without_optimizer(trained, exported, tmp_path):
    folder = tmp_path / "run"
    assert cli.main(["export", str(exported), "--output", str(folder), "--format", "orbax"]) == 0
    assert_same_model(trained, load_run(folder))
    assert not list(folder.rglob("optimizer"))
    config = dataclasses.replace(trained.config, training=dataclasses.replace(trained.config.training, steps=2))
    words = f"step 1 in {re.escape(str(folder))}/checkpoints has no optimizer state.*training.init_from {folder}$"
    with pytest.raises(CheckpointError, match=words):
        train(config, folder, Console(file=io.StringIO()))


def test_a_run_of_bytes_does_not_read_with_the_tokenizer_of_another(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "run")
    (folder / "tokenizer.model").write_bytes(b"of a run that ended before its first checkpoint")
    assert load_run(folder).tokenizer_name == "byte"


def test_an_orbax_export_has_the_average_of_a_run_that_keeps_one(trained, tmp_path):
    config = dataclasses.replace(trained.config, optimizer=dataclasses.replace(trained.config.optimizer, ema=0.9))
    export_orbax(dataclasses.replace(trained, config=config), tmp_path / "run")
    assert_same_model(load_run(tmp_path / "run"), trained)


def test_what_lies_in_the_folder(exported):
    names = {file.name for file in exported.iterdir()}
    assert names == {WEIGHTS, "tensors.csv", "config.json", "README.md"}
    with (exported / "tensors.csv").open() as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    arrays = load_file(exported / WEIGHTS)
    assert {name: row["shape"] for name, row in rows.items()} == {
        name: " x ".join(map(str, array.shape)) for name, array in arrays.items()
    }
    query = rows["cycles.blocks.0.attention.query.kernel"]
    assert query["what"] == "block 0 of a cycle (attention), attention, query, matrix"
    assert query["axes"] == "cycles 1 x in x out"
    card = (exported / "README.md").read_text()
    assert "titans_jax.load(" in card and "| bits per byte |" in card and "`data.sequence_length` | `64`" in card


def test_a_folder_that_is_not_whole_is_refused(exported, tmp_path, capsys):
    def refused(change, words):
        folder = tmp_path / f"wrong_{len(list(tmp_path.iterdir()))}"
        shutil.copytree(exported, folder)
        change(folder)
        with pytest.raises(CheckpointError, match=words):
            load_run(folder)

    def rewritten(change):
        def write(folder):
            arrays, about = load_file(folder / WEIGHTS), {"format": 1, "version": "0", "step": 1}
            change(arrays, about)
            save_file(arrays, folder / WEIGHTS, {HEADER: json.dumps(about)})

        return write

    refused(lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-9]), "cannot be read as an exported model")
    refused(lambda f: (f / "config.json").unlink(), "cannot be read as an exported model")
    refused(lambda f: (f / "config.json").write_text("{"), "cannot be read as an exported model")
    refused(rewritten(lambda a, _: a.pop("norm.scale")), "has no norm.scale, which config.json asks for")
    refused(rewritten(lambda a, _: a.update(more=np.zeros(1))), "has more, unknown to config.json")
    refused(
        rewritten(lambda a, _: a.update({"norm.scale": np.zeros(3)})), r"norm.scale as .* \[3\], and config.json asks"
    )
    refused(rewritten(lambda _, about: about.update(format=9)), "written by titans_jax 0 in format 9")
    assert cli.main(["export", str(exported), "--output", str(exported)]) == 2
    assert "which is there already; give a new folder" in capsys.readouterr().err
