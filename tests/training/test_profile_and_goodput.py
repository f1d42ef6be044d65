"""Which steps a trace holds, and what of a run's time counts as training."""

import dataclasses
import io
import json
import logging
import re
import time
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console

from tests.training.tiny import tiny_config
from titans_jax import sharding
from titans_jax.config import ConfigError, ProfileConfig
from titans_jax.training import checksums, goodput, loop, train
from titans_jax.training.loop import Trainer
from titans_jax.training.metrics import read_metrics


def traced_events(run_dir) -> list[tuple[str, dict]]:
    """The name and the values of every event."""
    (file,) = (run_dir / "profile").rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    return [(event.name, dict(event.stats)) for plane in planes for line in plane.lines for event in line.events]


# Python 3.13 warns of how jaxlib 0.12 makes this type, inside it; as an error the warning would end the process.
@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("steps, traced", [("5:7", [5, 6]), ("12:20", [12])])
def test_a_trace_holds_its_steps(tmp_path, steps, traced):
    """Tracing ends with the run where the run ends first. Recording Python calls, "$file.py:12 name", may crash it."""
    config = dataclasses.replace(tiny_config(sample_tokens=0), profile=ProfileConfig(steps))
    train(config, tmp_path / "run", Console(file=io.StringIO()))
    events = traced_events(tmp_path / "run")
    assert sorted(stats["step_num"] for name, stats in events if name == "train") == traced
    assert not [name for name, _ in events if name.startswith("$")]


@pytest.fixture
def clock(monkeypatch):
    """What the goodput takes for the time; stands still unless moved."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(goodput, "time", SimpleNamespace(time=lambda: clock.now))
    return clock


def test_goodput_counts_steps_and_all_of_the_time(clock):
    first = goodput.Goodput()
    clock.now += 60
    first.add(30)
    assert first.share() == 0.5
    state = first.get_state()
    clock.now += 60
    first.add(60)  # behind the checkpoint, and lost in a crash
    clock.now += 60
    second = goodput.Goodput()
    second.set_state(state)
    clock.now += 20
    second.add(20)
    assert second.share() == pytest.approx(50 / 200)


@pytest.mark.slow
def test_goodput_of_a_run_goes_on(tmp_path, monkeypatch, clock):
    seconds, add = [], goodput.Goodput.add
    monkeypatch.setattr(goodput.Goodput, "add", lambda self, one: seconds.append(one) or add(self, one))
    config, console = tiny_config(sample_tokens=0), Console(file=io.StringIO())
    started = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_stopping", lambda self: self.step == 6)
        train(config, tmp_path / "run", console)
    clock.now += 3600
    train(config, tmp_path / "run", console)
    last = list(read_metrics(tmp_path / "run"))[-2]  # behind it comes the validation
    assert last["kind"] == "train" and last["goodput"] == pytest.approx(sum(seconds) / 3600)
    assert len(seconds) == 12 and min(seconds) > 0 and sum(seconds) < time.monotonic() - started
    assert "goodput: 0% of the time since the first start went into steps" in console.file.getvalue()


def test_memory_at_the_start_is_told_where_it_is_known(tmp_path, monkeypatch):
    device = SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 1.5e9, "bytes_limit": 16e9})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    console = Console(file=io.StringIO(), width=200)
    train(tiny_config(sample_tokens=0), tmp_path / "run", console)
    assert "memory of a device before the first step: 1.50 of 16.00 GB in use" in console.file.getvalue()


def test_what_a_step_takes_is_told_and_compiled_once(tmp_path, caplog):
    console = Console(file=io.StringIO(), width=200)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        train(tiny_config(sample_tokens=0), tmp_path / "run", console)
    compiled = [m for m in caplog.messages if "Finished XLA compilation of jit(_train_step)" in m]
    assert len(compiled) == 1
    said = re.search(
        r"a step takes ([\d.]+) MB of a device: ([\d.]+) of parameters.*, ([\d.]+) of", console.file.getvalue()
    )
    whole, held, temporary = map(float, said.groups())
    assert whole == pytest.approx(held + temporary, abs=0.11) and whole > 0


def test_a_batch_that_the_mesh_does_not_divide(monkeypatch):
    shape = {"slice": 1, "data": 4, "fsdp": 2, "tensor": 1}
    monkeypatch.setattr(sharding, "make_mesh", lambda *axes: SimpleNamespace(shape=shape))
    with pytest.raises(ConfigError, match="data.batch_size is 4.* shared by 8 devices .*; use .*a multiple of 8"):
        with loop.use_mesh(tiny_config()):
            pass


@pytest.mark.parametrize(
    "rows, accumulation, fsdp, works",
    [
        (128, 8, 64, "use training.gradient_accumulation 2"),
        (128, 8, 256, "use mesh.tensor 2 and training.gradient_accumulation 1, or a multiple of 2048, such as 2048"),
        (96, 2, 64, "use a multiple of 128, such as 128"),
    ],
)
def test_what_leaves_the_batch_as_it_is_is_named_first(monkeypatch, rows, accumulation, fsdp, works):
    shape = {"slice": 1, "data": 1, "fsdp": fsdp, "tensor": 1}
    monkeypatch.setattr(sharding, "make_mesh", lambda *axes: SimpleNamespace(shape=shape))
    config = tiny_config(gradient_accumulation=accumulation)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, batch_size=rows),
        model=dataclasses.replace(config.model, dim=256, num_heads=4, head_dim=64),
    )
    with pytest.raises(ConfigError, match=f"{works}$"), loop.use_mesh(config):
        pass


@pytest.mark.slow
def test_a_checkpoint_without_goodput_resumes(tmp_path):
    """As they were before it was kept, without checksums too."""
    config, console = tiny_config(sample_tokens=0), Console(file=io.StringIO())
    train(config, tmp_path, console)
    files = [file for file in (tmp_path / "checkpoints").glob("*/run/*") if "goodput" in file.read_text()]
    for file in files:
        run = json.loads(file.read_text())
        del run["goodput"]
        file.write_text(json.dumps(run))
        (file.parent.parent / checksums.NAME).unlink()
    assert files
    more = dataclasses.replace(config, training=dataclasses.replace(config.training, steps=config.training.steps + 1))
    train(more, tmp_path, console)
    assert list(read_metrics(tmp_path))[-1]["step"] == more.training.steps
