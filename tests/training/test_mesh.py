"""Training on several devices, stopped and continued, takes the losses of one device."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import child
from tests.training.tiny import tiny_config
from titans_jax.sharding import cores
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


FIRST_OF_TWO = """
import dataclasses
import jax
jax.config.update("jax_num_cpu_devices", 2)
from tests.training.tiny import tiny_config
from titans_jax.config import MeshConfig
from titans_jax.training.mesh import use_mesh
from titans_jax.training.run import InitialWeights, first_model, init_model
config = dataclasses.replace(tiny_config(), mesh=MeshConfig(data=1, fsdp=2))
alone = init_model(config.model, 1)[1]
with use_mesh(config):
    drawn, given = (first_model(config, initial)[1] for initial in (None, InitialWeights(alone, [])))
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(drawn))
    assert [leaf.sharding for leaf in jax.tree.leaves(given)] == [leaf.sharding for leaf in jax.tree.leaves(drawn)]
assert jax.tree.all(jax.tree.map(lambda x, y: (jax.device_get(x) == jax.device_get(y)).all(), given, alone))
"""


def test_given_weights_lie_where_drawn_ones_would():
    """In a training and in its dry run, which would otherwise say that a step takes more memory."""
    child.run(FIRST_OF_TWO)


CORES = """
import jax
from titans_jax.config import Config, DataConfig, MeshConfig
from titans_jax.training.mesh import use_cores
{first}
use_cores(Config(data=DataConfig(batch_size={rows}), mesh={mesh}))
print(jax.device_count())
"""


@pytest.mark.parametrize(
    "first, rows, mesh, devices",
    [
        ("", 8, "MeshConfig()", math.gcd(8, cores())),
        ("", 3, "MeshConfig()", math.gcd(3, cores())),
        ("", 8, "MeshConfig(data=1)", 1),
        ("jax.config.update('jax_num_cpu_devices', 3)", 8, "MeshConfig()", 3),
    ],
)
def test_training_from_python_has_a_device_per_core(first, rows, mesh, devices):
    """Unless the user has said how many there are, or how they share the work."""
    assert child.run(CORES.format(first=first, rows=rows, mesh=mesh)).split() == [str(devices)]


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
