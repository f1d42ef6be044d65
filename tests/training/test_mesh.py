"""Training on several devices, stopped and continued, takes the losses of one device."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.training.tiny import tiny_config
from titans_jax.training import train
from titans_jax.training.metrics import read_metrics

pytestmark = [pytest.mark.processes, pytest.mark.slow]

FOUR_DEVICES = """
import dataclasses, pathlib, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
from tests.training.tiny import tiny_config
from titans_jax.config import MeshConfig
from titans_jax.training import train
for steps in (2, 4):
    config = tiny_config(steps=steps, sample_tokens=0, gradient_accumulation=1)
    train(dataclasses.replace(config, mesh=MeshConfig(data=2, fsdp=2)), pathlib.Path(sys.argv[1]))
"""


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run_dir) if line["kind"] == "train"]


@pytest.mark.exhaustive  # tests/distributed trains and goes on over several devices, tests/sharding compares meshes
def test_four_devices_equal_one(tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", FOUR_DEVICES, str(tmp_path / "four")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "going on from the checkpoint of step 2" in done.stdout
    for steps in (2, 4):
        train(tiny_config(steps=steps, sample_tokens=0), tmp_path / "one")
    # Sums over rows are taken in another order; Adam's first steps magnify it.
    np.testing.assert_allclose(losses(tmp_path / "four"), losses(tmp_path / "one"), rtol=1e-4)
