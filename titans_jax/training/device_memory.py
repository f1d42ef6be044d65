"""The memory of a device: how much a run needs, and the messages where there is too little."""

import math
import re

import jax

from titans_jax.config import Config, ConfigError
from titans_jax.training.optimizer import make_optimizer
from titans_jax.training.report import TrainingStopped
from titans_jax.training.run import abstract_model

LOWER = "raise training.gradient_accumulation or mesh.fsdp, or lower data.batch_size, data.sequence_length or model.dim"


def check_state_fits(config: Config, mesh: jax.sharding.Mesh | None) -> None:
    """Refuse a model whose parameters and optimizer state alone are more than the memory of a device.

    Does nothing where the backend does not report the memory of a device (CPUs).

    Raises:
      ConfigError: names the memory needed, the memory there is, and fields to change.
    """
    limit = bytes_limit()
    if limit is None:
        return
    shards = mesh.shape["fsdp"] * mesh.shape["tensor"] if mesh else 1
    params = abstract_model(config.model)[1]
    kept = [params, jax.eval_shape(make_optimizer(config.optimizer, config.training.steps).init, params)]
    kept += [params] * (config.optimizer.ema is not None)
    asked = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(kept) if x.shape) / shards
    if asked > limit:
        raise ConfigError(
            f"model.dim {config.model.dim} x model.depth {config.model.depth} asks for {asked / 1e9:.2f} GB of "
            f"parameters and optimizer state on each device, which has {limit / 1e9:.2f} GB; use a smaller model, or "
            f"mesh.fsdp {shards * math.ceil(asked / limit)} or more"
        )


def bytes_limit() -> int | None:
    """Memory of a device that arrays may use, in bytes; None where the backend does not report it."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def out_of_memory(error: Exception) -> TrainingStopped:
    """The exception, with its message, for an allocation that failed while a run started or took a step."""
    asked = re.search(r"allocat\w+ (\d+) bytes|allocat\w+ ([\d.]+ ?[KMGT]i?B)", str(error))
    what = f"{int(asked[1]) / 1e9:.2f} GB" if asked and asked[1] else asked[2] if asked else "more"
    limit = bytes_limit()
    there = f"of {limit / 1e9:.2f} GB" if limit else "than there is"
    return TrainingStopped(f"a device ran out of memory: it was asked for {what} {there}; {LOWER}")
