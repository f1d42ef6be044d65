"""Parts registered from outside the package, one file each: short, trained with, read on from their run folder."""

import dataclasses
import functools
import json
from pathlib import Path

import child
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small

from titans_jax import cli, memory
from titans_jax.config import (
    Config,
    ConfigError,
    MemoryConfig,
    ModelConfig,
    import_extensions,
    import_file,
    memory_rule,
)
from titans_jax.config.files import find_config
from titans_jax.config.validate import validate
from titans_jax.memory.rule.rule import MemoryRule

PARTS = sorted((Path(__file__).parent / "parts").glob("*.py"))
MEMORY_PARTS = [file for file in PARTS if file.stem not in ("block", "evaluator")]
SIZES = """
    --model.dim 16 --model.depth 1 --model.num_heads 2 --model.head_dim 8 --model.hidden_dim 16 --model.dtype float32
    --model.memory.chunk_size 4 --model.memory.gate_rank 4 --model.num_persistent 2 --model.remat none
    --data.source text --data.sequence_length 32 --data.batch_size 2 --data.validation_every 3
    --training.steps 2 --training.evaluation_batches 1 --training.sample_tokens 0
""".split()


def load_config(file):
    return find_config(str(file))[1]


each_part = pytest.mark.parametrize("file", PARTS, ids=lambda file: file.stem)
each_memory_part = pytest.mark.parametrize("file", MEMORY_PARTS, ids=lambda file: file.stem)


def arguments(tmp_path, *further):
    return [*SIZES, "--data.path", str(Path(json.__file__).parent), "--training.run_dir", str(tmp_path), *further]


def test_there_is_a_file_of_each_kind_in_at_most_25_lines():
    assert [file.stem for file in PARTS] == [
        "architecture", "attentional_bias", "block", "evaluator", "preset", "retention_gate"
    ]  # fmt: skip
    assert {file.stem: len(file.read_text().splitlines()) for file in PARTS} == {
        file.stem: lines for file in PARTS if (lines := len(file.read_text().splitlines())) <= 25
    }


@each_part
def test_a_file_is_an_extension_of_its_configuration(file):
    config = load_config(file)
    assert config.extensions == (str(file),)
    import_extensions(config.extensions)  # what a run does that finds the file in its checkpoint
    assert load_config(file) == config


@pytest.mark.slow
@each_part
def test_streaming_equals_training(file):
    """A prompt that ends inside a chunk, then token by token; float64."""
    model = load_config(file).model
    config = small.config(*model.pattern, depth=1)
    config = dataclasses.replace(config, memory=dataclasses.replace(model.memory, chunk_size=4, gate_rank=4))
    with jax.enable_x64(True):
        model, tokens = small.build(config), small.tokens(time=11)
        whole = small.forward(model, tokens)
        state, pieces = small.init_state(model, len(tokens)), []
        for begin, end in ((0, 6), *((t, t + 1) for t in range(6, 11))):
            logits, state = small.extend(model, tokens[:, begin:end], state)
            pieces.append(logits)
        np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, rtol=1e-9, atol=1e-9 * abs(whole).max())


def forms_agree(rule: MemoryRule, sides: tuple[str, ...] = ()) -> np.ndarray:
    """Reads of the recurrent form, which the others have to give, float64."""
    time, head_dim = 13, 8
    draw = np.random.default_rng(0).normal
    matrices = len(rule.shapes(head_dim))
    with jax.enable_x64(True):
        params = memory.init_params(rule, jax.random.key(1), head_dim)
        params = jax.tree.map(lambda x: jnp.asarray(0.3 * draw(size=x.shape) + (x.ndim == 1)), params)
        state = memory.init_state(rule, params)
        queries, keys, values = (jnp.asarray(0.5 * draw(size=(time, head_dim))) for _ in range(3))
        channels = {f"log_{side}_retention": -jnp.abs(jnp.asarray(0.1 * draw(size=keys.shape))) for side in sides}
        gates = memory.Gates(
            log_retention=-jnp.abs(jnp.asarray(0.1 * draw(size=(time, matrices)))),
            log_momentum=jnp.full((time, matrices), -0.5) if rule.algorithm.has_momentum else None,
            step_size=jnp.abs(jnp.asarray(0.3 * draw(size=(time, matrices)))),
            **channels,
        )
        forms = ("recurrent", "associative", "chunked")
        run = lambda *inputs: [memory.memorize(rule, *inputs, form)[0] for form in forms]  # noqa: E731
        recurrent, *others = map(np.asarray, jax.jit(run)(params, state, queries, keys, values, gates))
        for reads in others:
            np.testing.assert_allclose(reads, recurrent, rtol=1e-9, atol=1e-10)
    return recurrent


@functools.cache
def reads_of_delta_net(chunk_size: int) -> np.ndarray:
    return forms_agree(delta_net(chunk_size))


def delta_net(chunk_size: int) -> MemoryRule:
    return dataclasses.replace(memory.presets.deltanet(), chunk_size=chunk_size, learned_start=True)


@pytest.mark.slow
@each_memory_part
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_forms_agree(file, chunk_size):
    config = dataclasses.replace(load_config(file).model.memory, chunk_size=chunk_size)
    sides = ("key",) if file.stem == "preset" else ()
    forms_agree(memory_rule(config), sides)


