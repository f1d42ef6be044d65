"""What a run tells the person who watches it: a progress bar on a terminal, plain lines elsewhere."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from titans_jax.errors import TitansError
from titans_jax.training.goodput import Goodput
from titans_jax.training.metrics import MetricsWriter


def say(console: Console, text: str) -> None:
    """Print one line as it is, however long: rich would wrap it and read brackets as markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


class TrainingStopped(TitansError, RuntimeError):
    """Training cannot go on; the message says why and from where it can."""

    exit_code = 1


class Report:
    """Follows the steps of a run.

    The metrics of a step are read one step later, so that the device already works on the next one.

    steps, start: last step of the run, and the step it resumes from.
    learning_rate: the schedule, by updates already made.
    bytes_per_token: of the training text, turns nats per token into bits per byte.
    flops_per_token, peak_flops: operations a token costs in training, and what the devices could do in a second.
    goodput: told how long every step took.
    """

    def __init__(
        self,
        console: Console,
        writer: MetricsWriter,
        *,
        steps: int,
        start: int,
        log_every: int,
        learning_rate: Callable[[int], jax.typing.ArrayLike],
        bytes_per_token: float,
        flops_per_token: float,
        peak_flops: float | None,
        goodput: Goodput,
    ):
        self._console, self._writer, self._log_every, self._steps = console, writer, log_every, steps
        self._learning_rate = learning_rate
        self._bits = 1 / (math.log(2) * bytes_per_token)
        self._flops_per_token, self._peak_flops, self._goodput = flops_per_token, peak_flops, goodput
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._begun = 0.0  # when the device could begin with the pending step: compiled, and the one before it done
        self._mark: float | None = None  # when the last step was done; None: do not time the next one
        self._seconds, self._tokens = 0.0, 0.0
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.fields[text]}  eta"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=start, text="compiling")

    def step(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Take the metrics of a step that was just started.

        Raises:
          TrainingStopped: the loss or the gradient norm of the step before it was not finite.
        """
        begun = time.monotonic()
        self.flush()
        self._pending = (step, metrics)
        self._begun = begun if self._mark is None else self._mark

    def flush(self) -> None:
        """Read the metrics of the last step; raises as `step`."""
        if self._pending is None:
            return
        (step, arrays), self._pending = self._pending, None
        metrics = {name: float(value) for name, value in arrays.items()}
        now = time.monotonic()
        for name, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
            if not math.isfinite(metrics[name]):
                raise TrainingStopped(
                    f"the {what} of step {step} is {metrics[name]}, so the step was not applied and training stopped; "
                    "try a smaller optimizer.learning_rate or model.memory.max_step_size"
                )
        if self._mark is not None:
            self._seconds, self._tokens = self._seconds + now - self._mark, self._tokens + metrics["tokens"]
        self._mark = now
        self._goodput.add(now - self._begun)
        speed = self._tokens / self._seconds if self._seconds else None
        bits_per_byte = metrics["loss"] * self._bits
        text = f"loss {metrics['loss']:.4f}  {bits_per_byte:.3f} bits/byte"
        text += f"  {speed:,.0f} tokens/s" if speed else ""
        self._bar.update(self._task, completed=step, text=text)
        if step % self._log_every == 0 or step == self._steps:
            line = {
                "loss": metrics["loss"],
                "bits_per_byte": bits_per_byte,
                "grad_norm": metrics["grad_norm"],
                "learning_rate": float(self._learning_rate(step - 1)),
                "tokens": metrics["tokens"],
                "goodput": self._goodput.share(),
            }
            if speed:
                line |= {"tokens_per_second": speed, "flops_per_second": speed * self._flops_per_token}
                if self._peak_flops:
                    line["share_of_peak_flops"] = line["flops_per_second"] / self._peak_flops
            self._writer.write("train", step, line)
            if not self._console.is_terminal:
                seconds_left = (self._steps - step) * metrics["tokens"] / speed if speed else None
                self.say(f"step {step}/{self._steps}  {text}" + (f"  eta {seconds_left:,.0f} s" if speed else ""))
            self._seconds, self._tokens = 0.0, 0.0

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """A line of metrics.jsonl that is not about training speed."""
        self._writer.write(kind, step, values)

    def pause(self) -> None:
        """Do not count the time since the last step: something else than training took it."""
        self._mark = None

    def say(self, text: str) -> None:
        """One line for the person, above the bar."""
        say(self._console, text)

    def __enter__(self) -> "Report":
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()
