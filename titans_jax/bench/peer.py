"""`titans bench peer`: the memory, a training step and decoding compared with titans-pytorch (0.5.5), on this machine.

The peer, titans-pytorch, has a Python of its own (`pip install titans-pytorch torch` in another environment). Both
sides of a case are processes whose calls alternate, so that other work on the machine affects both, and medians are
compared. By default the peer does less work: it takes the inner gradients of a whole row at the memory with which the
row began. With `exact` it takes them at the memory with which each chunk begins, as ours always does (its `batch_size`
is then the length of a chunk).
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from flax import nnx

from titans_jax import plots, sharding
from titans_jax.bench.hierarchy import gradient
from titans_jax.bench.train import decoding, training_step
from titans_jax.config import ConfigError, MemoryConfig, ModelConfig
from titans_jax.layers import memory_layer
from titans_jax.training.run import count_params, init_model

PROGRAM = Path(__file__).with_name("peer_program.py")
WAIT = 0.2
"""Seconds to wait after a call: a library's threads spin for a moment, which would slow the other side down."""


@dataclass(frozen=True)
class Case:
    """A case that both sides run, in float32: the gradient of a memory layer, a training step of MAC, or the decoding
    of one token by MAC."""

    kind: Literal["memory", "train", "decode"]
    time: int
    """Tokens of a row; for decode, the tokens read before."""
    expansion: int
    chunk_size: int
    moves_anchors: bool = True
    """Whether the peer takes inner gradients at the start of each chunk, not at the start of the row."""
    batch: int = 2
    num_heads: int = 4
    head_dim: int = 64
    depth: int = 4
    segment: int = 128
    num_persistent: int = 16
    vocab_size: int = 320

    @property
    def model(self) -> ModelConfig:
        """Our model of this case."""
        return ModelConfig(
            pattern=("lmm" if self.kind == "memory" else "mac",),
            dim=self.num_heads * self.head_dim,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            depth=1 if self.kind == "memory" else self.depth,
            segment=self.segment,
            num_persistent=self.num_persistent,
            vocab_size=self.vocab_size,
            dtype="float32",
            memory=MemoryConfig(expansion=self.expansion, chunk_size=self.chunk_size),
        )


CASES = (
    Case("memory", 1024, 2, 64),
    Case("memory", 1024, 4, 16),
    Case("memory", 4096, 2, 16),
    Case("train", 1024, 2, 16),
    Case("decode", 1024, 2, 16),
)


@dataclass(frozen=True)
class Options:
    """Compare the speed of our layers and models with titans-pytorch."""

    python: str
    """The Python of an environment in which titans-pytorch is installed."""
    kinds: tuple[Literal["memory", "train", "decode"], ...] = ("memory", "train", "decode")
    """Cases: a memory layer forward and backward, a MAC's training step, decoding."""
    exact: bool = False
    """titans-pytorch takes inner gradients at the start of each chunk, as ours does; its default is the start of the
    row."""
    repeats: int = 7
    """Calls of each side; the medians are compared. Decoding has 10 times as many calls."""
    output: str = "runs/bench_peer"
    """Folder for peer.csv and peer.png."""


@dataclass(frozen=True)
class Row:
    """Median seconds of a call of ours and of the peer's, how many times as fast ours is, and the models' sizes."""

    kind: str
    time: int
    expansion: int
    chunk_size: int
    exact: bool
    seconds: float
    peer_seconds: float
    times_as_fast: float
    parameters: int
    peer_parameters: int


def main(options: Options) -> None:
    """Time every case, print and save it.

    Raises:
      ConfigError: `python` cannot be run, or has no titans-pytorch.
    """
    from rich.console import Console

    console, rows = Console(), []
    for case in CASES:
        if case.kind in options.kinds:
            case = dataclasses.replace(case, moves_anchors=options.exact)
            with console.status(f"{case.kind}, {case.time:,} tokens, chunk {case.chunk_size}"):
                rows.append(measure(case, options))
            row = rows[-1]
            console.print(
                f"{row.kind}, {row.time:,} tokens, expansion {row.expansion}, chunk {row.chunk_size}: "
                f"{row.seconds:.4g} s, titans-pytorch {row.peer_seconds:.4g} s, {row.times_as_fast:.2f} times as fast",
                soft_wrap=True,
            )
            plots.save_csv(rows, Path(options.output) / "peer.csv")
    draw(rows, Path(options.output) / "peer.png")


def measure(case: Case, options: Options) -> Row:
    """Time both sides of a case, with alternating calls."""
    ours = started(sys.executable, "titans_jax.bench.peer", case)
    with ours as (parameters, run), started(options.python, "peer_torch", case) as (their_parameters, run_theirs):
        calls = options.repeats * (10 if case.kind == "decode" else 1)
        times = [(run(), run_theirs()) for _ in range(calls)]
    mine, other = (statistics.median(each) for each in zip(*times, strict=True))
    return Row(
        case.kind, case.time, case.expansion, case.chunk_size, case.moves_anchors, mine, other, other / mine,
        parameters, their_parameters,
    )  # fmt: skip


@contextmanager
def started(python: str, module: str, case: Case) -> Iterator[tuple[int, Callable[[], float]]]:
    """Start the process of a case, by a module with a `make`; yields the number of parameters, and a function that runs
    one call and returns its seconds."""
    command = [python, str(PROGRAM), module, json.dumps(dataclasses.asdict(case))]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise ConfigError(
            f"python is {python!r}, which cannot be run ({error.strerror}); use the Python of an environment that has "
            "titans-pytorch"
        ) from None

    def line() -> str:
        said = process.stdout.readline()
        if not said:
            raise ConfigError(
                f"python is {python!r}, which did not run {module} (what it says is above); use one in whose "
                "environment is titans-pytorch"
            )
        return said

    def run() -> float:
        process.stdin.write("\n")
        process.stdin.flush()
        taken = float(line())
        time.sleep(WAIT)
        return taken

    try:
        yield int(line()), run
    finally:
        process.kill()
        process.communicate()


def make(case: dict[str, Any]) -> tuple[int, Callable[[], Any]]:
    """Our side of a case, in a process of its own: the number of parameters, and the call to time."""
    case = Case(**case)
    if case.kind == "decode":
        run = decoding(*init_model(case.model, seed=0), case.time, 2 * case.time)
    else:
        sharding.use_cores(case.batch)
        if case.kind == "train":
            run, _ = training_step(*init_model(case.model, seed=0), case.batch, case.time, case.vocab_size)
        else:
            run = gradient(case.model, case.time, case.batch)
            layer = nnx.eval_shape(lambda: memory_layer(case.model, rngs=nnx.Rngs(0)))
            return sum(parameter.size for parameter in jax.tree.leaves(nnx.state(layer))), waited(run)
    return count_params(case.model), waited(run)


def waited(run: Callable[[], jax.Array]) -> Callable[[], jax.Array]:
    """A call that ends when its result is there."""
    return lambda: jax.block_until_ready(run())


def draw(rows: list[Row], file: Path) -> None:
    """Seconds of a call of both, side by side for each case."""
    with plots.figure(file) as axes:
        places = range(len(rows))
        axes.bar([place - 0.2 for place in places], [row.seconds for row in rows], 0.4, label="titans_jax")
        axes.bar([place + 0.2 for place in places], [row.peer_seconds for row in rows], 0.4, label="titans-pytorch")
        axes.set_xticks(places, [f"{row.kind}\n{row.time:,}, {row.expansion}, {row.chunk_size}" for row in rows])
        axes.set_yscale("log")
        axes.set(xlabel="tokens, expansion, chunk", ylabel="seconds of a call")
        axes.legend()
