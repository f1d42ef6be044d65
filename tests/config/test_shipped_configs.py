"""The configurations that come with the package: valid, as the paper says, and as large as they say."""

import ast
import dataclasses
import re

import pytest

from titans_jax.cli import find_config, load_config, shipped_configs
from titans_jax.config.papers import MIRAS, SIZES, TITANS
from titans_jax.config.validate import validate
from titans_jax.memory.rule.presets import PRESETS
from titans_jax.tpu.topology import find_topology
from titans_jax.training.run import count_params

FILES = sorted(shipped_configs().glob("*.py"), key=lambda file: file.stem)


def test_all_are_there():
    titans = {f"{model}_{size}" for model in TITANS for size in SIZES}
    miras = {f"{model}_{size}" for model in MIRAS for size in ("170m", "340m", "760m", "1b")}
    rest = {f"{preset}_small" for preset in set(PRESETS) - {"titans", "moneta", "yaad", "memora"}}
    assert {file.stem for file in FILES} == titans | miras | rest | {"quickstart", "gated_deltanet_h2_small"}
    assert (len(titans), len(miras), len(rest)) == (25, 24, 15)
    assert find_config("mac_340m") == find_config("mac_340m.py") == shipped_configs() / "mac_340m.py"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_config_is_valid_and_its_docstring_true(file):
    config = load_config(file)
    if config.data.source != "python":
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, path="given by the user"))
    validate(config)
    docstring = ast.get_docstring(ast.parse(file.read_text()))
    assert f"titans train {file.stem}" in docstring
    (stated,) = re.findall(r"([\d,]+) parameters", docstring)
    assert count_params(config.model) == int(stated.replace(",", ""))
    if "Sized by" in docstring:
        topology = find_topology(config.mesh.topology)
        assert find_topology(re.findall(r"TPU (v5e-\d+)", docstring)[0]) == topology
        on_each = config.data.batch_size / config.training.gradient_accumulation / topology.chips
        assert f"{on_each:g} row" in docstring
    else:
        assert config.mesh.topology is None


@pytest.mark.parametrize(
    "size, depth, dim, num_heads, learning_rate, tokens",
    [
        ("170m", 12, 768, 16, 3e-3, 15e9),
        ("340m", 24, 1024, 16, 1.5e-3, 15e9),
        ("760m", 24, 1536, 16, 1.25e-3, 30e9),
        ("1b", 18, 2048, 8, 7e-4, 100e9),
    ],
)
def test_settings_of_the_paper(size, depth, dim, num_heads, learning_rate, tokens):
    """papers.md 2.1, Table 5 and the settings beside it."""
    config = load_config(find_config(f"mac_{size}"))
    model, data = config.model, config.data
    assert (model.depth, model.dim, model.num_heads) == (depth, dim, num_heads)
    assert (model.segment, model.window, model.num_persistent, model.vocab_size) == (512, 2048, 128, 32000)
    assert (model.memory.chunk_size, model.memory.depth, model.memory.expansion) == (16, 2, 4)
    assert config.optimizer.learning_rate == learning_rate
    assert (config.optimizer.weight_decay, config.optimizer.clip_norm) == (0.1, 1.0)
    batch = data.sequence_length * data.batch_size
    assert data.sequence_length == 4096 and batch == 2**19
    assert config.training.steps * batch == pytest.approx(tokens, rel=1e-4)


@pytest.mark.parametrize("preset", ["moneta", "yaad", "memora"])
def test_hybrids_are_the_same_memory_and_a_window(preset):
    """papers.md 3.6: the Samba pattern, a Miras layer and then sliding-window attention."""
    plain, hybrid = (load_config(find_config(f"{preset}{h}_340m")).model for h in ("", "_h"))
    assert hybrid.memory == plain.memory and hybrid.memory.preset == preset
    assert (plain.pattern, hybrid.pattern) == (("lmm",), ("lmm", "window"))
    assert (plain.memory.depth, plain.memory.expansion, plain.memory.momentum) == (2, 4, None)
