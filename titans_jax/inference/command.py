"""`titans generate` and `titans read`: text out of a trained model, and text into a memory that is kept.

The options of a command are the fields of a dataclass, with their types, defaults and help.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tyro.conf import Positional

from titans_jax.config import ConfigError, DataConfig
from titans_jax.data import open_documents
from titans_jax.inference.generate import CAUSE, Generator, NotFiniteLogits
from titans_jax.inference.reading import Loss, Memory, MemoryFileError, Reader
from titans_jax.inference.sampling import Sampling
from titans_jax.quiet_lines import QuietLines

if TYPE_CHECKING:
    from titans_jax.training import Run


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a text with a trained model; the text streams to the terminal."""

    run: Positional[Path]
    """The folder that training wrote."""
    prompt: str = ""
    """Text to continue; empty begins a document."""
    prompt_file: Path | None = None
    """A file with the text to continue, where it is too long for a command line."""
    memory: Path | None = None
    """A memory that `titans read` wrote, to begin with instead of an empty one; the file is not changed."""
    max_tokens: int = 512
    """Tokens to write at most; the model may end the document earlier."""
    stop: tuple[str, ...] = ()
    """Texts at which the continuation ends; they are not printed."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the most likely token."""
    top_k: int | None = None
    """Draw from the k most likely tokens only."""
    top_p: float | None = None
    """Draw from the fewest most likely tokens whose probabilities reach p."""
    min_p: float | None = None
    """Draw from the tokens at least this many times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Makes tokens of the prompt and the continuation less likely; 1 is no penalty, 1.2 is usual."""
    seed: int = 0
    """The same seed gives the same text."""
    samples: int = 1
    """How many continuations; they use the seeds `seed`, `seed` + 1, ..."""
    interactive: bool = False
    """Ask for a text, continue it, and ask again, with all turns in the memory; an empty line or Ctrl-D ends."""
    speed: bool = False
    """Print tokens per second on standard error."""


@dataclass(frozen=True)
class ReadOptions:
    """Read texts of any length with a trained model, at constant memory use, and save the resulting memory."""

    run: Positional[Path]
    """The folder that training wrote."""
    texts: Positional[tuple[Path, ...]]
    """Text files (.xz and .gz too), read one after another as one text."""
    memory: Path = Path("text.memory")
    """The memory's file, in safetensors; if it exists, reading continues from that memory."""


def generate(options: GenerateOptions, run: "Run", sampling: Sampling) -> None:
    """Print continuations.

    Raises:
      ConfigError: `prompt_file` is no file, or both it and a prompt are given.
      MemoryFileError: as `Memory.load` and `Reader`.
      NotFiniteLogits: as `Generator.stream`.
    """
    if options.prompt_file is not None:
        options = dataclasses.replace(options, prompt=_text_of(options), prompt_file=None)
    generator = Generator(run.graphdef, run.tokenizer, sampling)
    reader = Reader(run.graphdef, run.params, run.tokenizer) if options.memory or options.interactive else None
    memory = Memory.load(options.memory, reader) if options.memory else None
    if options.interactive:
        return _converse(options, run, generator, reader, memory)
    for number in range(options.samples):
        if options.samples > 1:
            print(f"--- sample {number + 1} of {options.samples}, seed {options.seed + number}")
        _print(options.prompt)
        _say(options, run, generator, options.prompt, memory, options.seed + number)


def _text_of(options: GenerateOptions) -> str:
    """The text of `prompt_file`; bytes that are not UTF-8 become surrogates, as in a prompt on the command line.

    Raises:
      ConfigError: there is no such file, or a prompt is given too.
    """
    if options.prompt:
        raise ConfigError("prompt and prompt_file are both given; use one of them")
    if not options.prompt_file.is_file():
        raise ConfigError(f"prompt_file is {str(options.prompt_file)!r}, which is no file; give a text file")
    return options.prompt_file.read_text(encoding="utf-8", errors="surrogateescape")


def _converse(
    options: GenerateOptions, run: "Run", generator: Generator, reader: Reader, memory: Memory | None
) -> None:
    """Continue one text after another, each with everything before it in the memory."""
    memory, prompt = memory or reader.start(), options.prompt
    for turn in range(1 << 31):
        if not prompt:
            try:
                prompt = input("> ")
            except EOFError:
                break
        if not prompt:
            break
        said = _say(options, run, generator, prompt, memory, options.seed + turn)
        memory, _ = reader.read(memory, reader.encode(prompt + said, memory))
        prompt = ""
    print()


