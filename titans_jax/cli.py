"""The command line: titans train | generate | evaluate | compile | bench | models | configs | data.

Everything heavy is imported by the command that needs it, so `titans --help` answers at once. A user's mistake ends in
one sentence and exit code 2, a run that cannot go on in one sentence and exit code 1; neither in a traceback.
"""

import contextlib
import dataclasses
import importlib
import json
import logging
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titans_jax.config import Config, ConfigError, MeshConfig
from titans_jax.config.command_line import parse
from titans_jax.config.validate import validate

USAGE = """usage: titans COMMAND ...

  train CONFIG [--field value ...]   train a model; the same command goes on with a run that was stopped
  generate RUN [--prompt TEXT ...]   continue a text with a trained model
  evaluate RUN [--json True ...]     loss, bits per byte and perplexity on held-out text
  compile CONFIG [--topology ...]    does it fit a TPU slice, and what does a step cost there; needs no TPU
  data CONFIG [--field value ...]    what a configuration's data holds, and one row of it
  models                             every memory rule by name: Table 1 of Miras, from the code
  configs                            the configurations that come with the package
  bench memory | train [...]         speed and memory of the memory core, and of a training step
  bench schedule [...]               cycles that the TPU compiler schedules for the fused kernel; needs no TPU
  bench recall [...]                 how many facts each kind of memory keeps, against the size of its state

CONFIG is a Python file or the name of a configuration that comes with the package (quickstart, mac_170m, ...).
titans COMMAND --help lists a command's options; titans train CONFIG --help every field of a configuration.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (cannot go on) or 2 (wrong input)."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("--help", "-h"):
        print(USAGE, end="")
        return 0
    if command not in COMMANDS:
        return _fail(2, f"there is no command {command}; use {', '.join(COMMANDS)}")
    try:
        COMMANDS[command](rest)
    except OSError as error:
        return _fail(1, f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        return _fail(code, str(error))
    return 0


def _exit_code(error: Exception) -> int | None:
    """Exit code of an error that is the user's to solve; None for any other."""
    if isinstance(error, ConfigError):
        return 2
    # By name: these modules are imported only if the command got as far as raising from them.
    codes = {"DataError": 2, "CheckpointError": 1, "TrainingStopped": 1, "EvaluationError": 2, "ProcessesError": 1}
    return codes.get(type(error).__name__)


def _fail(code: int, sentence: str) -> int:
    print(f"titans: {sentence}", file=sys.stderr)
    return code


# Commands


