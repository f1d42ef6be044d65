"""Two processes train as one does: same losses, one place to stop, and no state that knows how many they were."""

import dataclasses
import io
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.distributed.launch import finish, free_port, in_two, launch
from tests.training.tiny import MODEL, tiny_config
from titans_jax.training import load_run, train
from titans_jax.training.metrics import read_metrics

SMALL = dataclasses.replace(MODEL, depth=1)
CONFIG = """
from tests.distributed.test_two_processes import SMALL
from tests.training.tiny import tiny_config
config = tiny_config(SMALL, evaluate_every=100, diagnostics_every=100, sample_tokens=0)
"""


SAMPLE = ["--training.sample_tokens", "4", "--training.diagnostics_every", "6", "--training.evaluate_every", "6"]


@pytest.fixture(scope="module")
def titans(tmp_path_factory):
    """titans(run_dir, ...) -> the arguments of a training; all of them compile once."""
    folder = tmp_path_factory.mktemp("two_processes")
    (folder / "tiny.py").write_text(CONFIG)
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(folder))
    patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    command = ["-m", "titans_jax.cli", "train", str(folder / "tiny.py"), "--training.run_dir"]
    yield lambda run_dir, *overrides: [*command, str(run_dir), *overrides]
    patch.undo()


@pytest.fixture(scope="module")
def pair(titans, tmp_path_factory):
    """Run folder of two processes that nothing disturbed, and what they printed."""
    run_dir = tmp_path_factory.mktemp("runs") / "pair"
    with launch(*in_two(*titans(run_dir, *SAMPLE))) as processes:
        ended = finish(processes)
    assert [code for code, *_ in ended] == [0, 0], ended
    return run_dir, [output for _, output, _ in ended]


def losses(run_dir: Path) -> dict[tuple[str, int], float]:
    return {(line["kind"], line["step"]): line["loss"] for line in read_metrics(run_dir)}


def assert_close(ours: Path, theirs: Path, rtol: float) -> None:
    ours, theirs = losses(ours), losses(theirs)
    assert [step for step in ours if step[0] == "train"] == [("train", step) for step in range(1, 13)]
    theirs = {step: theirs[step] for step in ours}
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=rtol)


def test_losses_of_one_process(pair, titans, tmp_path):
    two_devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    with launch(titans(tmp_path / "one", *SAMPLE), **two_devices) as processes:
        ((code, _, errors),) = finish(processes)
    assert code == 0, errors
    # Two summands have one sum, so the all-reduce cannot round differently; other fusions might.
    assert_close(pair[0], tmp_path / "one", rtol=1e-6)
    texts = [(folder / "sample.txt").read_text() for folder in (pair[0], tmp_path / "one")]
    assert texts[0] == texts[1]


def test_the_first_process_speaks_and_writes(pair):
    run_dir, (first, second) = pair
    assert "parameters on 2 x cpu" in first and "finished step 12" in first
    assert "step" not in second
    assert len([line for line in read_metrics(run_dir) if line["kind"] == "train"]) == 12
    assert len(list((run_dir / "tensorboard").iterdir())) == 1
    assert not list(run_dir.glob(".seen*"))


def test_sigterm_to_one_saves_and_stops_both(titans, tmp_path):
    endless = ["--training.steps", "100000", "--training.checkpoint_every", "100000", "--training.log_every", "1"]
    with launch(*in_two(*titans(tmp_path / "run", *endless))) as processes:
        for line in processes[0].stdout:
            if line.startswith("step 3/"):
                processes[1].send_signal(signal.SIGTERM)
                break
        ended = finish(processes)
    assert [code for code, *_ in ended] == [0, 0], ended
    (step,) = (int(folder.name) for folder in (tmp_path / "run" / "checkpoints").iterdir())
    assert f"stopped and saved at step {step};" in ended[0][1]
    assert load_run(tmp_path / "run").step == step >= 3


