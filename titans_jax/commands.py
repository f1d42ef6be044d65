"""The commands of the command line, each a function of its arguments; modules for one command are imported by it.

The options of a command are the fields of a dataclass, with their types, defaults and help.
"""

import contextlib
import dataclasses
import importlib
import json
import logging
import os
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tyro.conf import Positional

from titans_jax.config import Config, ConfigError, ProcessesConfig, to_dict
from titans_jax.config.command_line import parse
from titans_jax.config.files import find_config, shipped_configs
from titans_jax.config.help import describe_fields
from titans_jax.config.validate import validate, validate_processes

if TYPE_CHECKING:
    from titans_jax.training import Run

SomeConfig = TypeVar("SomeConfig", bound=Config)


def train(arguments: list[str]) -> None:
    """titans train CONFIG [--dry-run] [--field value ...]"""
    given = [each for each in arguments if each not in ("--dry-run", "--dry_run")]
    name, config = configuration("titans train", given)
    _cache_compilations()
    from titans_jax.sharding import processes
    from titans_jax.training import dry_run, train

    processes.start(config.processes)
    _quieten()
    if given != arguments:
        return dry_run(config)
    train(config, Path(config.training.run_dir or f"runs/{name}"))


def generate(arguments: list[str]) -> None:
    """titans generate RUN [--prompt TEXT ...]"""
    from titans_jax.inference import Sampling, command

    options = parse("titans generate", command.GenerateOptions, arguments)
    _check_options(options, max_tokens=0, seed=0)
    if "" in options.stop:
        raise ConfigError("stop has ''; use texts of at least one letter, or leave it out")
    _cache_compilations()
    drawing = (options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty)
    sampling = Sampling(*drawing)  # refuses before the run is read
    command.generate(options, _load_run(options.run), sampling)


def read(arguments: list[str]) -> None:
    """titans read RUN TEXT ... [--memory FILE]"""
    from titans_jax.inference import command

    options = parse("titans read", command.ReadOptions, arguments)
    _check_options(options)
    _cache_compilations()
    command.read(options, _load_run(options.run))


def export(arguments: list[str]) -> None:
    """titans export RUN --output FOLDER [--format safetensors|orbax]"""
    from titans_jax.training import export

    options = parse("titans export", export.ExportOptions, arguments)
    export.main(options, _load_run(options.run))


@dataclass(frozen=True)
class EvaluateOptions:
    """Measure a trained model."""

    run: Positional[Path]
    """The folder that training wrote."""
    tasks: Positional[tuple[str, ...]] = ("perplexity",)
    """Names of the evaluations to run. perplexity: loss, bits per byte and perplexity on the run's held-out text.
    positions: bits per byte by position in long documents, with the state carried on and with it emptied at every
    window; writes positions.csv, .json and .png into the run's folder. niah: RULER's needles S-NIAH-1 to 3; ruler: all
    tasks of RULER. `titans evaluate --list` prints all names.
    """
    memory: Literal["on", "off", "fresh"] = "on"
    """off: memories are never written, so that every read is of their start. fresh: tasks that carry a state from
    window to window (positions) empty it at every window; for other tasks the same as on."""
    batches: int | None = None
    """Batches to read; None reads all."""
    length: int = 32768
    """positions: tokens of a row. niah, ruler, babilong: tokens of the longest texts; shorter ones have 1,024, 2,048,
    .. tokens."""
    text: Path | None = None
    """The text that positions, niah, ruler and babilong read; None: for positions the run's validation documents, for
    babilong the novels and for niah and ruler the essays in the folder of data."""
    samples: int | None = None
    """niah, ruler, babilong: questions of every task and length; None: the number of the protocol. positions and
    lm-eval's tasks: documents of each task; None: all."""
    data: Path = Path("data")
    """The folder of data sets, for tasks that read any; `titans data list` lists its content."""
    json: bool = False
    """Print one JSON object instead of lines."""
    processes: ProcessesConfig = field(default_factory=ProcessesConfig)
    """The processes that share the work; each is started with the same command, and all must see the folders."""


