"""Metrics files, the picture, warnings about memories, and signals."""

import dataclasses
import io
import json
import math
import os
import re
import signal

import jax
import numpy as np
import pytest
from rich.console import Console

from titans_jax.config import Config, ConfigError, MemoryConfig, ModelConfig, OptimizerConfig
from titans_jax.training import device_memory
from titans_jax.training.diagnostics import harmful, ignored, plot_memory, warnings
from titans_jax.training.metrics import MetricsWriter, plot_losses, read_metrics
from titans_jax.training.optimizer import make_optimizer
from titans_jax.training.report import say
from titans_jax.training.run import count_params, init_model
from titans_jax.training.step import first_state
from titans_jax.training.stop import StopRequest

MODEL = ModelConfig(memory=MemoryConfig(max_step_size=0.64, step_unit="head_dim"))
HEALTHY = {
    "retention": np.array([0.98, 0.5]),
    "momentum": np.array([0.5, 0.9]),
    "step_size": np.array([0.005, 0.002]),
    "inner_loss": np.array([0.3, 0.1]),
    "explained_share": np.array([0.4, -0.5]),
    "update_norm": np.array([2.0, 5.0]),
    "weight_norm": np.array([16.0, 20.0]),
}


def test_lines_carry_the_time_of_day():
    say(console := Console(file=io.StringIO(), width=20), "a line that is [longer] than the console")
    assert re.fullmatch(r"\d\d:\d\d:\d\d a line that is \[longer] than the console\n", console.file.getvalue())


def test_lines_that_are_none_of_ours_are_left_out(tmp_path):
    """Another program's, one that is cut off, and bytes that are no text; what follows them is read."""
    lines = [
        b'{"kind": "train", "step": 1}',
        b"\xff",
        b"[3]",
        b'{"kind": "train"}',
        b'{"step": 1}',
        b'{"kind": "tr',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines, b'{"kind": "train", "step": 2}']))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    "said, asked",
    [
        ("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.", "17.18 GB"),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.", "17.18 GB"),
        ("RESOURCE_EXHAUSTED: Attempting to allocate 1.50GiB.", "1.50GiB"),
        ("RESOURCE_EXHAUSTED: no words", "more"),
    ],
)
def test_out_of_memory(monkeypatch, said, asked):
    for limit, there in ((None, "than there is"), (16_000_000_000, "of 16.00 GB")):
        monkeypatch.setattr(device_memory, "bytes_limit", lambda limit=limit: limit)
        sentence = str(device_memory.out_of_memory(RuntimeError(said)))
        assert sentence.startswith(f"a device ran out of memory: it was asked for {asked} {there}; raise training.grad")


def test_a_model_that_is_larger_than_a_device_is_refused(monkeypatch):
    model = ModelConfig(pattern=("attention",), dim=64, depth=1, num_heads=1)
    asked = 12 * count_params(model)
    for limit in (None, asked):
        monkeypatch.setattr(device_memory, "bytes_limit", lambda limit=limit: limit)
        device_memory.check_state_fits(Config(model=model), None)
    monkeypatch.setattr(device_memory, "bytes_limit", lambda: asked // 3)
    with pytest.raises(ConfigError, match=r"model.dim 64 x model.depth 1 asks for .* GB of .*; use .* mesh.fsdp 3 or"):
        device_memory.check_state_fits(Config(model=model), None)


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerConfig(),
        OptimizerConfig(ema=0.99),
        OptimizerConfig(name="muon"),
        OptimizerConfig(train_only=("feed_forward",)),
    ],
)
def test_only_moments_that_are_kept_count(monkeypatch, optimizer):
    """Muon keeps one moment of a matrix, and what is not trained has none: such a run fits where AdamW's does not."""
    config = Config(model=ModelConfig(pattern=("attention",), dim=64, depth=1, num_heads=1), optimizer=optimizer)
    graphdef, params = init_model(config.model, 0)
    state = first_state(config, make_optimizer(optimizer, config.training.steps), params, None)
    held = sum(x.nbytes for x in jax.tree.leaves(state) if x.ndim)
    monkeypatch.setattr(device_memory, "bytes_limit", lambda: held)
    device_memory.check_state_fits(config, None)
    monkeypatch.setattr(device_memory, "bytes_limit", lambda: held - 1)
    with pytest.raises(ConfigError, match="parameters and optimizer state on each device"):
        device_memory.check_state_fits(config, None)


def test_healthy_memories_give_no_warning():
    assert warnings(HEALTHY, MODEL) == []
    assert warnings({}, MODEL) == []