KILLED = """
import os, signal, time
from titans_jax import cli
from titans_jax.training.loop import Trainer

due = Trainer._due

def killing(self, every):
    if self.step == 6:
        while not (self.run_dir / "checkpoints" / "4").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return due(self, every)

Trainer._due = killing
cli.run()
"""


def test_killed_and_restarted_gives_the_same_bits(pair, titans, tmp_path):
    first, second = in_two(*titans(tmp_path / "run"))
    with launch(first, ["-c", KILLED, *second[2:]]) as processes:  # without -m titans_jax.cli
        (code, output, errors), (killed, *_) = finish(processes)
    assert (code, killed) == (1, -signal.SIGKILL), (output, errors)
    assert errors.splitlines()[-1].startswith("titans: process 0 of 2 cannot go on (")
    with launch(*in_two(*titans(tmp_path / "run"))) as processes:
        (code, output, errors), _ = finish(processes)
    assert code == 0 and "going on from the checkpoint of step 4" in output, errors
    assert_close(tmp_path / "run", pair[0], rtol=0)
    ours, theirs = (load_run(folder).params for folder in (tmp_path / "run", pair[0]))
    np.testing.assert_array_equal(ours["embedding"]["embedding"], theirs["embedding"]["embedding"])


def keep_first_checkpoint(run_dir: Path, copy: Path) -> None:
    """A copy of a finished run as it was at its first checkpoint, of step 4."""
    shutil.copytree(run_dir, copy)
    for step in ("8", "12"):
        shutil.rmtree(copy / "checkpoints" / step)


def test_the_number_of_processes_may_change(pair, titans, tmp_path):
    """Two -> one, and back to two whose devices are shards of a tensor, so that both read all rows."""
    config = tiny_config(SMALL, evaluate_every=100, diagnostics_every=100, sample_tokens=0)
    keep_first_checkpoint(pair[0], tmp_path / "one")
    console = Console(file=io.StringIO(), width=200)
    train(config, tmp_path / "one", console)
    assert "going on from the checkpoint of step 4" in console.file.getvalue()
    # Other batches would differ by tenths; sums over rows in another order, magnified by Adam's first steps, do not.
    assert_close(tmp_path / "one", pair[0], rtol=1e-4)

    keep_first_checkpoint(tmp_path / "one", tmp_path / "two")
    sharded = titans(tmp_path / "two", "--mesh.data", "1", "--mesh.tensor", "2")
    with launch(*in_two(*sharded)) as processes:
        (code, output, errors), _ = finish(processes)
    assert code == 0 and "going on from the checkpoint of step 4" in output, errors
    assert_close(tmp_path / "two", pair[0], rtol=1e-4)


AGREE = """
import pathlib, sys
import jax
from titans_jax.config import ConfigError, ProcessesConfig
from titans_jax.sharding import processes

address, index, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
processes.start(ProcessesConfig(address, 2, index))
print(processes.first_says(index == 0))
processes.make_shared_folder(folder / "shared")
try:
    processes.make_shared_folder(folder / str(index))
except (ConfigError, processes.ProcessesError) as error:
    print(error)
try:
    with processes.together():
        assert index == 0, "only here"
except (AssertionError, processes.ProcessesError) as error:
    print(error)
"""


def test_what_fails_in_one_process_ends_both(tmp_path):
    address = f"localhost:{free_port()}"
    with launch(*(["-c", AGREE, address, str(index), str(tmp_path)] for index in range(2))) as processes:
        (first_code, first, errors), (second_code, second, _) = finish(processes)
    assert (first_code, second_code) == (0, 0), errors
    lines = [[line for line in text.splitlines() if line and "[Gloo]" not in line] for text in (first, second)]
    assert lines[0] == ["True"] + ["process 1 of 2 cannot go on; what it printed says why"] * 2
    assert lines[1][0] == "True" and lines[1][2] == "only here"
    assert lines[1][1].startswith(f"training.run_dir {tmp_path / '1'} is not the same folder for process 1 as for")