def evaluate(arguments: list[str]) -> None:
    """titans evaluate RUN [TASK ...] [--memory on|off|fresh] [--json], or titans evaluate --list"""
    if arguments[:1] == ["--list"]:
        from titans_jax.evaluation.show import list_evaluators

        return list_evaluators(parse("titans evaluate --list", FolderOptions, arguments[1:]).data)
    options = parse("titans evaluate", EvaluateOptions, arguments)
    _check_options(options)
    validate_processes(options.processes)
    _cache_compilations()
    import jax

    from titans_jax import sharding
    from titans_jax.evaluation import EvaluationOptions, evaluators_of, measure
    from titans_jax.evaluation.scoring import ROWS
    from titans_jax.evaluation.show import print_numbers
    from titans_jax.models import has_memory, without_writes
    from titans_jax.sharding import processes

    processes.start(options.processes)
    sharding.use_cores(ROWS)
    run = _load_run(options.run)
    said = {name: getattr(options, name) for name in ("tasks", "memory", "batches", "length", "samples")}
    processes.check_same(said | {"the step of the run": run.step})
    evaluators = evaluators_of(options.tasks)
    if options.memory == "off":
        if not has_memory(run.config.model):
            raise ConfigError(
                f"memory is 'off', but the model of {options.run} has none (model.pattern is "
                f"{run.config.model.pattern!r}); use on"
            )
        run = dataclasses.replace(run, graphdef=without_writes(run.graphdef))
    asked = EvaluationOptions(
        options.batches, options.memory, options.length, options.text, options.samples, options.data
    )
    numbers = {"step": run.step} | measure(run, evaluators, asked)
    if jax.process_index() == 0:
        print(json.dumps(numbers)) if options.json else print_numbers(numbers)


@dataclass(frozen=True)
class FolderOptions:
    """List what is there."""

    data: Path = Path("data")
    """The folder of data sets."""


@dataclass(frozen=True)
class PrepareOptions(Config):
    """Tokenize a configuration's text once, into rows on disk that training reads by random access."""

    output: str = ""
    """The folder to write, at any address that etils.epath knows: a new one, or one whose preparation was stopped,
    which is then continued."""
    workers: int | None = None
    """Processes that tokenize; None: one for each core that this process may use."""
    shard_bytes: int = 1 << 26
    """Characters of text in one file. A stop loses the files being written, and each process needs memory for some 10
    times this many bytes."""


def data(arguments: list[str]) -> None:
    """titans data CONFIG [--field value ...], data prepare CONFIG --output FOLDER, data list, or data fetch NAME ..."""
    if arguments[:1] == ["prepare"]:
        return _prepare(arguments[1:])
    if arguments[:1] == ["list"]:
        from titans_jax.evaluation.show import list_sets

        return list_sets(parse("titans data list", FolderOptions, arguments[1:]).data)
    if arguments[:1] == ["fetch"]:
        from titans_jax.evaluation.show import fetch_sets

        options = parse("titans data fetch", FetchOptions, arguments[1:])
        _check_options(options)
        return fetch_sets(options.names, options.data, options.path)
    _, config = configuration("titans data", arguments)
    from titans_jax import data as pipeline
    from titans_jax.models import granularity

    tokenizer = pipeline.load_tokenizer(config.data.tokenizer)
    align = granularity(config.model)
    training = pipeline.train_batches(config.data, tokenizer, align=align)
    with contextlib.closing(training):
        print(f"training:   {training.statistics}")
        validation = pipeline.validation_batches(config.data, tokenizer, align=align)
        print(f"validation: {validation.statistics}")
        row = next(training)["tokens"][0]
    print(f"the first row begins: {tokenizer.decode(row)[:300]!r}")


@dataclass(frozen=True)
class FetchOptions:
    """Bring data sets into the folder where evaluations look for them; those that are there already stay."""

    names: Positional[tuple[str, ...]]
    """Names of data sets from `titans data list`, or "all" for every set that has a source."""
    data: Path = Path("data")
    """The folder."""
    path: str | None = None
    """A file or an address to take one set from, instead of its own source."""


