"""`titans train CONFIG --dry-run`: the size and the time of a run before it is started; writes nothing."""

import contextlib
import time

import jax

from titans_jax import data, sharding
from titans_jax.config import Config, leaves
from titans_jax.models import granularity, training_flops_per_token
from titans_jax.training.loop import check_run
from titans_jax.training.mesh import to_devices, use_cores, use_mesh
from titans_jax.training.optimizer import groups, make_optimizer
from titans_jax.training.run import first_model, initial_weights
from titans_jax.training.step import first_state, step_of

STEPS = 2
"""Steps that are timed, after a first one that is not."""


def dry_run(config: Config) -> None:
    """Print the resolved fields that are not defaults, parameters, text, memory of a step, and the time it would take.

    The time is that of a few steps taken on the devices of this machine, without evaluations and checkpoints; with
    several processes nothing is timed.

    Raises:
      ConfigError, DataError: as training would; the run's folder is not looked at.
    """
    use_cores(config)
    tokenizer = check_run(config)
    initial = initial_weights(config) if config.training.init_from else None
    defaults = leaves(Config())
    for name, value in leaves(config).items():
        if value != defaults.get(name):
            print(f"{name:36}{value}")
    align = granularity(config.model)
    batches = data.train_batches(config.data, tokenizer, align=align)
    data.validation_batches(config.data, tokenizer, align=align)
    with contextlib.closing(batches), use_mesh(config) as mesh:
        steps, tokens = config.training.steps, config.data.batch_size * config.data.sequence_length
        optimizer = make_optimizer(config.optimizer, steps)
        graphdef, params = first_model(config, initial)
        count = sum(x.size for x in jax.tree.leaves(params))
        print(f"\nparameters        {count:,}")
        labels = (f"{size:,} {label}" for label, size in groups(config.optimizer, params).items())
        print(f"optimizer         {'; '.join(labels)}")
        print(f"text              {batches.statistics}")
        print(
            f"tokens            {steps:,} steps of {tokens:,}: {steps * tokens:,} ({_epochs(batches, steps * tokens)})"
        )
        flops = training_flops_per_token(config.model, config.data.sequence_length) * steps * tokens
        print(f"operations        {flops:.3g}")
        if jax.process_count() > 1:
            print(f"devices           {sharding.machine()} in {jax.process_count()} processes: not timed")
            return
        state = first_state(config, optimizer, params, mesh)
        step = step_of(config, graphdef, optimizer, state)
        on_devices = (to_devices(config.data, mesh, rows) for rows in batches)
        batch = next(on_devices)
        memory = step.lower(state, batch).compile().memory_analysis()
        taken = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
        taken = (taken - memory.alias_size_in_bytes) / 1e9
        print(f"memory of a step  {taken:.2f} GB of a device, of {sharding.machine()}")
        state, metrics = step(state, batch)
        print(f"first loss        {float(metrics['loss']):.4f} nats a token")
        start = time.monotonic()
        for _ in range(STEPS):
            state, metrics = step(state, next(on_devices))
            float(metrics["loss"])
        seconds = (time.monotonic() - start) / STEPS
        print(f"a step            {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s; all {_hours(steps * seconds)}")


def _epochs(batches: data.TrainBatches, tokens: int) -> str:
    return f"{tokens / (batches.statistics.num_rows * batches.statistics.sequence_length):.2f} times the text"


def _hours(seconds: float) -> str:
    if seconds < 3600:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
