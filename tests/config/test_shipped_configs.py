"""The configurations that come with the package: valid, as the papers say, and as large as their files say."""

import ast
import dataclasses
import re

import pytest

from titans_jax.config import Config, ConfigError
from titans_jax.config.files import find_config, folder, load_configs, shipped_configs
from titans_jax.config.papers import SIZES
from titans_jax.config.validate import validate
from titans_jax.memory.rule.presets import PRESETS
from titans_jax.tpu.topology import find_topology
from titans_jax.training.run import count_params

CONFIGS = shipped_configs()
TITANS = ("lmm", "mac", "mag", "mal")
BASELINES = (
    "transformer", "retnet", "hgrn2", "gla", "mamba2", "deltanet", "ttt_linear", "ttt_mlp", "gated_deltanet", "samba",
    "gated_deltanet_h2",
)  # fmt: skip
LATER = (
    "kimi_delta_attention",
    "gated_deltanet_2",
    "comba",
    "preconditioned_delta",
    "preconditioned_kimi",
    "mamba3",
)
MIRAS = ("moneta", "yaad", "memora", "moneta_h", "yaad_h", "memora_h")
ATLAS = ("omeganet", "omeganet_h", "atlas", "atlas_h", "dla")
HOPE = ("hope", "hope_attention")
TABLE = ("170m", "340m", "760m", "1b")
"""Sizes with a row in the papers; what is called 1b is their 1.3B."""
SIZES_OF = {
    TITANS: (*TABLE, "400m"),
    MIRAS: (*TABLE, "120m"),
    (*BASELINES, "mamba"): (*TABLE, "400m", "120m"),
    (*LATER, *ATLAS): TABLE,
    HOPE: ("760m", "1b"),
    ("lact",): ("170m", "340m", "760m"),
    ("memory_caching",): ("760m", "1b"),
    ("mamba3_mimo",): ("1b",),
    ("log_linear_mamba2", "log_linear_gated_deltanet"): ("760m",),
}
"""Sizes of each model of a paper."""
AFTER = (*LATER, "mamba3_mimo", "atlas", "dla", "lact", "hope")
TEXTS = {file.stem: file.read_text() for file in folder().glob("*.py")}
STATED = {
    name: (int(parameters.replace(",", "")), gibibytes)
    for text in TEXTS.values()
    for name, parameters, gibibytes in re.findall(
        r'^    "(\w+)": .*# ([\d,]+) parameters(?:, ([\d.]+) GiB)?$', text, re.MULTILINE
    )
}
"""Parameters, and GiB of training state where it is stated, in the line of each configuration."""


def test_all_are_there():
    papers = {f"{model}_{size}" for models, sizes in SIZES_OF.items() for model in models for size in sizes}
    rest = {f"{preset}_small" for preset in set(PRESETS) - {"titans"}}
    others = {"quickstart", "gated_deltanet_h2_small", "hope_attention_small", "memory_caching_small"}
    others |= {"mac_small", "mag_small", "mal_small", "mamba_small", "samba_small"}
    others |= {"tnt_small", "tnt_150m", "transformer_small", "retrofit_small"}
    others |= {"log_linear_mamba2_small", "log_linear_gated_deltanet_small"}
    assert set(CONFIGS) == papers | rest | others
    assert (len(papers), len(rest)) == (20 + 30 + 72 + 44 + 4 + 3 + 2 + 1 + 2, 3 + 16 + len(AFTER))
    assert set(CONFIGS) == {*STATED, "quickstart"}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_is_valid_and_as_large_as_its_line_says(name):
    config = CONFIGS[name]
    if config.data.source != "python":
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, path="given by the user"))
    validate(config)
    if name == "quickstart":
        (stated,) = re.findall(r"([\d,]+) parameters", ast.get_docstring(ast.parse(TEXTS[name])))
        stated, gibibytes = int(stated.replace(",", "")), ""
    else:
        stated, gibibytes = STATED[name]
    assert count_params(config.model) == stated
    assert (gibibytes == "") == (config.mesh.topology is None)
    if gibibytes:
        assert gibibytes == f"{16 * stated / 2**30:.1f}"


@pytest.mark.parametrize("size", SIZES)
def test_models_of_a_size_have_as_many_parameters(size):
    """Within 2 % of each other, and the name says how many, but for 1b, which is the paper's 1.3B."""
    counts = [count for name, (count, _) in STATED.items() if name.endswith(f"_{size}")]
    assert len(counts) == sum(len(models) for models, sizes in SIZES_OF.items() if size in sizes)
    assert max(counts) < 1.02 * min(counts)
    named = 1.3e9 if size == "1b" else float(size[:-1]) * 1e6
    assert counts == pytest.approx([named] * len(counts), rel=0.05)


@pytest.mark.parametrize(
    "family", ["titans", "miras", "atlas", "tnt", "hope", "baselines", "mamba", "later", "lact", "memory_caching"]
)
def test_the_table_of_sizes_in_a_docstring_is_true(family):
    """A line of it: size, blocks, width, heads, of which width, tokens, steps, TPU slice, rows at a time on a chip."""
    docstring = ast.get_docstring(ast.parse(TEXTS[family]))
    lines = re.findall(
        r"(\w+) +(\d+) +(\d+) +(\d+) of (\d+) +(\d+)B +([\d,]+) +(v5e-\d+) +(\d)$", docstring, re.MULTILINE
    )
    assert {name.rpartition("_")[2] for name in load_configs(folder() / f"{family}.py")} == {line[0] for line in lines}
    for size, depth, dim, heads, head_dim, tokens, steps, topology, rows in lines:
        for name in (name for name in load_configs(folder() / f"{family}.py") if name.endswith("_" + size)):
            config = CONFIGS[name]
            model, data, training = config.model, config.data, config.training
            shape = (model.depth, model.dim, model.num_heads, model.head_dim)
            assert shape == (int(depth), int(dim), int(heads), int(head_dim))
            assert training.steps == int(steps.replace(",", ""))
            assert training.steps * data.batch_size * data.sequence_length == pytest.approx(
                float(tokens) * 1e9, rel=1e-4
            )
            assert find_topology(topology) == find_topology(config.mesh.topology)
            chips = find_topology(topology).chips
            assert data.batch_size / training.gradient_accumulation / chips == int(rows)


