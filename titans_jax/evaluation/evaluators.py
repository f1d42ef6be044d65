"""Evaluators: tasks that a trained model is measured on, by name.

    @register_evaluator("word_count")
    def word_count(run: Run, options: EvaluationOptions) -> Numbers: ...

`titans evaluate RUN word_count` runs it on a run whose configuration file, or another of its extensions, registers it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import jax
from jax.sharding import NamedSharding, PartitionSpec

from titans_jax import sharding
from titans_jax.errors import TitansError
from titans_jax.registry import Registry

if TYPE_CHECKING:
    from titans_jax.training import Run


class EvaluationError(TitansError, ValueError):
    """Data or options with which nothing can be measured."""


@dataclass(frozen=True)
class EvaluationOptions:
    """The options of all tasks; a task reads those that it uses."""

    batches: int | None = None
    """Batches to read at most; None reads all."""
    memory: Literal["on", "off", "fresh"] = "on"
    """`off`: memories are never written; the run that an evaluator gets is already changed so. `fresh`: an evaluator
    that carries a state from window to window begins every window with an empty one; for others it is the same as
    `on`."""
    length: int = 32768
    """Tokens of a long text."""
    text: Path | None = None
    """A file or folder of long texts; None: the run's validation documents."""
    samples: int | None = None
    """Questions of each kind and length, or documents; None: the number of the task's protocol, or all."""
    data: Path = Path("data")
    """The folder of data sets, for tasks that read any, laid out as in `titans_jax.data.sets`."""


Numbers = dict[str, "float | list[dict[str, float | str]]"]
"""Results by name: a number, or the rows of a table, each with the same keys."""

Evaluator = Callable[["Run", EvaluationOptions], Numbers]
"""(a trained model, options) -> results by name."""

EVALUATORS: Registry[Evaluator] = Registry("evaluator")
"""Evaluators by name."""

register_evaluator: Callable[..., Callable[[Evaluator], Evaluator]] = EVALUATORS.register


@contextlib.contextmanager
def on_all_devices(run: Run) -> Iterator[Run]:
    """The run with its parameters copied to every device of all processes; inside the `with` block rows of batches are
    shared out over them. With a single device, or where a mesh is already set, the run is returned unchanged."""
    if jax.device_count() == 1 or not jax.sharding.get_abstract_mesh().empty:
        yield run
        return
    mesh = sharding.make_mesh()
    with sharding.use_mesh(mesh):
        yield dataclasses.replace(run, params=jax.device_put(run.params, NamedSharding(mesh, PartitionSpec())))


@contextlib.contextmanager
def kept_once(run: Run) -> Iterator[Run]:
    """The run, changed so that only the first process writes and prints. All processes call the evaluator, each for the
    rows of its own devices, and all have the results; the others get a temporary folder, which is removed after the
    `with` block, and what they print on standard error is dropped."""
    if jax.process_index() == 0:
        yield run
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        yield dataclasses.replace(run, folder=Path(folder))
