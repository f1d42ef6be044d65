"""Training: `train(config, run_dir)` runs an experiment, `load_run(run_dir)` brings its model back."""

from titans_jax.training.dry_run import dry_run
from titans_jax.training.loop import train
from titans_jax.training.run import Run, load_run

__all__ = ["Run", "dry_run", "load_run", "train"]