def train(arguments: list[str]) -> None:
    """titans train CONFIG [--field value ...]"""
    config, name = configuration("titans train", arguments)
    _cache_compilations()
    from titans_jax import sharding
    from titans_jax.sharding import processes
    from titans_jax.training import train

    processes.start(config.processes)
    if config.mesh == MeshConfig():
        sharding.use_cores(config.data.batch_size // config.training.gradient_accumulation)

    # Orbax logs every failed write with its traceback; what the user needs of it comes as the sentence of an error.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    train(config, Path(config.training.run_dir or f"runs/{name}"))


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a text with a trained model; the text streams to the terminal."""

    prompt: str = ""
    """Text to continue; empty begins a document."""
    max_tokens: int = 512
    """Tokens to write at most; the model may end the document before."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the most likely token."""
    top_k: int | None = None
    """Draw from the k most likely tokens only."""
    top_p: float | None = None
    """Draw from the fewest most likely tokens whose probabilities reach p."""
    seed: int = 0
    """The same seed gives the same text."""


def generate(arguments: list[str]) -> None:
    """titans generate RUN [--prompt TEXT ...]"""
    run_dir, options = _run_and_options("titans generate", GenerateOptions, arguments)
    _cache_compilations()
    from titans_jax.inference import Generator, Sampling
    from titans_jax.training import load_run

    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    run = load_run(run_dir, say=lambda sentence: print(f"titans: {sentence}", file=sys.stderr))
    generator = Generator(run.graphdef, run.tokenizer, sampling)
    print(options.prompt, end="", flush=True)
    for text in generator.stream(run.params, options.prompt, options.max_tokens, options.seed):
        print(text, end="", flush=True)
    print()


@dataclass(frozen=True)
class EvaluateOptions:
    """Loss, bits per byte and perplexity of a trained model on the held-out text of its run."""

    batches: int | None = None
    """Validation batches to read; None reads all."""
    json: bool = False
    """Print one JSON object instead of lines."""


def evaluate(arguments: list[str]) -> None:
    """titans evaluate RUN [--json True ...]"""
    run_dir, options = _run_and_options("titans evaluate", EvaluateOptions, arguments)
    _cache_compilations()
    from titans_jax.evaluation import evaluate_run
    from titans_jax.training import load_run

    run = load_run(run_dir, say=lambda sentence: print(f"titans: {sentence}", file=sys.stderr))
    result = evaluate_run(run, options.batches)
    numbers = {
        "step": run.step,
        "loss": result.loss,
        "bits_per_byte": result.bits_per_byte,
        "perplexity": result.perplexity,
        "tokens": result.tokens,
        "bytes": result.bytes,
    }
    if options.json:
        print(json.dumps(numbers))
    else:
        print("\n".join(f"{name.replace('_', ' '):14}{value:,.6g}" for name, value in numbers.items()))


def data(arguments: list[str]) -> None:
    """titans data CONFIG [--field value ...]"""
    config, _ = configuration("titans data", arguments)
    from titans_jax import data as pipeline
    from titans_jax.models.language_model import granularity

    tokenizer = pipeline.load_tokenizer(config.data.tokenizer)
    align = granularity(config.model)
    training = pipeline.train_batches(config.data, tokenizer, align=align)
    with contextlib.closing(training):
        print(f"training:   {training.statistics}")
        validation = pipeline.validation_batches(config.data, tokenizer, align=align)
        print(f"validation: {validation.statistics}")
        row = next(training)["tokens"][0]
    print(f"the first row begins: {tokenizer.decode(row)[:300]!r}")


def compile_(arguments: list[str]) -> None:
    """titans compile CONFIG [--topology v5p:8x8x8 ...] [--field value ...]"""
    import jax

    jax.config.update("jax_platforms", "cpu")  # where there are TPUs, they are none of this command's business
    from titans_jax.tpu.command import Options, main

    own = {field.name for field in dataclasses.fields(Options)}
    groups: list[list[str]] = [[]]
    for argument in arguments:
        if argument.startswith("--"):
            groups.append([])
        groups[-1].append(argument)
    is_own = [group[:1] != [] and group[0].partition("=")[0].removeprefix("--") in own for group in groups]
    fields = [argument for group, mine in zip(groups, is_own, strict=True) if not mine for argument in group]
    options = [argument for group, mine in zip(groups, is_own, strict=True) if mine for argument in group]
    config, name = configuration("titans compile", fields, reads_data=False)
    main(config, name, parse(f"titans compile {name}", Options, options, Options()))


def models(arguments: list[str]) -> None:
    """titans models"""
    _no_arguments("titans models", arguments)
    from rich.console import Console
    from rich.table import Table

    from titans_jax.layers.memory_gates import GATES, gates_given
    from titans_jax.memory import FORMS, choose_form
    from titans_jax.memory.rule import presets

    head_dim = 64
    table = Table(
        "preset", "memory", "bias", "retention", "its gates", "algorithm", "floats a head", "exact", "auto on a TPU",
        caption=f"floats of a {head_dim}-wide head; exact: the parallel forms give the token-by-token rule, not that "
        f"of chunks; forms that run them all: {', '.join(form for form in FORMS if form != 'fused')}",
    )  # fmt: skip
    for name, make in presets.PRESETS.items():
        rule, choices = make(), GATES[name]
        gates = [choices.retention] * (choices.retention != "keep")
        gates += [f"{side} channels" for side in ("key", "value") if getattr(choices, side)]
        four = (_words(choice) for choice in (rule.architecture, rule.bias, rule.retention, rule.algorithm))
        memory, bias, retention, algorithm = four
        floats, exact = f"{presets.state_floats(rule, head_dim):,}", "yes" if rule.exact else "no"
        form = choose_form("auto", rule, gates_given(rule, choices), "tpu")
        retention, gates = retention if gates else "none", ", ".join(gates)
        table.add_row(name, memory, bias, retention, gates, algorithm, floats, exact, form)
    Console().print(table)


def _words(choice: Any) -> str:
    """A choice of a rule in words: its name, and its fields that are not at their defaults."""
    name = re.sub("(?<=[a-z])(?=[A-Z])", " ", type(choice).__name__).lower()
    changed = [f for f in dataclasses.fields(choice) if getattr(choice, f.name) != f.default]
    return ", ".join([name] + [f"{f.name} {getattr(choice, f.name)}".replace("_", " ") for f in changed])


def configs(arguments: list[str]) -> None:
    """titans configs"""
    _no_arguments("titans configs", arguments)
    from rich.console import Console
    from rich.table import Table

    from titans_jax.training.run import count_params

    table = Table("configuration", "blocks", "depth", "width", "parameters")
    for file in sorted(shipped_configs().glob("*.py")):
        model = load_config(file).model
        table.add_row(
            file.stem, " ".join(model.pattern), str(model.depth), str(model.dim), f"{count_params(model) / 1e6:,.1f}M"
        )
    Console().print(table)


def bench(arguments: list[str]) -> None:
    """titans bench memory | train | schedule | recall [...]"""
    name, *rest = arguments or [""]
    if name not in ("memory", "train", "schedule", "recall"):
        raise ConfigError(f"there is no benchmark {name!r}; use titans bench memory, train, schedule or recall")
    importlib.import_module(f"titans_jax.bench.{name}").main(rest)


COMMANDS = {
    "train": train, "generate": generate, "evaluate": evaluate, "compile": compile_, "data": data, "models": models,
    "configs": configs, "bench": bench,
}  # fmt: skip


# Arguments


def configuration(program: str, arguments: list[str], *, reads_data: bool = True) -> tuple[Config, str]:
    """The configuration that arguments CONFIG [--field value ...] describe, valid; and its name.

    `reads_data`: the command needs the configuration's data to be there.

    Raises:
      ConfigError: no such configuration, an unknown field, a value of a wrong type, or fields that do not fit together.
    """
    if not arguments or arguments[0] in ("--help", "-h"):
        print(f"usage: {program} CONFIG [--field value ...]\n\nCONFIG: a Python file, or one of {_shipped_names()}")
        raise SystemExit(0 if arguments else 2)
    file = find_config(arguments[0])
    config = parse(f"{program} {arguments[0]}", Config, arguments[1:], load_config(file))
    validate(config, reads_data=reads_data)
    return config, file.stem


def _no_arguments(program: str, arguments: list[str]) -> None:
    if arguments:
        raise ConfigError(f"{program} takes no arguments, not {' '.join(arguments)}")


def _run_and_options(program: str, kind: type, arguments: list[str]) -> tuple[Path, Any]:
    if not arguments or arguments[0].startswith("-"):
        print(f"usage: {program} RUN [--field value ...]\n\nRUN: the folder that training wrote\n", file=sys.stderr)
        parse(f"{program} RUN", kind, ["--help"], kind())
    return Path(arguments[0]), parse(f"{program} {arguments[0]}", kind, arguments[1:], kind())


# Configurations


def shipped_configs() -> Path:
    """Folder of the configurations that come with the package: inside it in a wheel, beside it in a checkout."""
    package = Path(__file__).parent
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


def _shipped_names() -> str:
    return ", ".join(sorted(file.stem for file in shipped_configs().glob("*.py")))


def find_config(name: str) -> Path:
    """The file that is meant: a path, or the name of a shipped configuration.

    Raises:
      ConfigError: there is no such file.
    """
    for file in (Path(name), shipped_configs() / f"{Path(name).stem}.py"):
        if file.is_file():
            return file
    raise ConfigError(f"there is no configuration {name}; use a Python file, or one of {_shipped_names()}")


def load_config(file: Path) -> Config:
    """The `config` of a Python file: a Config, or a function without arguments that returns one.

    Raises:
      ConfigError: the file fails, or defines no such thing.
    """
    import runpy

    try:
        config = runpy.run_path(str(file)).get("config")
        config = config() if callable(config) else config
    except Exception as error:
        raise ConfigError(f"{file} fails with {type(error).__name__}: {error}") from error
    if not isinstance(config, Config):
        raise ConfigError(f"{file} defines no configuration; write config = titans_jax.config.Config(...) in it")
    return config


def _cache_compilations() -> None:
    """Keep compiled programs between processes, where the user's cache folder can be written."""
    import jax

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titans_jax"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if jax.config.jax_compilation_cache_dir is None:
            jax.config.update("jax_compilation_cache_dir", str(folder))


def run() -> None:
    """The process: `main` and its exit code.

    A failure ends at once: threads of TensorStore would print the tracebacks of failed writes behind the sentence that
    is to be read last.
    """
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)


if __name__ == "__main__":
    run()