def test_names_and_files_of_configurations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mac_340m").write_text("raise AssertionError('a name is no file')")
    for asked in ("mac_340m", f"{folder()}/titans.py:mac_340m"):
        assert find_config(asked) == ("mac_340m", CONFIGS["mac_340m"])
    (tmp_path / "own.py").write_text("from titans_jax.config import Config\ndef config():\n    return Config()\n")
    (tmp_path / "several.py").write_text(
        "from titans_jax.config import Config\nconfigs = {'a': Config(), 'b': lambda: Config()}\n"
    )
    assert find_config("own.py") == find_config(str(tmp_path / "own.py")) == ("own", Config())
    assert find_config("several.py:b") == ("b", Config())


@pytest.mark.parametrize(
    "asked, sentence",
    [
        ("mac_340", "there is no configuration mac_340; did you mean mac_340m?"),
        ("zzz", "there is no configuration zzz; use a Python file, or one of those that `titans configs` lists"),
        ("quickstart.json", "there is no configuration quickstart.json; did you mean quickstart?"),
        (
            "nowhere/quickstart.py",
            "there is no file nowhere/quickstart.py; quickstart comes with the package: leave out the rest",
        ),
        ("nowhere.py", "there is no file nowhere.py; give the path of a Python file that is there"),
        ("nowhere.py:small", "there is no file nowhere.py; give the path of a Python file that is there"),
        (
            "runs/quickstart",
            "runs/quickstart is not the name of a configuration, nor a Python file, whose name ends in .py",
        ),
        ("several.py", "several.py has several configurations; use several.py:a or several.py:b"),
        ("several.py:c", "several.py has no configuration c; use several.py:a or several.py:b"),
        ("none.py", "none.py defines no configuration; write config = titans_jax.config.Config(...) in it"),
    ],
)
def test_a_configuration_that_is_not_there(tmp_path, monkeypatch, asked, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none.py").write_text("configs = {}\n")
    (tmp_path / "several.py").write_text(
        "from titans_jax.config import Config\nconfigs = {'a': Config(), 'b': Config()}\n"
    )
    with pytest.raises(ConfigError) as error:
        find_config(asked)
    assert str(error.value) == sentence


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
    """Titans (NeurIPS text), Table 5 and the experimental settings."""
    config = CONFIGS[f"mac_{size}"]
    model, data = config.model, config.data
    assert (model.depth, model.dim, model.num_heads) == (depth, dim, num_heads)
    assert (model.segment, model.window, model.num_persistent, model.vocab_size) == (512, 2048, 128, 32000)
    assert (model.memory.chunk_size, model.memory.depth, model.memory.expansion) == (16, 2, 4)
    assert config.optimizer.learning_rate == learning_rate
    assert (config.optimizer.weight_decay, config.optimizer.clip_norm) == (0.1, 1.0)
    batch = data.sequence_length * data.batch_size
    assert data.sequence_length == 4096 and batch == 2**19
    assert config.training.steps * batch == pytest.approx(tokens, rel=1e-4)


def test_tokens_enter_the_papers_models_scaled():
    """By sqrt(width): without it deep LMMs have bursts of large gradients at the papers' learning rates."""
    for name, config in CONFIGS.items():
        if config.model.dim >= 768:
            assert config.model.embedding_scale == config.model.dim**0.5, name


@pytest.mark.parametrize(
    "hybrid, preset",
    [
        ("moneta_h", "moneta"),
        ("yaad_h", "yaad"),
        ("memora_h", "memora"),
        ("gated_deltanet_h2", "gated_deltanet"),
    ],
)
@pytest.mark.parametrize("size", sorted({*SIZES_OF[MIRAS]} & {*SIZES_OF[*BASELINES, "mamba"]}))
def test_hybrids_are_the_same_memory_and_a_window(hybrid, preset, size):
    """Miras, section 5.3: the pattern of Samba, a Miras layer and then sliding-window attention."""
    plain, hybrid = (CONFIGS[f"{model}_{size}"].model for model in (preset, hybrid))
    assert hybrid.memory == plain.memory and hybrid.memory.preset == preset
    assert (plain.pattern, hybrid.pattern) == (("lmm",), ("lmm", "window"))
    assert (plain.memory.depth, plain.memory.expansion, plain.memory.momentum) == (2, 4, None)


@pytest.mark.parametrize("size", SIZES_OF[*BASELINES, "mamba"])
def test_mamba_and_samba_are_their_papers_models(size):
    """Mamba has about twice as many blocks as a model with feed-forward layers, at its width and with its training."""
    mamba, samba, other = (CONFIGS[f"{name}_{size}"] for name in ("mamba", "samba", "gated_deltanet"))
    assert (mamba.model.pattern, samba.model.pattern) == (("mamba",), ("samba", "window"))
    assert mamba.model.dim == samba.model.dim == other.model.dim
    assert samba.model.depth == other.model.depth and 1.9 < mamba.model.depth / other.model.depth < 2.7
    assert mamba.data == samba.data == other.data and mamba.optimizer == samba.optimizer == other.optimizer
    assert mamba.training == samba.training == other.training
