"""Two processes train as one does: same losses, one place to stop, and no state that knows how many they were."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.distributed.launch import finish, free_port, in_two, launch
from tests.training.tiny import MODEL, assert_every_file_has_a_checksum, tiny_config
from titans_jax.data.prepare import prepare
from titans_jax.training import load_run
from titans_jax.training.metrics import read_metrics

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TRAIN = ["-m", "titans_jax.cli", "train"]
SMALL = dataclasses.replace(MODEL, depth=1)
CONFIG = """
from tests.distributed.test_two_processes import SMALL
from tests.training.tiny import tiny_config
config = tiny_config(SMALL, evaluate_every=100, diagnostics_every=100, sample_tokens=0)
"""
SAMPLE = ["--training.sample_tokens", "4", "--training.diagnostics_every", "6", "--training.evaluate_every", "6",
          "--training.evaluate_tasks", "perplexity"]  # fmt: skip
TWO_DEVICES = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"}


@pytest.fixture(scope="module")
def titans(tmp_path_factory):
    """titans(run_dir, ...) -> the arguments of a training; all share one compilation cache."""
    folder = tmp_path_factory.mktemp("two_processes")
    (folder / "tiny.py").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # compiling is most of what these tests do
        yield lambda run_dir, *more: [*TRAIN, str(folder / "tiny.py"), "--training.run_dir", str(run_dir), *more]


@pytest.fixture(scope="module")
def pair(titans, tmp_path_factory):
    """Run folder of two processes that nothing disturbed, and what they printed."""
    run_dir = tmp_path_factory.mktemp("runs") / "pair"
    with launch(*in_two(*titans(run_dir, *SAMPLE))) as processes:
        ended = finish(processes)
    assert [code for code, *_ in ended] == [0, 0], ended
    return run_dir, [output for _, output, _ in ended]


@pytest.fixture(scope="module")
def single(titans, tmp_path_factory):
    """Run folder of one process with two devices."""
    run_dir = tmp_path_factory.mktemp("runs") / "single"
    with launch(titans(run_dir, *SAMPLE), **TWO_DEVICES) as processes:
        ((code, _, errors),) = finish(processes)
    assert code == 0, errors
    return run_dir


def losses(run_dir: Path) -> list[float]:
    """Training losses, all of them there."""
    lines = [line for line in read_metrics(run_dir) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, 13))
    return [line["loss"] for line in lines]


def test_two_processes_train_as_one(pair, single):
    run_dir, (first, second) = pair
    # Two summands have one sum, so the all-reduce cannot round differently; other fusions might.
    np.testing.assert_allclose(losses(run_dir), losses(single), rtol=1e-6)
    ours, theirs = ([x["loss"] for x in read_metrics(run) if x["kind"] == "validation"] for run in (run_dir, single))
    assert len(ours) == 2 and ours == pytest.approx(theirs, rel=1e-6)
    assert (run_dir / "sample.txt").read_text() == (single / "sample.txt").read_text()
    # The first process speaks and writes, the second one is silent.
    assert "parameters on 2 x cpu" in first and "finished step 12" in first
    assert "step" not in second
    assert len(list((run_dir / "tensorboard").iterdir())) == 1
    assert not list(run_dir.glob(".seen*")) and not (run_dir / "lock.json").exists()
    assert_every_file_has_a_checksum(run_dir / "checkpoints" / "12")


def results(run_dir: Path) -> dict[str, dict[str, Any]]:
    """What evaluations.jsonl has of each task, in the order of the lines; but for how fast it was read."""
    lines = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    for line in lines:
        line["results"].pop("tokens_per_second", None)
    return {line["task"]: line["results"] for line in lines}


def test_two_processes_evaluate_as_one(pair, single, tmp_path):
    """The same numbers in training, by the command, and by the harness; one of them keeps what is found, and speaks."""
    assert results(pair[0])["perplexity"] == pytest.approx(results(single)["perplexity"], rel=1e-6)
    pytest.importorskip("lm_eval")
    (tmp_path / "commonsense").mkdir()
    choices = [{"goal": f"To read {number}", "sol1": "use eyes", "sol2": "eat", "label": 0} for number in range(9)]
    (tmp_path / "commonsense/piqa.val.jsonl").write_text("".join(json.dumps(each) + "\n" for each in choices))
    asked = ["perplexity", "positions", "piqa", "--length", "64", "--data", str(tmp_path)]
    for folder in ("two", "one"):
        shutil.copytree(pair[0], tmp_path / folder)
        (tmp_path / folder / "evaluations.jsonl").unlink()
    command = ["-m", "titans_jax.cli", "evaluate"]
    with launch(*in_two(*command, str(tmp_path / "two"), *asked)) as processes:
        (code, first, errors), (_, second, others) = finish(processes)
    assert code == 0 and "bits per byte" in first, errors
    assert "bits per byte" not in second and "titans:" not in others
    with launch([*command, str(tmp_path / "one"), *asked], **TWO_DEVICES) as processes:
        ((code, _, errors),) = finish(processes)
    assert code == 0, errors
    ours, theirs = results(tmp_path / "two"), results(tmp_path / "one")
    assert list(ours) == list(theirs) == ["perplexity", "positions", "piqa"]
    assert ours["perplexity"] == pytest.approx(theirs["perplexity"], rel=1e-6)
    for task, table in (("positions", "positions"), ("piqa", "results")):
        for our, their in zip(ours[task][table], theirs[task][table], strict=True):
            assert our == {key: x if isinstance(x, str) else pytest.approx(x, rel=1e-5) for key, x in their.items()}
    assert {"positions.csv", "piqa.png"} <= {file.name for file in (tmp_path / "two").iterdir()}


DIES = """
import importlib, os, signal
from titans_jax import cli

