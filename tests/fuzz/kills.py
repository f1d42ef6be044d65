"""Kills a small training at random moments, and sees that what comes of it is what an undisturbed one gives.

    python -m tests.fuzz.kills --kills 100 --seed 7

Every kill is a SIGKILL after a random part of the time that a whole run takes: while Python starts, data is prepared,
programs are compiled, steps are taken, checkpoints are saved or losses are evaluated. The same command goes on each
time, until the run is finished; its parameters and its losses must then be those of the undisturbed run, bit for bit.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

CONFIG = """
from tests.training.tiny import tiny_config
config = tiny_config(steps=40, checkpoint_every=2, evaluate_every=5, diagnostics_every=5)
"""
MOST_STARTS = 30
"""Starts in one run folder, beyond which nothing is thought to go on."""


def start(config: Path, run_dir: Path) -> subprocess.Popen:
    """The command, in a process of its own; what it says goes into a file beside the run."""
    command = "from titans_jax.cli import run; run()"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with run_dir.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", command, "train", str(config), "--training.run_dir", str(run_dir)],
            env=environment, stdout=log, stderr=log,
        )  # fmt: skip


def outcome(run_dir: Path) -> tuple[dict[str, np.ndarray], dict[int, float]]:
    """The parameters of a finished run by name, and the training loss of every step."""
    import jax

    from titans_jax.training import load_run
    from titans_jax.training.metrics import read_metrics

    run = load_run(run_dir)
    params = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(run.params)}
    lines = [line for line in read_metrics(run_dir) if line["kind"] == "train"]
    assert len({line["step"] for line in lines}) == len(lines), "a step stands twice in metrics.jsonl"
    return params, {line["step"]: line["loss"] for line in lines}


def kill_and_go_on(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill so many processes, and compare every run that gets to its end; the counts of kills, starts and runs.

    Raises AssertionError, with the folder, where a run ends otherwise than the undisturbed one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "killed.py"
    config.write_text(CONFIG)
    for name in ("first", "undisturbed"):  # the first fills the cache of compiled programs
        began = time.monotonic()
        assert start(config, folder / name).wait() == 0, (folder / f"{name}.log").read_text()[-2000:]
    lasts, (params, losses) = time.monotonic() - began, outcome(folder / "undisturbed")
    chance, counts = random.Random(seed), {"kills": 0, "starts": 0, "runs": 0}
    while counts["kills"] < kills or counts["runs"] == 0:
        run_dir = folder / f"run{counts['runs']}"
        for _ in range(MOST_STARTS):
            process = start(config, run_dir)
            counts["starts"] += 1
            try:
                code = process.wait(lasts * chance.random() if counts["kills"] < kills else None)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                counts["kills"] += 1
                continue
            assert code == 0, f"{run_dir}: exit {code}: {run_dir.with_suffix('.log').read_text()[-2000:]}"
            break
        else:
            raise AssertionError(f"{run_dir}: not finished after {MOST_STARTS} starts")
        after, seen = outcome(run_dir)
        assert seen == losses, f"{run_dir}: other losses than undisturbed"
        assert after.keys() == params.keys() and all(np.array_equal(after[name], params[name]) for name in params), (
            f"{run_dir}: other parameters than undisturbed"
        )
        counts["runs"] += 1
    return counts


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(kill_and_go_on(Path(folder), asked.kills, asked.seed)))
