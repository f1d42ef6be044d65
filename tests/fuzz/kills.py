"""Kills processes at random moments, and sees that what comes of it is what an undisturbed start gives.

    python -m tests.fuzz.kills --kills 100 --seed 7                 a small training
    python -m tests.fuzz.kills --kills 100 --processes 2            the same in two processes, one of which is killed
    python -m tests.fuzz.kills --kills 100 --what prepare           titans data prepare

Every kill is a SIGKILL after a random part of the time that a whole run takes: while Python starts, data is prepared,
programs are compiled, steps are taken, checkpoints are saved or losses are evaluated. The same command goes on each
time, until the run is finished; what it made must then be that of the undisturbed run, bit for bit.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.distributed.launch import in_two
from titans_jax.data.stored import INDEX

TRAINING = """
from tests.training.tiny import tiny_config
config = tiny_config(steps=40, checkpoint_every=2, evaluate_every=5, diagnostics_every=5)
"""
MOST_STARTS = 30
"""Starts in one run folder, beyond which nothing is thought to go on."""
ALONE = 60.0
"""Seconds a process may take to notice that the other one is gone; then it is killed too, as a scheduler would do. One
that waits for the other to start waits for as long as jax.distributed does, five minutes."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What is killed. command: (configuration file, folder of the run) -> arguments of `titans`, a list per process.

    outcome: of the folder of a finished run, what must not depend on kills: {name: an array or a number}. finished:
    whether a folder needs no further start, though its last one was killed.
    """

    command: Callable[[Path, Path], list[list[str]]]
    outcome: Callable[[Path], dict[str, Any]]
    finished: Callable[[Path], bool] = lambda folder: False


def trained(run_dir: Path) -> dict[str, Any]:
    """The parameters of a finished run by name, and the training loss of every step."""
    import jax

    from titans_jax.training import load_run
    from titans_jax.training.metrics import read_metrics

    run = load_run(run_dir)
    params = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(run.params)}
    lines = [line for line in read_metrics(run_dir) if line["kind"] == "train"]
    assert len({line["step"] for line in lines}) == len(lines), "a step stands twice in metrics.jsonl"
    return params | {f"loss of step {line['step']}": line["loss"] for line in lines}


def prepared(folder: Path) -> dict[str, Any]:
    """The index of a folder of prepared data and the shards that it names, as bytes."""
    shards = [shard["file"] for split in json.loads((folder / INDEX).read_text())["splits"].values() for shard in split]
    return {name: np.frombuffer((folder / name).read_bytes(), np.uint8) for name in (INDEX, *shards)}


def train_in(processes: int) -> Work:
    """A training in one process, or in two."""

    def command(config: Path, run_dir: Path) -> list[list[str]]:
        arguments = ["train", str(config), "--training.run_dir", str(run_dir)]
        return [arguments] if processes == 1 else in_two(*arguments)

    return Work(command, trained)


def prepare() -> Work:
    """Preparation of data in many small shards, by two worker processes."""
    shards = ["--shard_bytes", "3000", "--workers", "2"]
    return Work(
        command=lambda config, folder: [["data", "prepare", str(config), "--output", str(folder), *shards]],
        outcome=prepared,
        finished=lambda folder: (folder / INDEX).exists(),  # prepared data are not written again
    )


def start(commands: list[list[str]], log: Path) -> list[subprocess.Popen]:
    """The commands, each in a process of its own; what they say goes into a file."""
    program = "from titans_jax.cli import run; run()"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with log.open("ab") as said:
        return [
            subprocess.Popen([sys.executable, "-c", program, *command], env=environment, stdout=said, stderr=said)
            for command in commands
        ]


def kill_and_go_on(folder: Path, kills: int, seed: int, work: Work | None = None) -> dict[str, int]:
    """Kill so many processes, and compare every run that gets to its end; the counts of kills, starts and runs.

    work: what is killed, a training in one process unless said. Raises AssertionError, with the folder, where a run
    ends otherwise than the undisturbed one.
    """
    work = work or train_in(1)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "killed.py"
    config.write_text(TRAINING)

    def begin(run_dir: Path) -> list[subprocess.Popen]:
        return start(work.command(config, run_dir), run_dir.with_suffix(".log"))

    for name in ("first", "undisturbed"):  # the first fills the cache of compiled programs
        began = time.monotonic()
        codes = [process.wait() for process in begin(folder / name)]
        assert not any(codes), (folder / f"{name}.log").read_text()[-2000:]
    lasts, expected = time.monotonic() - began, work.outcome(folder / "undisturbed")
    chance, counts = random.Random(seed), {"kills": 0, "starts": 0, "runs": 0}
    while counts["kills"] < kills or counts["runs"] == 0:
        run_dir = folder / f"run{counts['runs']}"
        for _ in range(MOST_STARTS):
            processes = begin(run_dir)
            counts["starts"] += 1
            if counts["kills"] < kills and killed(processes, lasts * chance.random(), chance):
                counts["kills"] += 1
                if work.finished(run_dir):
                    break
                continue
            codes = [process.wait() for process in processes]
            said = run_dir.with_suffix(".log").read_text()[-2000:]
            assert not any(codes), f"{run_dir}: exit {codes}: {said}"
            break
        else:
            raise AssertionError(f"{run_dir}: not finished after {MOST_STARTS} starts")
        made = work.outcome(run_dir)
        assert made.keys() == expected.keys(), f"{run_dir}: {made.keys() ^ expected.keys()} are in one only"
        for name, value in made.items():
            assert np.array_equal(value, expected[name]), f"{run_dir}: {name} is another than undisturbed"
        counts["runs"] += 1
    return counts


def killed(processes: list[subprocess.Popen], after: float, chance: random.Random) -> bool:
    """Kill one of the processes after so many seconds, and see the others end; False if it had ended by then."""
    chosen = chance.choice(processes)
    try:
        chosen.wait(after)
        return False
    except subprocess.TimeoutExpired:
        chosen.kill()
    until = time.monotonic() + ALONE
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(until - time.monotonic())
        process.kill()
        process.wait()
    return True


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--what", choices=("train", "prepare"), default="train")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1)
    asked = parser.parse_args()
    chosen = prepare() if asked.what == "prepare" else train_in(asked.processes)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(kill_and_go_on(Path(folder), asked.kills, asked.seed, chosen)))
