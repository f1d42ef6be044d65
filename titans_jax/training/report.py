"""The output of a run for people: a progress bar on a terminal, plain lines in a file or pipe."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from titans_jax.errors import TitansError
from titans_jax.training.goodput import Goodput
from titans_jax.training.metrics import MetricsWriter


def say(console: Console, text: str) -> None:
    """Print the time of day and one line as it is, however long: rich would wrap it and read brackets as markup."""
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, markup=False, soft_wrap=True)


SMALLER = "try a smaller optimizer.learning_rate or model.memory.max_step_size"
"""What to do where a number is not finite."""


class TrainingStopped(TitansError, RuntimeError):
    """Training cannot go on; the message says why and from where it can."""

    exit_code = 1


def require_finite(what: str, value: float, consequence: str) -> None:
    """Raises TrainingStopped where a value is infinite or NaN."""
    if not math.isfinite(value):
        raise TrainingStopped(f"{what} is {value}, so {consequence} and training stopped; {SMALLER}")


@dataclass(frozen=True)
class RunDescription:
    """The facts about a run that its report needs."""

    steps: int
    """The last step."""
    start: int
    """The step that the run resumes from, 0 for a new one."""
    log_every: int
    """Steps from one line of metrics to the next."""
    learning_rate: Callable[[int], jax.typing.ArrayLike]
    """The schedule, by updates already made."""
    bytes_per_token: float
    """Mean over the training text; turns nats per token into bits per byte."""
    flops_per_token: float
    """Operations that training on one token costs."""
    peak_flops: float | None
    """Operations per second of all devices at their peak; None where unknown."""


class Report:
    """Reports the steps of a run: metrics, speed and time left.

    The metrics of a step are read one step later, so that the device already works on the next one.

    Args:
      console, writer: where lines for people and metrics go.
      goodput: gets the time of every step.
    """

    def __init__(self, console: Console, writer: MetricsWriter, goodput: Goodput, run: RunDescription):
        self._console, self._writer, self._goodput, self._run = console, writer, goodput, run
        self._bits = 1 / (math.log(2) * run.bytes_per_token)
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._started = 0.0  # when the device could start the pending step: compiled, and the one before it done
        self._mark: float | None = None  # when the last step was done; None: do not time the next one
        self._seconds, self._tokens = 0.0, 0.0
        self._remembered: dict[str, str] = {}
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.fields[text]}  eta"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=run.steps, completed=run.start, text="compiling")

    def step(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Take the metrics of the step that was just started: the scalars "loss", "grad_norm" and "tokens", and
        "z_loss" where it is used.

        Raises:
          TrainingStopped: the loss or the gradient norm of the step before it was not finite.
        """
        now = time.monotonic()
        self.flush()
        self._pending = (step, metrics)
        self._started = now if self._mark is None else self._mark

    def flush(self) -> None:
        """Read the metrics of the last step; raises as `step`."""
        if self._pending is None:
            return
        (step, arrays), self._pending = self._pending, None
        metrics = {name: float(value) for name, value in arrays.items()}
        now = time.monotonic()
        for name, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
            require_finite(f"the {what} of step {step}", metrics[name], "the step was not applied")
        if self._mark is not None:
            self._seconds, self._tokens = self._seconds + now - self._mark, self._tokens + metrics["tokens"]
        self._mark = now
        self._goodput.add(now - self._started)
        speed = self._tokens / self._seconds if self._seconds else None
        bits_per_byte = metrics["loss"] * self._bits
        text = f"loss {metrics['loss']:.4f}  {bits_per_byte:.3f} bits/byte"
        text += "".join(f"  {name} {value}" for name, value in self._remembered.items())
        text += f"  {speed:,.0f} tokens/s" if speed else ""
        self._bar.update(self._task, completed=step, text=text)
        if step % self._run.log_every == 0 or step == self._run.steps:
            line = {
                "loss": metrics["loss"],
                "bits_per_byte": bits_per_byte,
                **{name: metrics[name] for name in ("z_loss", "grad_norm") if name in metrics},
                "learning_rate": float(self._run.learning_rate(step - 1)),
                "tokens": metrics["tokens"],
                "goodput": self._goodput.share(),
            }
            if speed:
                line |= {"tokens_per_second": speed, "flops_per_second": speed * self._run.flops_per_token}
                if self._run.peak_flops:
                    line["share_of_peak_flops"] = line["flops_per_second"] / self._run.peak_flops
            self._writer.write("train", step, line)
            if not self._console.is_terminal:
                seconds_left = (self._run.steps - step) * metrics["tokens"] / speed if speed else None
                self.say(f"step {step}/{self._run.steps}  {text}" + (f"  eta {seconds_left:,.0f} s" if speed else ""))
            self._seconds, self._tokens = 0.0, 0.0

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl that is not about training speed."""
        self._writer.write(kind, step, values)

    def remember(self, name: str, value: str) -> None:
        """Show a number that is measured only now and then with every step, until its next measurement."""
        self._remembered[name] = value

    def pause(self) -> None:
        """Do not count the time since the last step: something else than training took it."""
        self._mark = None

    def say(self, text: str) -> None:
        """Print one line, above the progress bar."""
        say(self._console, text)

    def __enter__(self) -> "Report":
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()