module = importlib.import_module("titans_jax.evaluation.measure")
measure_one = module.measure_one

def dies(run, task, *rest):
    return os.kill(os.getpid(), signal.SIGKILL) if task == "positions" else measure_one(run, task, *rest)

module.measure_one = dies
cli.run()
"""


def test_a_process_is_killed_during_an_evaluation(pair, tmp_path):
    """The other one says so at once, and what was measured before is kept."""
    shutil.copytree(pair[0], tmp_path / "run")
    (tmp_path / "run/evaluations.jsonl").unlink()
    lives, dies = in_two("evaluate", str(tmp_path / "run"), "perplexity", "positions", "--length", "64")
    with launch(["-m", "titans_jax.cli", *lives], ["-c", DIES, *dies]) as processes:
        (code, output, errors), (killed, *_) = finish(processes)
    assert (killed, code) == (-signal.SIGKILL, 134), (output, errors)
    assert errors.splitlines()[-1].startswith("titans: process 0 of 2 cannot go on ("), errors
    assert list(results(tmp_path / "run")) == ["perplexity"]


@pytest.mark.exhaustive  # test_conveniences.py sees one process begin
def test_two_processes_begin_with_the_weights_of_a_run_as_one_does(pair, single, titans, tmp_path):
    """From its folder, and with its validation loss before the first step's learning rate has done much."""
    begins = ["--training.init_from", str(pair[0]), "--optimizer.learning_rate", "1e-6"]
    with launch(*in_two(*titans(tmp_path / "pair", *begins))) as processes:
        ended = finish(processes)
    with launch(titans(tmp_path / "single", *begins), **TWO_DEVICES) as processes:
        ended += finish(processes)
    assert [code for code, *_ in ended] == [0, 0, 0], ended
    assert f"beginning with the weights of {pair[0]}" in ended[0][1]
    two, one = losses(tmp_path / "pair"), losses(tmp_path / "single")
    np.testing.assert_allclose(two, one, rtol=1e-6)
    assert np.mean(two) < np.mean(losses(single))


@pytest.mark.exhaustive  # test_prepare.py sees the rows, and others two processes
def test_two_processes_train_on_prepared_rows_as_one_does(titans, tmp_path):
    rows = tmp_path / "rows"
    prepare(tiny_config(SMALL).data, str(rows), workers=1, shard_bytes=5000)
    assert len(list(rows.glob("train-*.array_record"))) > 2
    tokens = ["--data.source", "tokens", "--data.path", str(rows)]
    with launch(*in_two(*titans(tmp_path / "pair", *tokens))) as processes:
        ended = finish(processes)
    with launch(titans(tmp_path / "single", *tokens), **TWO_DEVICES) as processes:
        ended += finish(processes)
    assert [code for code, *_ in ended] == [0, 0, 0], ended
    np.testing.assert_allclose(losses(tmp_path / "pair"), losses(tmp_path / "single"), rtol=1e-6)


SIGNALLED = """
import os, signal, sys, time
import jax
from titans_jax import cli
from titans_jax.training.loop import Trainer

number, due = signal.Signals[sys.argv.pop(1)], Trainer._due

def signalled(self, every):
    if jax.process_index() == 1 and self.step == 6 and not hasattr(self, "hit"):
        while not (self.run_dir / "checkpoints" / "4").exists():
            time.sleep(0.01)
        self.hit = os.kill(os.getpid(), number)
    return due(self, every)

Trainer._due = signalled
cli.run()
"""


def signalled(number: signal.Signals, arguments: list[str]) -> list[list[str]]:
    """Commands of two processes, the second of which sends itself a signal at step 6."""
    return [["-c", SIGNALLED, number.name, *command[len(TRAIN) - 1 :]] for command in in_two(*arguments)]


def test_sigterm_to_one_saves_and_stops_both(titans, tmp_path):
    with launch(*signalled(signal.SIGTERM, titans(tmp_path / "run"))) as processes:
        ended = finish(processes)
    assert [code for code, *_ in ended] == [0, 0], ended
    step = load_run(tmp_path / "run").step
    assert step == 7  # the vote on it is taken behind step 6, and read behind step 7
    assert f"stopped and saved at step {step};" in ended[0][1]


