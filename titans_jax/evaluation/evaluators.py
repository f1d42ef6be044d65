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
    """Data on which nothing can be measured."""


@dataclass(frozen=True)
class EvaluationOptions:
    """What a user may ask of every task; a task reads what means something to it."""

    batches: int | None = None
    """Batches to read at most; None reads all."""
    memory: Literal["on", "off", "fresh"] = "on"
    """`off` has been done when an evaluator is called: the run's memories are never written. `fresh` is the evaluator's
    own: one that carries a state from window to window empties it at every window; for others it is `on`."""
    length: int = 32768
    """Tokens of a long text."""
    text: Path | None = None
    """The file or folder of long texts; None is the run's validation documents."""
    samples: int | None = None
    """Questions of each kind and length, or documents; None is what the task's protocol says, or all."""
    data: Path = Path("data")
    """The folder of the data sets of tasks that read any, laid out as `titans_jax.data.sets` has them."""


Numbers = dict[str, "float | list[dict[str, float | str]]"]
"""Results by name: a number, or the rows of a table, each with the same keys."""

Evaluator = Callable[["Run", EvaluationOptions], Numbers]
"""(a trained model, what is asked) -> results by name."""

EVALUATORS: Registry[Evaluator] = Registry("evaluator")
"""Evaluators by name."""

register_evaluator: Callable[..., Callable[[Evaluator], Evaluator]] = EVALUATORS.register


@contextlib.contextmanager
def on_all_devices(run: Run) -> Iterator[Run]:
    """The run with its parameters on every device, of all processes, and, inside the `with` block, rows of batches
    shared out over them; the run as it is where there is one device, or a mesh is set, over which it lies already."""
    if jax.device_count() == 1 or not jax.sharding.get_abstract_mesh().empty:
        yield run
        return
    mesh = sharding.make_mesh()
    with sharding.use_mesh(mesh):
        yield dataclasses.replace(run, params=jax.device_put(run.params, NamedSharding(mesh, PartitionSpec())))


@contextlib.contextmanager
def kept_once(run: Run) -> Iterator[Run]:
    """The run for an evaluator that all processes call alike, each for the rows of its own devices: all have the
    results, and the first alone writes and speaks. The others' folder is thrown away behind the `with` block, with what
    they print on standard error."""
    if jax.process_index() == 0:
        yield run
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        yield dataclasses.replace(run, folder=Path(folder))
