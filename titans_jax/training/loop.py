"""The training loop: data, step, metrics, diagnostics, evaluation, checkpoint, stop."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from titans_jax import data, sharding
from titans_jax.config import Config, ConfigError, leaves, to_saved
from titans_jax.config.validate import validate
from titans_jax.errors import TitansError
from titans_jax.evaluation.evaluators import EvaluationOptions
from titans_jax.evaluation.measure import describe, evaluators_of, measure_one
from titans_jax.evaluation.perplexity import Evaluation, EvaluationStep, evaluate, make_evaluation_step
from titans_jax.inference import Generator, NotFiniteLogits
from titans_jax.models import check_model, granularity, has_memory, training_flops_per_token, without_writes
from titans_jax.models.loss import Batch
from titans_jax.plots import save_json
from titans_jax.sharding import processes
from titans_jax.training.checkpoint import Checkpoints, NotFinite, Saved, abstract_like
from titans_jax.training.device_memory import check_state_fits
from titans_jax.training.diagnostics import MEANS, harmful, ignored, plot_memory, warnings
from titans_jax.training.failures import told_as_stops
from titans_jax.training.flops import peak_flops_per_second
from titans_jax.training.goodput import Goodput
from titans_jax.training.lock import RunLock
from titans_jax.training.mesh import batch_sharding, to_devices, use_cores, use_mesh
from titans_jax.training.metrics import MetricsWriter, import_wandb, plot_losses, read_metrics
from titans_jax.training.optimizer import learning_rate_schedule, make_optimizer
from titans_jax.training.profile import Profile
from titans_jax.training.report import SMALLER, Report, RunDescription, TrainingStopped, require_finite, say
from titans_jax.training.resume import changes, check_same_run
from titans_jax.training.run import (
    InitialWeights,
    Run,
    check_train_only,
    check_vocabulary,
    copy_tokenizer,
    first_model,
    initial_weights,
    with_absolute_paths,
)
from titans_jax.training.step import first_state, step_of
from titans_jax.training.stop import StopRequest

# Fields that may differ between the processes of a run.
MAY_DIFFER = frozenset({"processes.index", "training.run_dir", "data.path", "data.validation_path"})


@told_as_stops()
def train(config: Config, run_dir: Path, console: Console | None = None) -> None:
    """Run an experiment in `run_dir`, or continue the one that is there from its latest checkpoint.

    Returns when the run is finished, or early, with a checkpoint, after SIGTERM. Continuing gives the same numbers, bit
    for bit, as a run that was never interrupted.

    Several processes (titans_jax.sharding.processes) call this with the same configuration and a folder that all see.
    Where it is the first to use jax, and there is no accelerator, rows are shared out over the machine's cores.

    Raises:
      ConfigError, data.DataError, ProcessesError, RunInUse: nothing has been compiled or written.
      TrainingStopped: loss, gradients or parameters are not finite, and the last checkpoint is from before; or a device
        ran out of memory.
      ProcessLost: another process has died.
      CheckpointError: a checkpoint could not be written or read; those before it are whole.
    """
    use_cores(config)
    console = console or Console(quiet=jax.process_index() != 0)
    goodput = Goodput()
    with processes.together():
        tokenizer = check_run(config)
    processes.check_same({name: value for name, value in leaves(config).items() if name not in MAY_DIFFER})
    config = with_absolute_paths(config)
    told = functools.partial(say, console)
    saved = check_folder(config, run_dir)
    with processes.together():
        initial = initial_weights(config) if saved is None and config.training.init_from else None
    with use_mesh(config) as mesh:
        with processes.together():
            index, count = processes.share_of_batch(batch_sharding(mesh), config.data.batch_size) if mesh else (0, 1)
            split = {"align": granularity(config.model), "process_index": index, "process_count": count}
            batches = data.train_batches(config.data, tokenizer, **split)
            validation = data.validation_batches(config.data, tokenizer, **split)
            text = Text(tokenizer, batches, validation, data.validation_by_source(config.data, tokenizer, **split))
            identity = data.identify(config.data, text.train.statistics, text.validation.statistics)
            if saved and saved.text and not config.training.accept_changed_data:
                data.check_same_text(config.data, saved.text, identity)
            check_state_fits(config, mesh)
        processes.check_same(
            {"the text of data.path": str(batches.statistics), "the fingerprint of the text": identity}
        )
        processes.make_shared_folder(run_dir)
        folder, kept = run_dir / "checkpoints", config.training.checkpoints_kept
        with (
            contextlib.closing(batches),
            hold(run_dir, told) as lock,
            Checkpoints(folder, kept=kept, say=told, commit=config.training.checkpoint_commit) as checkpoints,
            StopRequest() as stop,
        ):
            copy_tokenizer(config, run_dir, begins=not checkpoints.steps())
            session = Session(run_dir, console, mesh, checkpoints, stop, goodput, identity, lock)
            try:
                Trainer(config, text, session, initial).run()
            except TrainingStopped as error:
                checkpoints.wait()  # all processes stopped at this step, so what is being saved can be finished
                raise TrainingStopped(f"{error}; {_where_to_go_on(checkpoints.steps())}") from error


def check_run(config: Config) -> data.Tokenizer:
    """Refuse a configuration that cannot be trained, and return its tokenizer.

    Its text, its devices and its folder are not checked here.

    Raises:
      ConfigError, DataError: one sentence with the field, its value and what would work.
    """
    validate(config)
    check_model(config.model)
    tokenizer = data.load_tokenizer(config.data.tokenizer)
    check_vocabulary(config, tokenizer)
    check_train_only(config)
    evaluators_of(config.training.evaluate_tasks, "training.evaluate_tasks")
    if config.training.logger == "wandb":
        import_wandb()
    return tokenizer


@dataclass(frozen=True)
class Text:
    """The text that a run is trained and evaluated on."""

    tokenizer: data.Tokenizer
    train: data.TrainBatches
    validation: data.ValidationBatches
    by_source: dict[str, data.ValidationBatches]
    """The validation text of each part of a mixture."""


@dataclass(frozen=True)
class Session:
    """One start of a run: its folder, its devices, and the objects that it keeps from start to end."""

    run_dir: Path
    console: Console
    mesh: jax.sharding.Mesh | None
    """None on a single device."""
    checkpoints: Checkpoints
    stop: StopRequest
    goodput: Goodput
    identity: dict[str, Any]
    """The result of `data.identify` for its text."""
    lock: RunLock | None
    """None for all processes but the first."""


class Trainer:
    """One run: its compiled functions, its state on the devices, and what it writes."""

    def __init__(self, config: Config, text: Text, session: Session, initial: InitialWeights | None = None):
        self.config, self.run_dir, self.console, self.mesh = config, session.run_dir, session.console, session.mesh
        self.checkpoints, self.stop, self.goodput = session.checkpoints, session.stop, session.goodput
        self.identity, self.lock = session.identity, session.lock
        self.tokenizer, self.batches = text.tokenizer, text.train
        self.profile = Profile(config.profile.range, self.run_dir / "profile")
        self.validation = list(itertools.islice(text.validation, config.training.evaluation_batches))
        self.by_source = {
            name: list(itertools.islice(batches, config.training.evaluation_batches))
            for name, batches in text.by_source.items()
        }
        optimizer = make_optimizer(config.optimizer, config.training.steps)
        graphdef, params = first_model(config, initial)
        self.state = first_state(config, optimizer, params, self.mesh)
        self.train_step = step_of(config, graphdef, optimizer, self.state)
        self.evaluation_step = make_evaluation_step(graphdef)
        self.unwritten_step = make_evaluation_step(without_writes(graphdef)) if has_memory(config.model) else None
        self.diagnostics: dict[str, np.ndarray] = {}  # the latest
        self.graphdef, self.generator = graphdef, Generator(graphdef, self.tokenizer)
        self.begun = [] if initial is None else initial.said
        self.step = self._resume()

    def run(self) -> None:
        """Train to the last step, or until a stop is requested."""
        training = self.config.training
        with (
            MetricsWriter(self.run_dir, self.step, training.logger) as writer,
            self._make_report(writer) as self.report,
        ):
            self._introduce()
            if self.step and self._due(training.evaluate_every) and not self._evaluated():
                self._evaluate()  # the run was stopped while it evaluated this step
            start, stopping = self.step, self._stopping()
            while self.step < training.steps and not stopping:
                batch = self._to_devices(next(self.batches))
                if self.step == start:
                    self._say_memory(batch)
                with self.profile.step(self.step + 1, self.state):
                    self.state, metrics = self.train_step(self.state, batch)
                self.step += 1
                self.report.step(self.step, metrics)
                self.checkpoints.check()
                if self._due(training.diagnostics_every):
                    self._diagnose()
                if self._due(training.evaluate_every):
                    self._evaluate()
                stopping = self._stopping()
                if stopping or self._due(training.checkpoint_every):
                    self._save()
            self.profile.finish(self.state)
            self.checkpoints.wait()
            if self.step < training.steps:
                self.report.say(f"stopped and saved at step {self.step}; run the same command again to go on")
            else:
                self.report.say(f"finished step {self.step}; the run is in {self.run_dir}")
            self.report.say(f"goodput: {self.goodput.share():.0%} of the time since the first start went into steps")

    @property
    def _weights(self) -> Any:
        """The parameters to evaluate: their moving average where one is kept."""
        return self.state.get("ema", self.state["params"])

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.training.steps

    def _stopping(self) -> bool:
        return self.stop.requested()

    def _save(self) -> None:
        self.report.flush()  # a step that is not finite must stop the run before anything is written
        if self.lock:
            self.lock.check()
        try:
            self.checkpoints.save(
                self.step,
                self.state,
                config=self.config,
                data_position=self.batches.get_state(),
                text=self.identity,
                goodput=self.goodput.get_state(),
            )
        except NotFinite as error:
            raise TrainingStopped(
                f"{error} after step {self.step}, so it was not saved and training stopped; {SMALLER}"
            ) from error
        self.report.pause()

    def _resume(self) -> int:
        restored = self.checkpoints.restore(abstract_like(self.state), self.config.training.resume_from)
        if restored is None:
            return 0
        self.state, saved = restored
        self.changes = changes(saved.config, self.config)
        self.batches.set_state(saved.data)
        if saved.goodput:
            self.goodput.set_state(saved.goodput)
        self.checkpoints.set_aside(after=saved.step)
        return saved.step

    def _evaluated(self) -> bool:
        lines = read_metrics(self.run_dir)
        return processes.first_says(any(x["kind"] == "validation" and x["step"] == self.step for x in lines))

    def _evaluate(self) -> None:
        self.report.flush()
        result = self._evaluate_with(self.evaluation_step)
        unwritten = result and self.unwritten_step and self._evaluate_with(self.unwritten_step)
        sources = {name: self._evaluate_with(self.evaluation_step, rows) for name, rows in self.by_source.items()}
        if result is None or (self.unwritten_step and unwritten is None) or None in sources.values():
            return
        require_finite(f"the validation loss of step {self.step}", result.loss, "it was not saved")
        values = {"loss": result.loss, "bits_per_byte": result.bits_per_byte, "perplexity": result.perplexity}
        text = f"step {self.step}  validation loss {result.loss:.4f}  {result.bits_per_byte:.3f} bits/byte"
        for name, found in sources.items():
            values[f"loss/{name}"] = found.loss
            text += f"  {name} {found.loss:.4f}"
        if unwritten:
            gain = values["memory_gain"] = unwritten.bits_per_byte - result.bits_per_byte
            text += f"  memory gain: {gain:.4f} bits per byte"
            self.report.remember("gain", f"{gain:.4f}")
        self.report.say(text)
        gain = values.get("memory_gain", np.nan)
        for warning in harmful(gain) + ignored(self.diagnostics.get("explained_share"), gain):
            self.report.say(f"warning at step {self.step}: {warning}")
        self._write_sample(result.bits_per_byte)
        self._evaluate_tasks()
        if self._stopping():
            return  # without its line, the whole evaluation is done again when the run goes on
        self.report.record("validation", self.step, values)
        if jax.process_index() == 0:
            plot_losses(self.run_dir)
            if unwritten:
                plot_memory(self.run_dir, self.config.model)
        self.report.pause()

    def _evaluate_with(self, step: EvaluationStep, rows: list[Batch] | None = None) -> Evaluation | None:
        """The loss of batches (None: the validation text) by a compiled step; None if a stop is requested meanwhile."""
        batches = map(self._to_devices, self.validation if rows is None else rows)
        return evaluate(step, self._weights, batches, self.tokenizer, self._stopping)

    def _write_sample(self, bits_per_byte: float) -> None:
        training = self.config.training
        if not training.sample_tokens:
            return
        pieces = self.generator.stream(self._weights, training.sample_prompt, training.sample_tokens, training.seed)
        try:
            text = training.sample_prompt + "".join(itertools.takewhile(lambda _: not self._stopping(), pieces))
        except NotFiniteLogits as error:
            self.report.say(f"warning at step {self.step}: there is no sample, as {error}")
            return
        if jax.process_index() == 0:
            head = f"# step {self.step}, validation {bits_per_byte:.3f} bits per byte\n"
            # A prompt from the command line may hold bytes that are not text.
            (self.run_dir / "sample.txt").write_text(head + text + "\n", encoding="utf-8", errors="replace")

    def _evaluate_tasks(self) -> None:
        """Measure `training.evaluate_tasks` into evaluations.jsonl; a task that fails gives a warning only."""
        training = self.config.training
        run = Run(self.config, self.tokenizer, self.graphdef, self._weights, self.step, self.run_dir)
        options = EvaluationOptions(
            length=training.evaluate_length, samples=training.evaluate_samples, data=Path(training.evaluate_data)
        )
        for task, evaluator in evaluators_of(training.evaluate_tasks, "training.evaluate_tasks").items():
            if self._stopping():
                return
            try:
                self.report.say(f"step {self.step}  {describe(task, measure_one(run, task, evaluator, options))}")
            except TitansError as error:
                self.report.say(f"warning at step {self.step}: {error}")

    def _diagnose(self) -> None:
        self.report.flush()
        *_, arrays = self.evaluation_step(self._weights, self._to_devices(self.validation[0]))
        diagnostics = {name: np.asarray(value) for name, value in arrays.items()}
        if diagnostics:
            self.report.record("memory", self.step, {name: value.tolist() for name, value in diagnostics.items()})
            if "explained_share" in diagnostics:
                self.report.remember("explained", f"{np.mean(diagnostics['explained_share']):.3g}")
                shares = " ".join(f"{share:.3g}" for share in diagnostics["explained_share"])
                self.report.say(f"step {self.step}  explained share of the memories: {shares}")
            means = {words: np.mean(diagnostics[name]) for name, words in MEANS.items() if name in diagnostics}
            said = ", ".join(f"{words} {mean:.3g}" for words, mean in means.items())
            self.report.say(f"step {self.step}  means of the memories: {said}")
            for warning in warnings(diagnostics, self.config.model, self.diagnostics):
                self.report.say(f"warning at step {self.step}: {warning}")
            self.diagnostics = diagnostics
            if jax.process_index() == 0:
                plot_memory(self.run_dir, self.config.model)
        self.report.pause()

    def _make_report(self, writer: MetricsWriter) -> Report:
        training = self.config.training
        run = RunDescription(
            steps=training.steps,
            start=self.step,
            log_every=training.log_every,
            learning_rate=learning_rate_schedule(self.config.optimizer, training.steps),
            bytes_per_token=self.batches.statistics.bytes_per_token,
            flops_per_token=training_flops_per_token(self.config.model, self.config.data.sequence_length),
            peak_flops=peak_flops_per_second(),
        )
        return Report(self.console, writer, self.goodput, run)

    def _introduce(self) -> None:
        if jax.process_index() == 0:
            save_json(to_saved(self.config), self.run_dir / "config.json")
        params = sum(x.size for x in jax.tree.leaves(self.state["params"]))
        self.report.say(f"{self.run_dir}: {params:,} parameters on {sharding.machine()}")
        if stats := jax.local_devices()[0].memory_stats():
            used, limit = stats["bytes_in_use"] / 1e9, stats["bytes_limit"] / 1e9
            self.report.say(f"memory of a device before the first step: {used:.2f} of {limit:.2f} GB in use")
        self.report.say(f"training text: {self.batches.statistics}")
        for line in self.begun:
            self.report.say(line)
        if self.step:
            self.report.say(f"going on from the checkpoint of step {self.step}")
            for change in self.changes:
                self.report.say(f"changed since then: {change}")

    def _say_memory(self, batch: Batch) -> None:
        """Print the device memory that the compiled step takes; the first step reuses the program compiled here."""
        self.report.say("compiling the training step, which may take a minute on a first start")
        memory = self.train_step.lower(self.state, batch).compile().memory_analysis()
        held, new = memory.argument_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes
        temporary = memory.temp_size_in_bytes + new
        self.report.say(
            f"a step takes {(held + temporary) / 1e6:,.1f} MB of a device: {held / 1e6:,.1f} of parameters, optimizer "
            f"state and batch, {temporary / 1e6:,.1f} of activations, gradients and other temporaries"
        )

    def _to_devices(self, batch: Batch) -> Batch:
        return to_devices(self.config.data, self.mesh, batch)


@contextlib.contextmanager
def hold(run_dir: Path, say: Callable[[str], None]) -> Iterator[RunLock | None]:
    """The run folder, held by the first process for all; raises as `RunLock`."""
    with contextlib.ExitStack() as stack:
        with processes.together():
            lock = stack.enter_context(RunLock(run_dir, say)) if jax.process_index() == 0 else None
        yield lock


def check_folder(config: Config, run_dir: Path) -> Saved | None:
    """The `Saved` part of the checkpoint that a run continues from; None for a new run.

    Raises:
      ConfigError: the folder is a file, or its run cannot go on with this configuration.
      CheckpointError: none of its checkpoints can be read.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"training.run_dir is {run_dir}, which is a file; use a folder, or a name that is free")
    folder, training = run_dir / "checkpoints", config.training
    saved = None
    if processes.first_says(folder.is_dir()):
        processes.make_shared_folder(run_dir)  # it is there: see that it is there for all
        with Checkpoints(folder) as checkpoints:
            saved = checkpoints.latest(training.resume_from)
    if saved is None and training.resume_from is not None:
        raise ConfigError(
            f"training.resume_from is {training.resume_from}, but {run_dir} has no checkpoint; leave it out"
        )
    if saved is not None:
        check_same_run(saved.config, config, run_dir)
        if training.steps < saved.step:
            raise ConfigError(
                f"training.steps is {training.steps}, but the checkpoint in {run_dir} is of step {saved.step}; use at "
                f"least {saved.step}, or training.resume_from with an earlier one"
            )
    return saved


def _where_to_go_on(steps: list[int]) -> str:
    """The last good checkpoint, in words, and the others."""
    if not steps:
        return "there is no checkpoint to go on from"
    earlier = f"; earlier ones, for training.resume_from: {', '.join(map(str, steps[1:]))}" if steps[1:] else ""
    return f"the last good checkpoint is of step {steps[0]}{earlier}"
