"""Checkpoints of a run: parameters, optimizer state, data position and configuration, written by Orbax.

Orbax writes each step into a temporary folder that it renames when all is written, or writes it in place with a marker
file last, so a checkpoint is whole or absent; older ones are removed only after that. This module adds what Orbax lacks
(checksums, a check that parameters are finite) and messages: what was skipped and why, and what does not fit.
"""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import titans_jax
from titans_jax.config import Config, ConfigError, from_saved, to_saved
from titans_jax.config.validate import check_types
from titans_jax.errors import TitansError
from titans_jax.sharding import processes
from titans_jax.training.checksums import damage, items_of, write_checksums

FORMAT = 2
"""Format of what is saved beside the arrays. Format 1 has no format number, version, text identity or checksums."""
SECTIONS = ("model", "data", "optimizer", "training")
"""Sections that a saved configuration has in every format."""
MODES = {"rename": ocp.options.AtomicityMode.ATOMIC_RENAME, "file": ocp.options.AtomicityMode.COMMIT_FILE}
"""Orbax' mode by `training.checkpoint_commit`."""
COMMITTED = "commit_success.txt"
"""The file that Orbax writes last in a checkpoint, in the mode "file"."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, a full quota, and a file that is too large."""


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds beside its arrays."""

    step: int
    config: Config
    data: Any
    """What `TrainBatches.get_state` returned; None in a run folder that `titans export` wrote."""
    text: dict[str, Any] | None
    """What `data.identify` returned; None there and in a checkpoint of format 1."""
    goodput: dict[str, float] | None
    """What `Goodput.get_state` returned; None there and in old ones."""


class CheckpointError(TitansError, RuntimeError):
    """A checkpoint that cannot be written or read. The message says what is still safe."""

    exit_code = 1


class NotFinite(TitansError, ArithmeticError):
    """Arrays that hold NaN or infinity. The message names one, to be put into a sentence."""


class Damaged(Exception):
    """A checkpoint whose files are not what was written. The message says what is wrong, to be put into a sentence."""


class Checkpoints:
    """The checkpoints below one folder.

    Args:
      kept: how many of the latest checkpoints stay on disk; None to read only.
      commit: `training.checkpoint_commit`. Any value will do to read only: where one checkpoint has the file that says
        that it is whole, those without it are none.
      say: called with one sentence about every checkpoint that is skipped.
    """

    def __init__(
        self, folder: Path, *, kept: int | None = None, say: Callable[[str], None] = print, commit: str = "rename"
    ):
        self._folder, self._say = folder, say
        self._saved: int | None = None
        self._mode = MODES[commit]
        self._unfinished = [step for step, _ in self._not_whole()]
        options = ocp.CheckpointManagerOptions(
            max_to_keep=kept,
            cleanup_tmp_directories=kept is not None,
            atomicity_options=ocp.options.AtomicityOptions(mode=self._mode),
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
        )
        items = ("params", "optimizer", "ema", "run")
        self._manager = ocp.CheckpointManager(folder.absolute(), item_names=items, options=options)

    def save(
        self,
        step: int,
        state: dict[str, Any],
        config: Config,
        data_position: dict[str, Any] | None,
        text: dict[str, Any] | None,
        goodput: dict[str, float] | None,
    ) -> None:
        """Write a step's state in the background; its arrays may be donated as soon as this returns.

        Args:
          state: {"params", "optimizer"}, and "ema" where there is one, trees of arrays.
          data_position, text, goodput: what `TrainBatches.get_state`, `data.identify` and `Goodput.get_state` return;
            None for weights from which no run goes on.

        Raises:
          CheckpointError: this save, or the one before it, failed.
          NotFinite: an array is not finite; nothing was written.
        """
        check_finite(state)
        run = {
            "format": FORMAT,
            "version": titans_jax.__version__,
            "step": step,
            "data": data_position,
            "text": text,
            "config": to_saved(config),
            "goodput": goodput,
        }
        items = {name: ocp.args.StandardSave(tree) for name, tree in state.items()}
        arguments = ocp.args.Composite(**items, run=ocp.args.JsonSave(run))
        with self._writing():
            self._manager.wait_until_finished()
            self._saved = step
            self._manager.save(step, args=arguments, force=True)

    def check(self) -> None:
        """Raise as `save` if the save in the background has failed; returns at once."""
        with self._writing():
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Return when everything is on disk; raises as `save`."""
        with self._writing():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise many types, OSError and ValueError among them
            if processes.of_devices(error):  # a device failed, or another process died
                raise
            whole = self.steps()
            safe = f"the checkpoint of step {whole[0]} is whole" if whole else "there is no earlier checkpoint"
            then = "free some space and run" if _error_number(error) in FULL else "when it can be, run"
            raise CheckpointError(
                f"the checkpoint of step {self._saved} could not be written to {self._folder} ({_cause(error)}); "
                f"{safe}; {then} the same command again to go on from there"
            ) from error

    def _write_checksums(self) -> None:
        """Called by Orbax when a step's files are written but its folder does not count as a checkpoint yet."""
        if jax.process_index() == 0:
            for step, folder in self._not_whole():
                if step == self._saved:
                    write_checksums(folder)

    def _not_whole(self) -> list[tuple[int, Path]]:
        """Steps that are being written, or whose writing was interrupted, and their folders."""
        if self._mode is MODES["rename"]:
            folders = self._folder.absolute().glob("*.orbax-checkpoint-tmp*")
        else:
            folders = (each for each in self._folder.absolute().glob("*") if not (each / COMMITTED).exists())
        return sorted((int(step), each) for each in folders if (step := each.name.split(".")[0]).isdigit())

    def steps(self, resume_from: int | None = None) -> list[int]:
        """Steps with a complete checkpoint, the latest first.

        resume_from: where given, only this step, earlier ones, and later ones saved by a run with this
        `training.resume_from`.

        Raises:
          ConfigError: there are checkpoints, but neither of step `resume_from` nor of a run that went on from it.
        """
        self._manager.reload()
        steps = sorted(self._manager.all_steps(), reverse=True)
        if committed := [step for step in steps if (self._folder / str(step) / COMMITTED).exists()]:
            steps = committed
        if resume_from is None or not steps:
            return steps
        # That step itself may be deleted by now.
        gone_on = [step for step in steps if step > resume_from and self._resumed_from(step) == resume_from]
        if resume_from not in steps and not gone_on:
            raise ConfigError(
                f"training.resume_from is {resume_from}, but the checkpoints in {self._folder} are of "
                f"{' and '.join(map(str, sorted(steps)))}; use one of them"
            )
        return [step for step in steps if step <= resume_from or step in gone_on]

    def latest(self, resume_from: int | None = None) -> Saved | None:
        """What the latest checkpoint that can be read holds beside its arrays; None without checkpoints.

        Raises:
          CheckpointError: as `restore`.
          ConfigError: as `steps`.
        """
        steps = self.steps(resume_from)
        for step in steps:
            try:
                return self._read(step)
            except CheckpointError:
                raise
            except Exception:  # `restore` says so
                continue
        if steps:
            raise self._none_can_be_read()
        return None

    def restore(self, abstract: dict[str, Any], resume_from: int | None = None) -> tuple[dict[str, Any], Saved] | None:
        """The state of the latest checkpoint that can be read, and what it holds beside it; None without checkpoints.

        Files that are not what was written, and arrays that are not finite, count as one that cannot be read.

        Args:
          abstract: some of {"params", "optimizer", "ema"}, trees of jax.ShapeDtypeStruct that say where arrays go.
          resume_from: as in `steps`.

        Raises:
          CheckpointError: there are checkpoints and none can be read, a later version wrote one, or one was written
            without what is asked for.
          ConfigError: as `steps`.
        """
        steps = self.steps(resume_from)
        for step in self._unfinished:
            self._say(f"the checkpoint of step {step} was not finished; " + _instead([s for s in steps if s != step]))
        for i, step in enumerate(steps):
            try:
                saved = self._read(step)
                self._check_items(step, list(abstract))
                self._check_files(step, list(abstract))
                items = {name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}
                state = dict(self._manager.restore(step, args=ocp.args.Composite(**items)).items())
                check_finite(state)
                return state, saved
            except Exception as error:
                if isinstance(error, CheckpointError) or processes.of_devices(error):  # not the files' fault
                    raise
                self._say(
                    f"the checkpoint of step {step} cannot be read ({_cause(error)}); " + _instead(steps[i + 1 :])
                )
        if steps:
            raise self._none_can_be_read()
        return None

    def set_aside(self, after: int) -> None:
        """Move checkpoints later than step `after`, from which the run continues, out of the way of new ones."""
        aside = self._folder.parent / "checkpoints_set_aside"
        later = [step for step in self.steps() if step > after]
        with processes.together():
            for step in later if jax.process_index() == 0 else []:
                aside.mkdir(exist_ok=True)
                there = len([*aside.glob(f"{step}*")])
                (self._folder / str(step)).rename(aside / (f"{step}_{there}" if there else str(step)))
        self._manager.reload()

    def _read(self, step: int) -> Saved:
        """What a checkpoint holds beside its arrays.

        Raises:
          Damaged: it cannot be read.
          CheckpointError: a later version wrote it.
        """
        self._check_files(step, ["run"])
        run = self._run(step)
        by = f"titans_jax {run['version']}" if "version" in run else "another version"
        wrote = f"the checkpoint of step {step} in {self._folder} was written by {by}"
        if run.get("format", 1) > FORMAT:
            raise CheckpointError(
                f"{wrote} in format {run['format']}, and this version, {titans_jax.__version__}, reads formats up to "
                f"{FORMAT}; use that version"
            )
        for section in SECTIONS:
            if not isinstance(run["config"].get(section), dict) or not run["config"][section]:
                raise Damaged(f"its configuration has no {section}")
        try:
            config = from_saved(run["config"])
        except ConfigError as error:
            raise CheckpointError(
                f"{wrote}, and this version, {titans_jax.__version__}, does not know all of its configuration "
                f"({str(error).partition(';')[0]}); use that version, or a later one"
            ) from error
        try:
            check_types(config)
        except ConfigError as error:
            raise Damaged(f"in its configuration, {error}") from error
        return Saved(step, config, run.get("data"), run.get("text"), run.get("goodput"))

    def _run(self, step: int) -> dict[str, Any]:
        try:
            run = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run
        except Exception as error:
            raise Damaged(_cause(error)) from error
        if not isinstance(run, dict) or not isinstance(run.get("config"), dict):
            raise Damaged("it holds no configuration")
        return run

    def _resumed_from(self, step: int) -> int | None:
        with contextlib.suppress(Damaged):
            return self._run(step)["config"].get("training", {}).get("resume_from")
        return None

    def _check_items(self, step: int, items: list[str]) -> None:
        """Raise CheckpointError where a checkpoint was written without an item, as `titans export --format orbax`
        does."""
        there = items_of(self._folder / str(step))
        if there is not None and not there.issuperset(items):
            raise CheckpointError(
                f"the checkpoint of step {step} in {self._folder} has no optimizer state, as titans export writes it; "
                f"begin another run with its weights, by training.init_from {self._folder.parent}"
            )

    def _check_files(self, step: int, items: list[str]) -> None:
        """Raise Damaged in all processes if the first one finds files that are not what was written."""
        found = damage(self._folder / str(step), items) if jax.process_index() == 0 else None
        if jax.process_count() > 1 and processes.first_says(found is not None):
            found = found or "process 0 found files that are not what was written"
        if found:
            raise Damaged(found)

    def _none_can_be_read(self) -> CheckpointError:
        return CheckpointError(f"none of the checkpoints in {self._folder} can be read; start in another run folder")

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind and jax.process_count() > 1:
            return  # closing waits for the other processes, which may be gone
        with self._writing():
            self._manager.close()


