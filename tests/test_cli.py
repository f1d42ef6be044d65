"""The command line: typed overrides, one sentence for a mistake, and the way from training to text."""

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import titans_jax
from titans_jax import cli, commands
from titans_jax.config import Config, ConfigError, MemoryConfig, ModelConfig, leaves
from titans_jax.config.command_line import parse
from titans_jax.inference.command import GenerateOptions
from titans_jax.memory.rule.presets import PRESETS
from titans_jax.models.block import BLOCKS

SMALL = """
from tests.training.tiny import tiny_config
def config():
    return tiny_config(steps=3, sample_tokens=0)
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "small.py"
    path.write_text(SMALL)
    return path


def test_overrides_are_typed(file):
    arguments = "--model.dim 64 --model.head-dim=32 --model.pattern mac attention --model.tie_embeddings"
    arguments += " --optimizer.learning_rate 1e-4 --model.hidden_dim None --training.run_dir 7 --model.memory.depth 3"
    name, config = commands.configuration("titans train", [str(file), *arguments.split()])
    assert name == "small"
    assert (config.model.dim, config.model.head_dim, config.model.pattern) == (64, 32, ("mac", "attention"))
    assert config.model.tie_embeddings is True and config.model.hidden_dim is None
    assert config.optimizer.learning_rate == 1e-4
    assert config.training.run_dir == "7" and config.training.steps == 3
    assert config.model.memory.depth == 3 and config.model.memory.expansion == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--model.dimm 3", "there is no field model.dimm; did you mean model.dim?"),
        ("--dim 3", "there is no field dim; did you mean model.dim?"),
        ("--head_dim 3", "there is no field head_dim; did you mean model.head_dim?"),
        ("--steps 3", "; did you mean model.memory.steps or training.steps or profile.steps?"),
        ("--model.dim many", "model.dim is 'many'; use a whole number"),
        ("--model.dim", "model.dim has no value; use a whole number"),
        ("--model.dim 1.5", "model.dim is '1.5'; use a whole number"),
        ("--model.dtype half", "model.dtype is 'half'; use bfloat16, float32 or float64"),
        ("--model.pattern mac mok", "model.pattern is ('mac', 'mok'); use one or more of lmm, mac"),
        ("--model.pattern", "model.pattern is empty; name at least one block"),
        ("--data.source csv", "data.source='csv' is unknown: use 'python', 'text', 'jsonl', 'tfds', "),
        ("--data.source text --data.path None", "data.path is missing: data.source='text' reads the file or folder"),
        ("--data.packing tight", "data.packing is 'tight'; use documents or stream"),
        ("--training.steps 2 --model.dim=32 --data.batch_size 2 3", "data.batch_size is '2 3'; use a whole number"),
        ("--model.memory.preset unknown", "model.memory.preset is 'unknown'; use retnet, "),
        (
            "--model.memory.forget_bias nan",
            "model.memory.forget_bias is nan; use a finite number, two of them, or None",
        ),
        (
            "--model.pattern lmm --model.memory.preset mesa --model.memory.form fused",
            "model.memory.form is 'fused', and no kernel runs mesa",
        ),
        ("--model.tie_embeddings maybe", "model.tie_embeddings is 'maybe'; use True or False"),
        ("--model.memory.momentum maybe", "model.memory.momentum is 'maybe'; use True or False or None"),
        ("--model.dim 40", "model.head_dim 16 x model.num_heads 2 is 32, not model.dim 40; use model.head_dim 20"),
        ("--model.pattern mac --model.segment 20", "model.segment is 20; use a multiple of model.memory.chunk_size 8"),
        ("--data.path /nowhere", "'/nowhere' does not exist"),
        ("--data.tokenizer /nowhere", "data.tokenizer='/nowhere' is no"),
        ("--model.vocab_size 100", "model.vocab_size is 100, but the tokenizer byte has 257 tokens; use"),
        ("512", "512 has no field in front; write --field 512"),
    ],
)
def test_a_mistake_ends_in_one_sentence_before_anything_is_written(file, capsys, tmp_path, arguments, message):
    code = cli.main(["train", str(file), *arguments.split(), "--training.run_dir", str(tmp_path / "run")])
    output = capsys.readouterr()
    assert code == 2
    assert output.err.startswith("titans: ") and message in output.err and output.err.count("\n") == 1
    assert output.out == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["fly"], 2, "there is no command fly; use train, generate, read, evaluate"),
        (
            ["train", "nothing"],
            2,
            "there is no configuration nothing; use a Python file, or one of those that `titans configs` lists",
        ),
        (["generate", "/nowhere", "--prompt", "x"], 2, "/nowhere is not a run folder: it does not exist; give"),
        (["generate", "/nowhere", "--top_p", "2"], 2, "top_p is 2.0; use a number in (0, 1]"),
        (["generate", "/nowhere", "--temperature", "inf"], 2, "temperature is inf; use 0 for the most likely token"),
        (["generate", "/nowhere", "--max_tokens", "-1"], 2, "max_tokens is -1; use 0 to 4294967295"),
        (["generate", "/nowhere", "--seed", "-1"], 2, "seed is -1; use 0 to 4294967295"),
        (["generate", "/nowhere", "--seed", "1", "--seed=2"], 2, "seed is given 2 times; give it once"),
        (["generate", "/nowhere", "--prompt", "-x"], 2, "/nowhere is not a run folder: it does not exist; give"),
        (["evaluate", "/nowhere", "--batches", "-2"], 2, "batches is -2; use 1 to 4294967295"),
        (["bench", "memory", "--time", "-5"], 2, "time is -5; use 1 to 4294967295"),
        (["generate", "/nowhere", "--temperatur", "2"], 2, "there is no field temperatur; did you mean temperature?"),
        (["generate"], 2, "titans generate needs RUN; see titans generate --help"),
        (["generate", "/nowhere", "else"], 2, "else has no field in front; write --field else"),
        (["evaluate", "/nowhere"], 2, "/nowhere is not a run folder: it does not exist; give"),
        (["evaluate", "--batches", "2"], 2, "titans evaluate needs RUN; see titans evaluate --help"),
        (["evaluate", "/nowhere", "perplexity", "--batches", "few"], 2, "batches is 'few'; use a whole number or None"),
        (
            ["bench", "speed"],
            2,
            "there is no benchmark 'speed'; use titans bench memory, train, gradients, hierarchy, peer or schedule",
        ),
        (["study", "lenth"], 2, "NAME is 'lenth'; use ablation, "),
        (["study", "lenth"], 2, "; did you mean length"),
        (["models", "all"], 2, "titans models takes no arguments, not all"),
        (["study", "nofile.py"], 2, "NAME is nofile.py, and nofile.py is no file; use a file that registers a study"),
        (["generate", "/nowhere", "--stop", ""], 2, "stop has ''; use texts of at least one letter"),
        (["data", "fetch"], 2, "names is empty; name at least one"),
        (["read", "/nowhere"], 2, "texts is empty; name at least one"),
        (["bench", "train", "--contexts"], 2, "contexts is empty; name at least one"),
        (["compile", "quickstart", "--compare", "none", "--lengths", "0"], 2, "lengths is 0; use 1 to 4294967295"),
        (["compile", "quickstart", "--slices", "0"], 2, "slices is 0; use 1 to 4294967295"),
    ],
)
def test_other_mistakes(capsys, arguments, code, message):
    assert cli.main(arguments) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "source, message",
    [
        ("import nowhere", "fails with ModuleNotFoundError: No module named 'nowhere'"),
        ("x = (", "fails with SyntaxError"),
        ("x = 1", "defines no configuration; write config = "),
        ("config = 1", "defines no configuration; write config = "),
        ("raise SystemExit(0)", "fails with SystemExit: 0"),
        ("def config():\n    raise SystemExit", "fails with SystemExit"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path, capsys, source, message):
    (tmp_path / "wrong.py").write_text(source)
    assert cli.main(["train", str(tmp_path / "wrong.py")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "raised, code, message",
    [
        (KeyboardInterrupt(), 130, "titans: interrupted"),
        (MemoryError(), 1, "titans: this machine has not enough memory (none left)"),
        (
            RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore"),
            1,
            "has not enough memory (RESOURCE_EXHAUSTED: Out of",
        ),
    ],
)
def test_what_ends_a_command_from_outside_is_a_sentence(capsys, monkeypatch, raised, code, message):
    def ends(arguments):
        raise raised

    monkeypatch.setitem(commands.COMMANDS, "models", ends)
    assert cli.main(["models"]) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_version_is_told(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"titans_jax {titans_jax.__version__}\n"


@pytest.mark.parametrize("words", [["--prompt", "-x"], ["--prompt=-x"], ["--prompt", "-x", "--seed", "0"]])
def test_a_text_may_begin_with_a_hyphen(words):
    assert parse("x", GenerateOptions, ["run", *words]).prompt == "-x"


def test_a_text_that_is_left_out_is_not_the_next_field():
    with pytest.raises(ConfigError, match="prompt has no value; use text"):
        parse("x", GenerateOptions, ["run", "--prompt", "--seed", "1"])


def test_help_is_at_hand_and_light(capsys):
    assert cli.main(["--help"]) == 0 and cli.main([]) == 0
    assert "titans train" not in capsys.readouterr().err
    code = "import sys; from titans_jax import cli; cli.main(['--help']); print({'jax', 'tyro'} & {*sys.modules})"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.endswith("set()\n")


@pytest.mark.skipif(os.name != "posix", reason="pipes end otherwise")
def test_a_reader_that_has_enough_is_no_mistake():
    """`titans configs | head -1`: nothing is said when the other end of the pipe closes."""
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from titans_jax import cli; sys.argv[1:] = ['--help']; cli.run()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert process.communicate()[1] == b"" and process.returncode == 141


def printed(capsys, *arguments: str) -> str:
    """What a command that ends well prints."""
    try:
        assert cli.main([*arguments]) == 0
    except SystemExit as stop:
        assert stop.code == 0
    return capsys.readouterr().out


def test_help_of_a_configuration(file, capsys, monkeypatch):
    """In short every field, with the values of the file and of the command line; what a section's fields mean."""
    monkeypatch.setenv("COLUMNS", "80")
    short = printed(capsys, "train", str(file), "--model.dim", "64", "--help")
    assert all(f"--{name} " in short for name in leaves(Config()))
    assert len(short.splitlines()) < 100 and max(map(len, short.splitlines()[5:])) <= 80
    assert "--model.dim 64" in short and "--data.batch_size 4" in short and "\nmodel.memory\n" in short
    section = printed(capsys, "train", str(file), "--help", "model.memory")
    assert (
        "--model.memory.depth 2   (a whole number)\n    Fast matrices of an MLP" in section and "--data." not in section
    )
    assert printed(capsys, "train", str(file), "--help", "data.seed").startswith("--data.seed 0   (a whole number)\n")
    every = printed(capsys, "train", str(file), "--help", "all")
    assert all(f"--{name} " in every for name in leaves(Config()))
    assert "--topology None" in printed(capsys, "compile", "quickstart", "--help")
    assert cli.main(["train", str(file), "--help", "modle"]) == 2
    assert "there is no section or field modle; did you mean model?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["models", "configs", "bench", "study", "train", "data", "compile"])