def test_killed_and_restarted_gives_the_same_bits(pair, titans, tmp_path):
    with launch(*signalled(signal.SIGKILL, titans(tmp_path / "run"))) as processes:
        (code, output, errors), (killed, *_) = finish(processes)
    # The loop notices, long before jax.distributed would miss a sign of life and abort.
    assert (killed, code) == (-signal.SIGKILL, 134), (output, errors)
    assert errors.splitlines()[-1].startswith("titans: process 0 of 2 cannot go on ("), errors
    with launch(*in_two(*titans(tmp_path / "run"))) as processes:
        (code, output, errors), _ = finish(processes)
    assert code == 0 and "going on from the checkpoint of step 4" in output, errors
    assert losses(tmp_path / "run") == losses(pair[0])
    ours, theirs = (load_run(folder).params for folder in (tmp_path / "run", pair[0]))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def at_first_checkpoint(run_dir: Path, copy: Path) -> Path:
    """A copy of a finished run as it was at its first checkpoint, of step 4."""
    shutil.copytree(run_dir, copy)
    for step in ("8", "12"):
        shutil.rmtree(copy / "checkpoints" / step)
    return copy


def test_a_run_of_two_goes_on_alone(pair, titans, tmp_path):
    run_dir = at_first_checkpoint(pair[0], tmp_path / "run")
    with launch(titans(run_dir), **TWO_DEVICES) as processes:
        ((code, output, errors),) = finish(processes)
    assert code == 0 and "going on from the checkpoint of step 4" in output, errors
    np.testing.assert_allclose(losses(run_dir), losses(pair[0]), rtol=1e-6)


def test_a_run_of_one_goes_on_in_two_that_share_every_row(single, titans, tmp_path):
    """The second pair splits the model, not the rows: both processes read all of them."""
    run_dir = at_first_checkpoint(single, tmp_path / "run")
    with launch(*in_two(*titans(run_dir, "--mesh.data", "1", "--mesh.tensor", "2"))) as processes:
        (code, output, errors), _ = finish(processes)
    assert code == 0 and "going on from the checkpoint of step 4" in output, errors
    # Other batches would differ by tenths; sums in another order, magnified by Adam's first steps, do not.
    np.testing.assert_allclose(losses(run_dir), losses(single), rtol=1e-4)


AGREE = """
import functools, pathlib, sys
import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from titans_jax.config import ConfigError, ProcessesConfig
from titans_jax.sharding import processes

address, index, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
say = functools.partial(print, file=(folder / f"said_{index}").open("w"), flush=True)
jax.config.update("jax_num_cpu_devices", 2)
processes.start(ProcessesConfig(address, 2, index))
say(processes.first_says(index == 0))
processes.check_same({"a": 1, "b": [2]})
try:
    processes.check_same({"a": 1, "data.seed": index})
except ConfigError as error:
    say(error)
processes.make_shared_folder(folder / "shared")
try:
    processes.make_shared_folder(folder / str(index))
except (ConfigError, processes.ProcessesError) as error:
    say(error)
try:
    with processes.together():
        assert index == 0, "only here"
except (AssertionError, processes.ProcessesError) as error:
    say(error)
devices = np.array(jax.devices())
for order in ([[0], [1], [2], [3]], [[0], [2], [1], [3]], [[0, 2], [1, 3]]):
    place = NamedSharding(Mesh(devices[np.array(order)], ("data", "tensor")), PartitionSpec("data"))
    block, blocks = processes.share_of_batch(place, 8)
    rows = np.arange(8, dtype=np.int32).reshape(blocks, -1, 1)[block]
    batch = jax.make_array_from_process_local_data(place, rows, (8, 1))
    say(blocks, sorted(process_allgather(batch, tiled=True).ravel().tolist()) == list(range(8)))
"""


def test_agreement(tmp_path):
    """What fails in one process ends both; and every row of a batch is read, wherever the mesh puts devices."""
    address = f"localhost:{free_port()}"
    with launch(*(["-c", AGREE, address, str(index), str(tmp_path)] for index in range(2))) as processes:
        (first_code, _, errors), (second_code, *_) = finish(processes)
    assert (first_code, second_code) == (0, 0), errors
    # Not from what they print, in whose lines Gloo's threads write theirs.
    lines = [(tmp_path / f"said_{index}").read_text().splitlines() for index in range(2)]
    assert [each.pop(0) for each in lines] == ["True", "True"]
    for index in range(2):
        other = (
            f"data.seed is {index} for process {index} and something else for process {1 - index}; give all the same"
        )
        assert lines[index].pop(0) == other
    assert lines[0][:2] == ["process 1 of 2 cannot go on; what it printed says why"] * 2
    assert lines[1][1] == "only here"
    assert lines[1][0].startswith(f"training.run_dir {tmp_path / '1'} is not the same folder for process 1 as for")
    # Devices of a process side by side, in turns with the other's, and as shards of the same rows.
    assert lines[0][2:] == lines[1][2:] == ["2 True", "2 True", "1 True"]
