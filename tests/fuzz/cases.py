"""A seeded fuzzer of what people and disks hand to the library: command lines, configuration files, data, run folders.

    python -m tests.fuzz.cases --cases 10000 --seed 7

A case is a seed. Whatever it hands over, the answer is a result or one sentence: never a traceback, a wait of more
than `PATIENCE` seconds, or a changed file, and from a damaged checkpoint never other numbers than were saved.
"""

import argparse
import contextlib
import gzip
import hashlib
import io
import lzma
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from tests.training.tiny import tiny_config
from titans_jax import cli
from titans_jax.config import Config, DataConfig, leaves
from titans_jax.data import open_documents
from titans_jax.errors import TitansError
from titans_jax.training.checkpoint import Checkpoints, abstract_like
from titans_jax.training.checksums import NAME
from titans_jax.training.metrics import read_metrics

PATIENCE = 60
"""Seconds that a case may take."""
STATE = {"params": {"w": jnp.arange(500.0)}, "optimizer": {"count": jnp.zeros((), jnp.int32)}}
ODD = [
    "", "-1", "0", "7", "1e400", "1e-400", "nan", "inf", "-0.0", "None", "True", "x" * 300, "\u0663", "\U0001f4a5",
    "..", "/dev/null", "--", "-", "-x", "=", "1 2", "[]", "{}", "\x00", "9" * 40, "mac", "mok", "a:b", "\ud800", "a.py",
]  # fmt: skip
SOURCE = [
    "config",
    "=",
    "Config",
    "(",
    ")",
    "3",
    "{",
    "}",
    "import os",
    "\n",
    "raise",
    "'",
    "None",
    "\x00",
    "lambda:",
    "é",
]


def run_case(seed: int, folder: Path, whole: Path) -> str:
    """Run one case in `folder`, an empty one; what it was, for people.

    whole: a run folder of `save_whole`.
    Raises AssertionError, or whatever escaped.
    """
    choose = random.Random(seed)
    kind: Callable[[random.Random, Path, Path], str] = choose.choice(
        [command_line, command_line, configuration_file, data_file, checkpoint, metrics]
    )
    with within(PATIENCE):
        return f"{kind.__name__} {kind(choose, folder, whole)}"


def save_whole(run_dir: Path) -> Path:
    """A run folder with two checkpoints."""
    with Checkpoints(run_dir / "checkpoints", kept=2) as checkpoints:
        for step in (4, 8):
            beside = {"data_position": {"next_row": step}, "text": {}, "goodput": {"first_start": 0.0, "seconds": 1.0}}
            checkpoints.save(step, STATE, tiny_config(), **beside)
    return run_dir


def command_line(choose: random.Random, folder: Path, whole: Path) -> str:
    """A command with fields of its own and others', in values of every kind."""
    (folder / "a.py").write_text("from titans_jax.config import Config\nconfig = Config()\n")
    commands = ["configs", "train", "generate", "evaluate", "models", "bench", "study"]
    command = choose.choice(commands if choose.random() < 0.9 else ODD)
    arguments, names = [command], [*leaves(Config()), "prompt", "max_tokens", "temperature", "batches", "help", "x"]
    if command in ("configs", "train"):
        known = ["quickstart", "mac_170m", "a.py", "a.py:b", "./quickstart"]
        arguments.append(choose.choice(known if choose.random() < 0.8 else ODD))
        if command == "train":  # a folder that is not there: nothing may begin to train
            names = [name for name in names if not name.startswith(("processes", "data.path", "data.source"))]
            arguments += ["--data.path", str(folder / "nowhere")]
    elif command in ("generate", "evaluate"):
        arguments.append(choose.choice([str(folder), "nowhere", *ODD]))
    for _ in range(choose.randrange(4)):
        name = choose.choice(names)
        name = name.replace(choose.choice(name), choose.choice("-_.xX"), 1) if choose.random() < 0.2 else name
        arguments += [f"--{name}", *choose.choices(ODD, k=choose.randrange(3))]
    check_command(arguments, folder)
    return " ".join(map(repr, arguments))


def configuration_file(choose: random.Random, folder: Path, whole: Path) -> str:
    """Random pieces of Python, or random bytes."""
    text = "from titans_jax.config import Config\nconfig = Config()\n"
    if choose.random() < 0.5:
        text = " ".join(choose.choices([*SOURCE, text], k=choose.randrange(1, 9)))
    content = text.encode() if choose.random() < 0.8 else damaged(choose, text.encode())
    (folder / "mine.py").write_bytes(content)
    check_command(["configs", choose.choice(["mine.py", "mine.py:small"])], folder)
    return repr(content)


