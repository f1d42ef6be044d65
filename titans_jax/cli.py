"""The command line: titans train | generate | read | evaluate | export | compile | data | models | configs | bench ...

The commands are in `titans_jax.commands`, which `titans --help` does not import. A mistake that the user can correct
ends in one sentence and exit code 2, a run that cannot go on in one sentence and exit code 1; neither in a traceback.
"""

import os
import sys
from typing import Any

import titans_jax
from titans_jax.errors import TitansError

USAGE = """usage: titans COMMAND ...

  train CONFIG [--field value ...]   train a model; the same command goes on with a run that was stopped
  train CONFIG --dry-run             what it would be: parameters, tokens, memory, time; writes nothing
  runs [FOLDER]                      the runs in a folder compared: a table, and their losses in one picture
  generate RUN [--prompt TEXT ...]   continue a text with a trained model
  read RUN TEXT ... [--memory FILE]  read texts of any length into a memory that is kept, for generate --memory
  evaluate RUN [TASK ...] [--json]   measure a trained model: perplexity on held-out text, or the tasks named
  evaluate --list                    the tasks, the data each needs, and whether it is there
  export RUN --output FOLDER         its weights as safetensors, with tensors by name, tokenizer and model card
  compile CONFIG [--topology ...]    does it fit a TPU slice, and what does a step cost there; needs no TPU
  data CONFIG [--field value ...]    what a configuration's data holds, and one row of it
  data prepare CONFIG --output DIR   tokenize it once, into rows on disk that every start and process reads from
  data list | fetch NAME ...         the data sets that evaluations read: what is there, and fetch what is not
  models                             every memory rule by name, what it is made of, and which forms run it
  configs [CONFIG ...]               the configurations that come with the package; or all fields of one, as JSON
  bench memory | train [...]         speed and memory of the memory core, and of a training step
  bench gradients [...]              the gradient of fresh models against the length of what they read
  bench hierarchy | peer [...]       local memories beside one memory; our layers beside titans-pytorch
  bench schedule [...]               cycles that the TPU compiler schedules for the fused kernel; needs no TPU
  study NAME [--quick ...]           train the small models that a table compares, and draw it: recall, step_size, ...

CONFIG is a Python file or the name of a configuration that comes with the package (quickstart, mac_170m, ...); of a
file with several, FILE.py:NAME.
titans COMMAND --help lists a command's options; titans train CONFIG --help every field of a configuration.
titans --version says which version this is.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (cannot go on), 2 (wrong input), 130 (Ctrl-C) or 134 (another
    process has died)."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("--help", "-h"):
        print(USAGE, end="")
        return 0
    if command == "--version":
        print(f"titans_jax {titans_jax.__version__}")
        return 0
    from titans_jax.commands import COMMANDS

    if command not in COMMANDS:
        return _fail(2, f"there is no command {command}; use {', '.join(COMMANDS)}")
    try:
        COMMANDS[command](rest)
    except TitansError as error:
        return _fail(error.exit_code, str(error))
    except BrokenPipeError:
        raise  # no mistake: see `run`
    except OSError as error:
        return _fail(1, f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
    except MemoryError as error:
        return _fail(
            1, f"this machine has not enough memory ({str(error).splitlines()[0] if str(error) else 'none left'})"
        )
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _fail(1, f"the device has not enough memory ({str(error).splitlines()[0]})")
    except KeyboardInterrupt:
        return _fail(130, "interrupted")
    return 0


def _fail(code: int, sentence: str) -> int:
    print(f"titans: {sentence}", file=sys.stderr)
    return code


def run() -> None:
    """The process: `main` and its exit code.

    After a failure the process ends at once: otherwise threads of TensorStore would print tracebacks of failed writes
    after our message, which should be the last line.
    """
    hook = sys.unraisablehook

    def without_late_writes(found: Any) -> None:
        # TensorStore's threads raise this for every write that was under way when one failed.
        if (found.exc_type, str(found.exc_value)) != (RuntimeError, "Event loop is closed"):
            hook(found)

    sys.unraisablehook = without_late_writes
    try:
        code = main()
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        # Whoever read the output, such as `head`, has enough; Python would say so once more at its end.
        os._exit(141)
    if code:
        os._exit(code)


if __name__ == "__main__":
    run()