def check_finite(state: dict[str, Any]) -> None:
    """Refuse a state that holds NaN or infinity.

    Raises:
      NotFinite: names an array that does.
    """
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(state)]
    wrong = [name for name, finite in zip(names, np.asarray(_finite(state)), strict=True) if not finite]
    if wrong:
        raise NotFinite(f"{wrong[0]} is not finite" + (f", nor are {len(wrong) - 1} other arrays" * (len(wrong) > 1)))


@jax.jit
def _finite(state: Any) -> jax.Array:
    """Whether each array of a tree is finite everywhere, bool [arrays]."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(state)])


def abstract_like(state: Any) -> Any:
    """Shapes, dtypes and shardings of a state of arrays, to restore into."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def _instead(steps: list[int]) -> str:
    return f"using the one of step {steps[0]}" if steps else "there is no earlier one"


def _cause(error: Exception) -> str:
    """The cause in words, without the many layers of TensorStore's message."""
    if (number := _error_number(error)) is not None:
        return os.strerror(number)
    text = str(error).partition(". See full TensorStore details")[0].strip() or type(error).__name__
    return text.splitlines()[0][:200]


def _error_number(error: Exception) -> int | None:
    """The operating system's number of a failure, which TensorStore has in the text of its error only."""
    code = re.search(r"os_error_code='(\d+)'", str(error))  # what stands around it varies
    return int(code[1]) if code else getattr(error, "errno", None)