def _prepare(arguments: list[str]) -> None:
    _, config = configuration("titans data prepare", arguments, PrepareOptions)
    _check_options(config)
    if not config.output:
        raise ConfigError("output is missing; give the folder to write to, --output FOLDER")
    from titans_jax import data as pipeline
    from titans_jax.models import granularity

    index = pipeline.prepare(
        config.data,
        config.output,
        align=granularity(config.model),
        workers=config.workers,
        shard_bytes=config.shard_bytes,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    for split, shards in index.splits.items():
        print(f"{split + ':':12}{index.statistics(split)}, in {len(shards):,} shards")
    tokenizer = index.settings["tokenizer"]
    own = f" --data.tokenizer {os.path.join(config.output, tokenizer['name'])}" if tokenizer["sha256"] else ""
    print(f"train with --data.source tokens --data.path {config.output}{own}")


def compile_(arguments: list[str]) -> None:
    """titans compile CONFIG [--topology v5p:8x8x8 ...] [--field value ...]"""
    import jax

    jax.config.update("jax_platforms", "cpu")  # the command does not use a TPU, even where there is one
    from titans_jax.tpu import command

    name, options = configuration("titans compile", arguments, command.Options)
    _check_options(options)
    command.main(name, options)


def models(arguments: list[str]) -> None:
    """titans models"""
    _no_arguments("titans models", arguments, "Every memory rule by name: what it is made of, and its floats of state.")
    from titans_jax.models.rules_table import print_rules

    print_rules()


def configs(arguments: list[str]) -> None:
    """titans configs [CONFIG [--field value ...]]"""
    if arguments and not arguments[0].startswith("-"):
        print(json.dumps(to_dict(configuration("titans configs", arguments)[1]), indent=2))
        return
    _no_arguments("titans configs", arguments, "The configurations that come with the package, with their sizes.")
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    from titans_jax.training.run import count_params

    found = shipped_configs()
    names = Column("configuration", min_width=max(map(len, found)))  # whole, to be copied
    table = Table(names, "blocks", "depth", "width", "parameters", "tokens", box=box.MINIMAL, padding=0)
    for name, config in found.items():
        model, data = config.model, config.data
        tokens = config.training.steps * data.batch_size * data.sequence_length
        table.add_row(
            name,
            " ".join(model.pattern),
            str(model.depth),
            str(model.dim),
            f"{count_params(model) / 1e6:,.1f}M",
            f"{tokens / 1e9:,.0f}B" if tokens > 1e9 else f"{tokens / 1e6:,.1f}M",
        )
    Console().print(table)


BENCHMARKS = ("memory", "train", "gradients", "hierarchy", "peer", "schedule")


def bench(arguments: list[str]) -> None:
    """titans bench memory | train | gradients | hierarchy | peer | schedule [...]"""
    name, *rest = arguments or ["--help"]
    if name in ("--help", "-h"):
        print(f"usage: titans bench {' | '.join(BENCHMARKS)} [...]\n\ntitans bench NAME --help lists fields.")
        return
    if name not in BENCHMARKS:
        *others, last = BENCHMARKS
        raise ConfigError(f"there is no benchmark {name!r}; use titans bench {', '.join(others)} or {last}")
    benchmark = importlib.import_module(f"titans_jax.bench.{name}")
    options = parse(f"titans bench {name}", benchmark.Options, rest)
    _check_options(options)
    benchmark.main(options)


def study(arguments: list[str]) -> None:
    """titans study NAME [--quick ...]"""
    name, *rest = arguments or ["--help"]
    from titans_jax.studies import STUDIES, run

    if name in ("--help", "-h"):
        width = max(map(len, STUDIES))
        listed = "\n".join(f"  {name:{width}}  {study.__doc__.splitlines()[0]}" for name, study in STUDIES.items())
        print(f"usage: titans study NAME [--quick] [--field value ...]\n\n{listed}\n\nNAME may be a file that "
              "registers a study, FILE.py or FILE.py:NAME.")  # fmt: skip
        return
    plan = run.make_plan(name, rest)
    _cache_compilations()
    run.run(plan)


def runs(arguments: list[str]) -> None:
    """titans runs [FOLDER]"""
    from titans_jax.training import runs

    runs.compare_runs(parse("titans runs", runs.RunsOptions, arguments).folder)


COMMANDS = {
    "train": train, "generate": generate, "read": read, "evaluate": evaluate, "compile": compile_, "data": data,
    "export": export, "models": models, "configs": configs, "bench": bench, "study": study, "runs": runs,
}  # fmt: skip


# What commands share


def configuration(program: str, arguments: list[str], kind: type[SomeConfig] = Config) -> tuple[str, SomeConfig]:
    """The name and the validated configuration that the arguments CONFIG [--field value ...] describe.

    `kind`: Config, or a subclass with more fields, which are options of the command.

    Raises:
      ConfigError: no such configuration, an unknown field, a value of a wrong type, or fields that do not fit together.
    """
    if not arguments or arguments[0] in ("--help", "-h"):
        names = textwrap.fill(", ".join(sorted(shipped_configs())), 100, break_on_hyphens=False)
        usage = f"usage: {program} CONFIG [--field value ...]\n\n{program} CONFIG --help lists the fields."
        usage += f"\n\nCONFIG: a Python file, or one of\n{names}"
        print(usage, file=sys.stdout if arguments else sys.stderr)
        raise SystemExit(0 if arguments else 2)
    name, default = find_config(arguments[0])
    default = kind(**{f.name: getattr(default, f.name) for f in dataclasses.fields(default)})
    rest = arguments[1:]
    if rest and rest[-1] in ("--help", "-h") or rest[-2:-1] in (["--help"], ["-h"]):
        asked = None if rest[-1] in ("--help", "-h") else rest[-1]
        given = rest[: -1 if asked is None else -2]
        default = parse(f"{program} {arguments[0]}", kind, given, default)
        print(describe_fields(f"{program} {arguments[0]}", default, asked), end="")
        raise SystemExit(0)
    config = parse(f"{program} {arguments[0]}", kind, rest, default)
    validate(config)
    from titans_jax.models import check_model

    check_model(config.model)
    return name, config


def _check_options(options: Any, **least: int) -> None:
    """Refuse whole numbers in a command's options that are below 1 (or the bound of their field in `least`) or beyond
    32 bits, and lists that are empty, unless the default is."""
    for f in dataclasses.fields(options):
        value, lowest = getattr(options, f.name), least.get(f.name, 1)
        if value == () and f.default != ():
            raise ConfigError(f"{f.name} is empty; name at least one")
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, int) and not isinstance(each, bool) and not lowest <= each < 1 << 32:
                raise ConfigError(f"{f.name} is {each}; use {lowest} to {(1 << 32) - 1}")


def _load_run(folder: Path) -> "Run":
    """A trained model; checkpoints that are skipped are reported on standard error."""
    from titans_jax.training import load_run

    _quieten()
    return load_run(folder, say=lambda sentence: print(f"titans: {sentence}", file=sys.stderr))


def _no_arguments(program: str, arguments: list[str], says: str) -> None:
    """For --help, print `says` and end; refuse any other argument."""
    if arguments in (["--help"], ["-h"]):
        print(f"usage: {program}\n\n{says}")
        raise SystemExit(0)
    if arguments:
        raise ConfigError(f"{program} takes no arguments, not {' '.join(arguments)}")


def _quieten() -> None:
    """Silence Orbax' log of failed reads and writes: the user gets one sentence of ours instead."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    # Where one of its tasks has failed, the others' exceptions are logged once they are collected as garbage.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def _cache_compilations() -> None:
    """Keep compiled programs between processes, where the user's cache folder can be written."""
    import jax

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titans_jax"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if jax.config.jax_compilation_cache_dir is None:
            jax.config.update("jax_compilation_cache_dir", str(folder))