@dataclasses.dataclass(frozen=True)
class Bent(memory.biases.L2):
    """A subclass with another formula: its cotangent is tanh(read - value)."""

    def __call__(self, read, value, gate=None):
        return jnp.sum(jnp.logaddexp(read - value, value - read), axis=-1)


@dataclasses.dataclass(frozen=True)
class Squashed(memory.architectures.Linear):
    """M(x) = tanh(x W)."""

    def read(self, linear, params, x):
        return jnp.tanh(linear(0, x))


@dataclasses.dataclass(frozen=True)
class Capped(memory.retentions.Decay):
    """Weights of at most 0.2 after every chunk."""

    def close(self, carried, opened, params):
        return tuple(jnp.clip(weights, -0.2, 0.2) for weights in carried)


@dataclasses.dataclass(frozen=True)
class Halved(memory.algorithms.GradientDescent):
    """Half of every gradient."""

    def inner_loss(self, *arguments, **named):
        return 0.5 * super().inner_loss(*arguments, **named)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, 4])
@pytest.mark.parametrize(
    "part", [{"bias": Bent()}, {"architecture": Squashed()}, {"retention": Capped()}, {"algorithm": Halved()}], ids=str
)
def test_no_closed_form_is_taken_for_a_subclass_with_another_formula(part, chunk_size):
    """DeltaNet with one part replaced by a subclass: all forms give the subclass's numbers, not DeltaNet's."""
    reads = forms_agree(dataclasses.replace(delta_net(chunk_size), **part))
    assert np.abs(reads - reads_of_delta_net(chunk_size)).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("file", [file for file in PARTS if file not in MEMORY_PARTS], ids=lambda file: file.stem)
def test_train_and_use_what_was_trained(file, tmp_path, capsys):
    """Within one process, where the file is run once more for each command. Of memories, see the preset below."""
    of_window = ["--model.pattern", "window"] if file.stem == "evaluator" else []  # which compiles faster
    assert cli.main(["train", str(file), *arguments(tmp_path, *of_window)]) == 0
    capsys.readouterr()
    tasks = ["perplexity", "accuracy"] if file.stem == "evaluator" else ["perplexity"]
    assert cli.main(["evaluate", str(tmp_path), *tasks, "--batches", "1", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["step"] == 2 and all(np.isfinite(value) for value in numbers.values())
    if file.stem == "evaluator":
        assert 0 <= numbers["accuracy/accuracy"] <= 1


@pytest.mark.slow
def test_a_run_is_read_from_its_folder_alone(tmp_path):
    """A process that has seen no configuration: what the run's own parts are, its checkpoint says."""
    (file,) = (file for file in PARTS if file.stem == "preset")
    assert cli.main(["train", str(file), *arguments(tmp_path)]) == 0
    program = f"""
from titans_jax import cli
assert cli.main(["generate", {str(tmp_path)!r}, "--prompt", "def ", "--max_tokens", "3"]) == 0
assert cli.main(["evaluate", {str(tmp_path)!r}, "--batches", "1", "--json"]) == 0
"""
    said = child.run(program)
    assert said.startswith("def ") and json.loads(said.splitlines()[-1])["step"] == 2


def test_a_preset_may_be_given_as_an_object():
    preset = memory.Preset("given_as_an_object", memory.presets.retnet, memory.GateChoices("lightning"))
    config = MemoryConfig(preset=preset)
    assert config.preset == "given_as_an_object" and memory_rule(config) == memory.presets.retnet()
    assert MemoryConfig(preset=preset) == config
    with pytest.raises(ConfigError, match="the preset 'given_as_an_object' is there already"):
        MemoryConfig(preset=dataclasses.replace(preset, make=memory.presets.gla, gates=memory.GateChoices()))
    with pytest.raises(ConfigError, match="model.memory.preset is 3; use a registered name"):
        MemoryConfig(preset=3)


def test_an_extension_that_is_gone_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"extensions names .*gone\.py, which is no file; give the file"):
        import_extensions(Config(extensions=(str(tmp_path / "gone.py"),)).extensions)


def test_a_file_is_run_once_as_long_as_it_does_not_change(tmp_path):
    file = tmp_path / "counted.py"
    file.write_text("value = object()")
    first = import_file(file)
    assert import_file(file) is first
    file.write_text("value = 3")
    assert import_file(file).value == 3
    file.write_text("1 / 0")
    with pytest.raises(ConfigError, match="counted.py fails with ZeroDivisionError: division by zero"):
        import_file(file)


def test_an_extension_may_be_named_by_a_configuration_that_registers_nothing(tmp_path):
    file = tmp_path / "doubled_bias.py"
    file.write_text(
        "from titans_jax import memory\n"
        "@memory.register_bias('doubled')\n"
        "class Doubled(memory.biases.L2):\n"
        "    def __call__(self, read, value, gate=None):\n"
        "        return 2 * super().__call__(read, value, gate)\n"
    )
    model = ModelConfig(memory=MemoryConfig(bias="doubled"))
    with pytest.raises(ConfigError, match="model.memory.bias is 'doubled'; use l2, "):
        validate(Config(model=model))
    validate(Config(model=model, extensions=(str(file),)))
    assert memory_rule(model.memory).bias.constant_slope is None