def _say(
    options: GenerateOptions, run: "Run", generator: Generator, prompt: str, memory: Memory | None, seed: int
) -> str:
    """Print a continuation as it comes, and return it."""
    said, tokens, start = "", 0, None
    pieces = generator.stream(run.params, prompt, options.max_tokens, seed, until=options.stop, memory=memory)
    for text in pieces:
        # The first piece waits for the compiler and the prompt.
        start, tokens = start or time.monotonic(), tokens + (len(run.tokenizer.encode(text)) if said else 0)
        said += text
        _print(text)
    print()
    if options.speed and tokens:
        speed = tokens / (time.monotonic() - start)
        print(f"{speed:,.1f} tokens/s after the first piece", file=sys.stderr)
    return said


def _print(text: str) -> None:
    """Print at once; characters that UTF-8 cannot encode, which a prompt may hold, are printed as "?"."""
    print(text.encode("utf-8", "replace").decode(), end="", flush=True)


def read(options: ReadOptions, run: "Run") -> None:
    """Read texts, save the memory, and print the speed and the loss.

    Raises:
      MemoryFileError: a text is no file, or the memory cannot be kept there, or is another model's.
      NotFiniteLogits: the model's logits are not finite; an earlier memory is left whole.
    """
    for file in options.texts:
        if not file.is_file():
            raise MemoryFileError(f"texts has {str(file)!r}, which is no file; give text files")
    reader = Reader(run.graphdef, run.params, run.tokenizer)
    memory = Memory.load(options.memory, reader) if options.memory.exists() else reader.start()
    if not options.memory.absolute().parent.is_dir():
        raise MemoryFileError(f"memory is {str(options.memory)!r}, in a folder that is not there; make the folder")
    if memory.tokens:
        print(f"{options.memory} has read {memory.tokens:,} tokens; reading on")
    before = memory.tokens
    memory, loss, speeds = _read_files(reader, memory, options.texts, run.config.data.errors)
    memory.save(options.memory)
    if not loss.tokens:
        print(f"nothing was read; the memory is in {options.memory}")
        return
    size = options.memory.stat().st_size
    print(
        f"{memory.tokens - before:,} tokens at {np.mean(speeds):,.0f} tokens/s (first tenth {speeds[0]:,.0f}, last "
        f"{speeds[-1]:,.0f}), {loss.nats / loss.tokens:.4f} nats a token"
    )
    print(f"the memory of {memory.tokens:,} tokens is in {options.memory}, {size:,} bytes")


def _read_files(
    reader: Reader, memory: Memory, files: tuple[Path, ...], errors: Literal["strict", "replace"]
) -> tuple[Memory, Loss, list[float]]:
    """The memory after the files, their loss, and tokens a second in each tenth of them; errors: `data.errors`."""
    held_out = [DataConfig("text", str(x), validation_path=str(x), validation_every=0, errors=errors) for x in files]
    documents = [open_documents(config, "validation") for config in held_out]
    marks: list[tuple[float, int]] = [(time.monotonic(), 0)]
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.fields[text]}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    total = sum(file.stat().st_size for file in files)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, done, lines = bar.add_task("", total=total, text="compiling"), 0, QuietLines(console)

        def texts() -> Iterator[str]:
            nonlocal done
            for of_file in documents:
                for part in of_file.parts(0):
                    yield part
                    done += len(part.encode("utf-8", "replace"))

        def told(loss: Loss) -> None:
            if not math.isfinite(loss.nats):
                raise NotFiniteLogits(
                    f"the model's logits within the first {loss.tokens:,} tokens are not finite, so no memory was "
                    f"written; {CAUSE}"
                )
            marks.append((time.monotonic(), loss.tokens))
            text = f"{loss.tokens:,} tokens, {loss.tokens / (marks[-1][0] - marks[0][0]):,.0f} tokens/s"
            bar.update(task, completed=done, text=text)
            if lines.due():
                print(text, file=sys.stderr, flush=True)

        memory, loss = reader.read(memory, reader.encode(texts(), memory), told)
    return memory, loss, tenths(marks)


def tenths(marks: list[tuple[float, int]]) -> list[float]:
    """Tokens per second in each tenth of a reading; marks: (time, tokens read until then) after every piece.

    The first piece waits for the compiler, and so do the smaller ones at the end: both are left out.
    """
    sizes = np.diff([tokens for _, tokens in marks])
    if len(sizes):
        marks = marks[: int(np.flatnonzero(sizes == sizes.max())[-1]) + 2]
    marks = marks[1:] if len(marks) > 2 else marks
    parts = np.array_split(np.arange(len(marks)), min(10, len(marks) - 1) or 1)
    ends = [0, *(int(part[-1]) for part in parts)]
    speeds = [
        (marks[b][1] - marks[a][1]) / max(marks[b][0] - marks[a][0], 1e-9)
        for a, b in zip(ends, ends[1:], strict=False)
        if b > a
    ]
    return speeds or [0.0]