def data_file(choose: random.Random, folder: Path, whole: Path) -> str:
    """Text and records, packed and not, damaged and not."""
    suffix = choose.choice([".txt", ".jsonl"]) + choose.choice(["", ".gz", ".xz"])
    record = '{"text": "some words"}\n' if ".jsonl" in suffix else "some words\n"
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(suffix).suffix, bytes)
    content = damaged(choose, pack(record.encode() * choose.randrange(1, 5)))
    (folder / f"data{suffix}").write_bytes(content)
    fields = {"validation_every": choose.choice([0, 2, 3]), "errors": choose.choice(["strict", "replace"])}
    place = choose.choice([folder, folder / f"data{suffix}", folder / "nowhere"])
    config = DataConfig(source=choose.choice(["text", "jsonl", "tfds", "python"]), path=str(place), **fields)
    for split in ("train", "validation"):
        with one_sentence():
            assert all(isinstance(text, str) for text in open_documents(config, split))
    return f"{config.source} {suffix} {content!r}"


def checkpoint(choose: random.Random, folder: Path, whole: Path) -> str:
    """A file of a checkpoint damaged, cut or gone: what comes back is what was saved, of whichever step."""
    run_dir = folder / "run"
    shutil.copytree(whole, run_dir)
    for _ in range(choose.randrange(1, 3)):
        step = run_dir / "checkpoints" / choose.choice("48")
        (step / NAME).unlink(missing_ok=True) if choose.random() < 0.1 else None
        file = choose.choice(sorted(each for each in step.rglob("*") if each.is_file()))
        file.unlink() if choose.random() < 0.2 else file.write_bytes(damaged(choose, file.read_bytes()))
    sums = [(run_dir / "checkpoints" / step / NAME).is_file() for step in "48"]
    with one_sentence(), Checkpoints(run_dir / "checkpoints", say=lambda sentence: None) as checkpoints:
        state, saved = checkpoints.restore(abstract_like(STATE))
        if all(sums):
            np.testing.assert_array_equal(state["params"]["w"], STATE["params"]["w"])
            assert saved.step in (4, 8) and saved.config == tiny_config()
    return f"{file.relative_to(run_dir)}"


def metrics(choose: random.Random, folder: Path, whole: Path) -> str:
    """Lines of metrics, damaged."""
    lines = b'{"kind": "train", "step": 1, "loss": 2.5}\n' * choose.randrange(1, 5)
    content = damaged(choose, lines)
    (folder / "metrics.jsonl").write_bytes(content)
    assert all(isinstance(line["step"], int) for line in read_metrics(folder))
    return repr(content)


def check_command(arguments: list[str], folder: Path) -> None:
    """Run a command in `folder`: it ends well, or with one sentence, and changes nothing."""
    before, errors, output = contents(folder), io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
        try:
            code = cli.main(arguments)
        except SystemExit as stop:  # --help, or no arguments
            code = stop.code
    assert code in (0, 1, 2), code
    if code and "usage: " not in errors.getvalue():
        sentences = [line for line in errors.getvalue().splitlines() if line.startswith("titans: ")]
        assert len(sentences) == 1 and errors.getvalue().count("\n") == 1, errors.getvalue()
    assert contents(folder) == before


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """What is refused inside is refused in a line that says something."""
    try:
        yield
    except TitansError as error:
        assert str(error) and "\n" not in str(error), error


def damaged(choose: random.Random, content: bytes) -> bytes:
    """The content with some bytes changed, cut off, or in front."""
    content = bytearray(content)
    for _ in range(choose.randrange(3)):
        way = choose.randrange(3)
        if way == 0 and content:
            content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        elif way == 1:
            del content[choose.randrange(len(content) + 1) :]
        else:
            content[:0] = choose.randbytes(choose.randrange(1, 9))
    return bytes(content)


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder with a hash of what it holds, but for what Python caches."""
    files = [file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in a block that takes longer; in the main thread only."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"a case took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_cases(seeds: range, whole: Path) -> Iterator[tuple[int, BaseException]]:
    """The seeds that failed, and how."""
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_case(seed, Path(folder), whole)
            except Exception as error:
                yield seed, error


def main() -> None:
    """Run many cases; print those that fail."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed, error in run_cases(range(options.seed, options.seed + options.cases), save_whole(Path(folder))):
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:500]}", flush=True)
    print(f"{failed} of {options.cases} cases failed")
    sys.stdout.flush()
    os._exit(failed > 0)  # threads of TensorStore may wait for ever


if __name__ == "__main__":
    main()
