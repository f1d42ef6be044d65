"""Checkpoints of a run: parameters, optimizer state, data position and configuration, written by Orbax.

Orbax writes each step into a temporary folder and renames it when it is complete, so a checkpoint is whole or absent;
older ones are removed only after that. This module adds the words: what was skipped and why, what does not fit.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from titans_jax.config import Config, ConfigError, from_saved, leaves, to_dict
from titans_jax.errors import TitansError
from titans_jax.sharding import processes

# Fields of model and data that a run may change when it resumes: they alter speed or place, not meaning.
MAY_CHANGE = frozenset({"model.remat", "model.memory.form", "data.path", "data.validation_path"})


class CheckpointError(TitansError, RuntimeError):
    """A checkpoint that cannot be written or read. The message says what is still safe."""

    exit_code = 1


class Checkpoints:
    """The checkpoints below one folder.

    Args:
      kept: how many of the latest checkpoints stay on disk; None to read only.
      say: told, in one sentence, about every checkpoint that is skipped.
    """

    def __init__(self, folder: Path, *, kept: int | None = None, say: Callable[[str], None] = print):
        self._folder, self._say = folder, say
        self._saved: int | None = None
        unfinished = sorted(path.name.split(".")[0] for path in folder.glob("*.orbax-checkpoint-tmp*"))
        self._unfinished = [int(step) for step in unfinished if step.isdigit()]
        options = ocp.CheckpointManagerOptions(max_to_keep=kept, cleanup_tmp_directories=kept is not None)
        items = ("params", "optimizer", "run")
        self._manager = ocp.CheckpointManager(folder.absolute(), item_names=items, options=options)

    def save(
        self,
        step: int,
        state: dict[str, Any],
        data_position: dict[str, Any],
        config: Config,
        goodput: dict[str, float],
    ) -> None:
        """Write a step's state in the background; its arrays may be donated as soon as this returns.

        Args:
          state: {"params", "optimizer"}, trees of arrays.
          data_position, goodput: what `TrainBatches.get_state` and `Goodput.get_state` return.

        Raises:
          CheckpointError: this save, or the one before it, failed.
        """
        run = {"step": step, "data": data_position, "config": to_dict(config), "goodput": goodput}
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
        except jax.errors.JaxRuntimeError:  # a device failed, or another process died
            raise
        except Exception as error:  # Orbax and TensorStore raise many types, OSError and ValueError among them
            whole = self.steps()
            safe = f"the checkpoint of step {whole[0]} is whole" if whole else "there is no earlier checkpoint"
            raise CheckpointError(
                f"the checkpoint of step {self._saved} could not be written to {self._folder} ({_cause(error)}); "
                f"{safe}; free some space and run the same command again to go on from there"
            ) from error

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, the latest first."""
        self._manager.reload()
        return sorted(self._manager.all_steps(), reverse=True)

    def config(self) -> Config | None:
        """The configuration in the latest checkpoint that can be read; None without checkpoints."""
        for step in self.steps():
            try:
                return from_saved(self._run(step)["config"])
            except Exception:  # `restore` says so
                continue
        return None

    def restore(self, abstract: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """(state, {"step", "data", "config", "goodput"}) of the latest checkpoint that can be read, or None.

        Args:
          abstract: {"params"} or {"params", "optimizer"}, trees of jax.ShapeDtypeStruct that say where arrays go.

        Raises:
          CheckpointError: there are checkpoints and none can be read.
        """
        steps = self.steps()
        for step in self._unfinished:
            self._say(f"the checkpoint of step {step} was not finished; " + _instead([s for s in steps if s != step]))
        for i, step in enumerate(steps):
            try:
                run = self._run(step)
                items = {name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}
                return dict(self._manager.restore(step, args=ocp.args.Composite(**items)).items()), run
            except jax.errors.JaxRuntimeError:  # not the checkpoint's fault
                raise
            except Exception as error:
                self._say(
                    f"the checkpoint of step {step} cannot be read ({_cause(error)}); " + _instead(steps[i + 1 :])
                )
        if steps:
            raise CheckpointError(f"none of the checkpoints in {self._folder} can be read; start in another run folder")
        return None

    def set_aside(self, after: int) -> None:
        """Move checkpoints later than step `after`, which could not be read, out of the way of new ones."""
        aside = self._folder.parent / "unreadable_checkpoints"
        later = [step for step in self.steps() if step > after]
        with processes.together():
            for step in later if jax.process_index() == 0 else []:
                aside.mkdir(exist_ok=True)
                (self._folder / str(step)).rename(aside / str(step))
        self._manager.reload()

    def _run(self, step: int) -> dict[str, Any]:
        return self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind and jax.process_count() > 1:
            return  # closing waits for the other processes, which may be gone
        with self._writing():
            self._manager.close()


def check_same_run(saved: Config, config: Config, run_dir: Path) -> None:
    """Refuse to continue a run with another model or other data.

    Raises:
      ConfigError: names the first field that differs, with both values.
    """
    before, now = leaves(saved), leaves(config)
    for name, value in now.items():
        if name.startswith(("model.", "data.")) and name not in MAY_CHANGE and before[name] != value:
            raise ConfigError(
                f"{name} is {value}, but the checkpoint in {run_dir} was trained with {before[name]}; "
                f"use {before[name]}, or another training.run_dir"
            )


def abstract_like(state: Any) -> Any:
    """Shapes, dtypes and shardings of a state of arrays, to restore into."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def _instead(steps: list[int]) -> str:
    return f"using the one of step {steps[0]}" if steps else "there is no earlier one"


def _cause(error: Exception) -> str:
    """The cause in words, without the many layers that TensorStore tells."""
    text = str(error).strip() or type(error).__name__
    code = re.search(r"os_error_code='(\d+)'", text)  # what stands around it varies
    return os.strerror(int(code[1])) if code else text.splitlines()[0][:200]