def test_help_of_a_command(capsys, command):
    assert printed(capsys, command, "--help").startswith(f"usage: titans {command}")


def test_train_evaluate_generate(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", str(file)]) == 0
    assert "finished step 3; the run is in runs/small" in capsys.readouterr().out

    assert cli.main(["evaluate", "runs/small", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"] == 3 and 3 < result["loss"] < 6
    bits = result["loss"] * result["tokens"] / math.log(2)
    assert result["bits_per_byte"] == pytest.approx(bits / result["bytes"])
    assert cli.main(["evaluate", "runs/small", "perplexity", "--batches", "1", "--json", "False"]) == 0
    assert "bits per byte" in capsys.readouterr().out
    assert cli.main(["evaluate", "runs/small", "perplexety"]) == 2
    error = capsys.readouterr().err  # other tests may have registered evaluators
    assert "tasks is 'perplexety'; use " in error and "; did you mean perplexity?" in error

    texts = []
    for seed in ("1", "1", "2"):
        assert cli.main(["generate", "runs/small", "--prompt", "def ", "--max_tokens", "20", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("def ") for text in texts)

    assert cli.main(["data", str(file)]) == 0
    assert "4 documents" in capsys.readouterr().out


def test_models_can_be_read_at_80_columns(capsys, monkeypatch):
    """Every word that a wide terminal shows is there in whole, and every rule."""
    printed = {}
    for width in (80, 400):
        monkeypatch.setenv("COLUMNS", str(width))
        assert cli.main(["models"]) == 0
        printed[width] = capsys.readouterr().out
    assert max(map(len, printed[80].splitlines())) <= 80
    words = {width: Counter(re.findall(r"[^\s│─┼]+", text)) for width, text in printed.items()}
    assert words[80] == words[400]
    assert {*PRESETS, *BLOCKS} <= set(words[80])
    ours = [preset for preset in PRESETS.values() if preset.make.__module__.startswith("titans_jax.")]
    assert words[80]["arXiv"] >= len(ours) > 30  # of each, the paper
    others = "mesa, memora, lact"
    assert f"fused for all but {others}; chunked for {others} Memory" in " ".join(printed[80].split())


def test_bools_are_flags_or_take_a_value():
    for words, expected in (([], True), (["True"], True), (["False"], False)):
        assert parse("x", ModelConfig, ["--tie_embeddings", *words, "--dim", "8"]).tie_embeddings is expected
        assert parse("x", ModelConfig, ["--memory.momentum", *words]).memory.momentum is expected
    assert parse("x", ModelConfig, ["--memory.momentum=None", "--tie-embeddings=False"]) == ModelConfig()


def test_parse_works_for_any_dataclass():
    assert parse("x", Config, [], Config()) == Config()
    wide = parse("x", ModelConfig, ["--dim", "512", "--memory.depth", "1"], ModelConfig())
    assert wide == ModelConfig(dim=512, memory=MemoryConfig(depth=1))
