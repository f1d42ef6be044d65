"""Going on with a run: what may change, in which words, and that a moved run has all it needs."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from tests.training.tiny import tiny_config
from titans_jax import training
from titans_jax.config import Config, ConfigError, MeshConfig, leaves
from titans_jax.training.resume import TOKENIZERS, changes, check_same_run, rule_of, table
from titans_jax.training.run import copy_tokenizer, with_absolute_paths

CONFIG = tiny_config()


def changed(section: str, **fields) -> Config:
    return dataclasses.replace(CONFIG, **{section: dataclasses.replace(getattr(CONFIG, section), **fields)})


def test_every_field_has_a_rule():
    assert {rule_of(name).change for name in leaves(CONFIG)} == {"refused", "said", "silent"}


def test_the_table_in_the_readme_is_the_code():
    readme = Path(training.__file__).parent / "README.md"
    assert table() in readme.read_text()


@pytest.mark.parametrize("section, field, value", [("model", "norm_eps", 1e-3), ("data", "seed", 5)])
def test_another_model_or_other_batches_are_refused(tmp_path, section, field, value):
    with pytest.raises(ConfigError, match=f"{section}.{field} is {value}, but .* was trained with .*; use "):
        check_same_run(CONFIG, changed(section, **{field: value}), tmp_path)


def test_what_changed_is_said():
    now = changed("optimizer", learning_rate=1e-4, beta1=0.5)
    now = dataclasses.replace(now, training=dataclasses.replace(now.training, steps=20, seed=3, run_dir="x"))
    now = dataclasses.replace(now, mesh=MeshConfig(data=1))
    check_same_run(CONFIG, now, Path("run"))
    assert changes(CONFIG, now) == [
        "optimizer.learning_rate is 0.0001, was 0.003",
        "optimizer.beta1 is 0.5, was 0.9",
        "training.steps is 20, was 12",
        "training.seed is 3, was 0",
    ]
    assert changes(now, now) == []


def test_paths_are_kept_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    data = with_absolute_paths(changed("data", path="text", validation_path="~/more", tokenizer="a/x.model")).data
    assert (data.path, data.validation_path) == (str(tmp_path / "text"), "/home/me/more")
    assert data.tokenizer == str(tmp_path / "a" / "x.model")
    data = with_absolute_paths(changed("data", path=None)).data
    assert (data.path, data.validation_path, data.tokenizer) == (None, None, "byte")
    kept = with_absolute_paths(dataclasses.replace(CONFIG, extensions=("parts.py", "/parts/more.py")))
    assert kept.extensions == (str(tmp_path / "parts.py"), "/parts/more.py")


def test_the_tokenizer_stays_with_the_run(tmp_path):
    """Another file with the same content is the same tokenizer; the same name with another content is not."""
    model, run_dir = tmp_path / "x.model", tmp_path / "run"
    model.write_bytes(b"one")
    run_dir.mkdir()
    config = changed("data", tokenizer=str(model))
    check_same_run(config, config, run_dir)  # before there is a copy, names are compared
    with pytest.raises(ConfigError, match=f"data.tokenizer is .*y.model, which is not the one .*; use {model}, or"):
        check_same_run(config, changed("data", tokenizer=str(tmp_path / "y.model")), run_dir)
    (run_dir / TOKENIZERS[1]).write_text("of a run that ended before its first checkpoint")
    copy_tokenizer(config, run_dir, begins=True)
    assert [path.name for path in run_dir.iterdir()] == [TOKENIZERS[0]]
    shutil.copy(model, tmp_path / "y.model")
    check_same_run(config, changed("data", tokenizer=str(tmp_path / "y.model")), run_dir)
    model.write_bytes(b"two")
    for now, then in ((config, config), (CONFIG, config), (config, CONFIG)):
        with pytest.raises(ConfigError, match="which is not the one that the checkpoint in .* was trained with; use"):
            check_same_run(then, now, run_dir)
    copy_tokenizer(config, run_dir, begins=False)
    assert (run_dir / TOKENIZERS[0]).read_bytes() == b"one"
    copy_tokenizer(changed("data", tokenizer=str(run_dir / TOKENIZERS[0])), run_dir, begins=True)
    assert (run_dir / TOKENIZERS[0]).read_bytes() == b"one"  # the configuration's own file stays
    copy_tokenizer(CONFIG, run_dir, begins=True)  # of bytes, which have no file
    assert list(run_dir.iterdir()) == []