@pytest.mark.parametrize(
    "name, value, sentence",
    [
        ("retention", 0.05, "memory layer 1 is dead: it keeps 0.05 of itself per token"),
        ("step_size", 5e-6, "memory layer 1 is dead: its mean step size is 5e-06"),
        ("step_size", 0.00995, "memory layer 1 is saturated: its mean step size is 0.00995, at its bound"),
        ("momentum", 0.9995, "memory layer 1 is saturated: its mean momentum is 0.9995"),
        ("inner_loss", np.nan, "memory layer 1 is broken: its inner loss is nan"),
        ("weight_norm", np.inf, "memory layer 1 is broken: its weight norm is inf"),
        ("explained_share", 0.002, "memory layer 1 is inert: its writes explain 0.002 of the values"),
        ("update_norm", 1e-3, "memory layer 1 is inert: its writes move its weights by 5e-05 of their norm"),
        ("explained_share", -50000.0, "memory layer 1 is exploding: its inner loss is 5e+04 times that of the best"),
        ("weight_norm", 5000.0, "memory layer 1 is exploding: its weights are 280 times as large as random ones"),
    ],
)
def test_sick_memories_are_named(name, value, sentence):
    (warning,) = warnings(HEALTHY | {name: np.array([HEALTHY[name][0], value])}, MODEL)
    assert sentence in warning


@pytest.mark.parametrize("before, exploding", [(-90.0, False), (-40.0, True), (0.5, True)])
def test_a_loss_above_that_of_a_constant_is_an_explosion_if_it_grows(before, exploding):
    """A young memory's reads are too large: that alone is no explosion."""
    now = HEALTHY | {"explained_share": np.array([0.4, -100.0])}
    assert warnings(now, MODEL) == []
    found = warnings(now, MODEL, HEALTHY | {"explained_share": np.array([0.4, before])})
    assert [("is exploding: its inner loss is 101 times" in sentence) for sentence in found] == [True] * exploding


def test_growth_of_a_memory_that_starts_from_zero_is_no_warning():
    """It sums what it reads, and has no size to start from."""
    linear = dataclasses.replace(MODEL, memory=MemoryConfig(preset="deltanet"))
    assert warnings(HEALTHY | {"weight_norm": np.array([16.0, 5000.0])}, linear) == []


@pytest.mark.parametrize(
    "shares, gain, is_ignored",
    [
        ([0.4, 0.0], 0.0003, True),
        ([0.4, 0.0], -0.0003, True),
        ([0.4, 0.0], 0.02, False),
        ([0.05, 0.0], 0.0003, False),
        ([0.4, 0.0], -0.02, False),
        ([0.4, 0.0], np.nan, False),
        (None, 0.0003, False),
    ],
)
def test_memories_are_ignored_that_know_much_and_gain_nothing(shares, gain, is_ignored):
    found = ignored(None if shares is None else np.array(shares), gain)
    assert len(found) == is_ignored
    assert all("the memories are ignored: they explain up to 40% of their values" in sentence for sentence in found)


def test_memories_whose_writing_makes_the_model_worse_do_harm():
    assert not harmful(-0.0003) and not harmful(0.02) and not harmful(np.nan)
    (sentence,) = harmful(-0.011)
    assert sentence == "the memories do harm: the validation loss is 0.01100 bits per byte lower without their writes"


def test_a_memory_without_momentum_has_no_warning_about_it():
    without = {name: value for name, value in HEALTHY.items() if name != "momentum"}
    assert warnings(without, dataclasses.replace(MODEL, memory=dataclasses.replace(MODEL.memory, momentum=False))) == []


def test_metrics_survive_a_cut_line_and_drop_what_is_repeated(tmp_path):
    with MetricsWriter(tmp_path, after=0) as writer:
        for step in range(1, 6):
            writer.write("train", step, {"bits_per_byte": 8.0 / step})
        writer.write("memory", 5, {"retention": [0.9, 0.8]})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 5]
    with MetricsWriter(tmp_path, after=3) as writer:
        writer.write("train", 4, {"bits_per_byte": 1.0})
    lines = list(read_metrics(tmp_path))
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and lines[-1]["bits_per_byte"] == 1.0


def test_a_number_that_is_not_finite_is_null_in_the_file_and_nan_to_its_readers(tmp_path):
    with MetricsWriter(tmp_path, after=0) as writer:
        writer.write("memory", 1, {"retention": [0.9, math.nan], "moved": math.inf})
    with MetricsWriter(tmp_path, after=1):
        pass
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line == {"kind": "memory", "step": 1, "retention": [0.9, None], "moved": None}
    (found,) = read_metrics(tmp_path)
    assert found["retention"][0] == 0.9 and math.isnan(found["retention"][1]) and math.isnan(found["moved"])


def test_picture_of_a_run_with_one_line(tmp_path):
    with MetricsWriter(tmp_path, after=0) as writer:
        writer.write("train", 1, {"bits_per_byte": 8.0})
    plot_losses(tmp_path)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("layers", [1, 3, 20])
def test_picture_of_memories(tmp_path, layers):
    """With and without momentum and gain, of a run with one report and with several."""
    with MetricsWriter(tmp_path, after=0) as writer:
        for step in range(1, 1 + layers):
            report = {name: value.tolist() * layers for name, value in HEALTHY.items()}
            writer.write("memory", step, report if layers > 1 else {"retention": [0.9], "step_size": [0.1]})
            if layers > 1:
                writer.write("validation", step, {"bits_per_byte": 2.0, "memory_gain": 0.1 * step})
    plot_memory(tmp_path, MODEL)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_asks_second_one_kills(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), number)
        assert stop.requested()
        assert signal.getsignal(number) == signal.SIG_DFL  # the next one ends the process
    assert signal.getsignal(number) == before
