"""Configurations that come with the package, compiled for the slices they name: minutes each, so only when asked for.

TITANS_COMPILE=1 pytest tests/tpu/test_configs_fit.py
"""

import os

import pytest

from titans_jax.config.files import shipped_configs
from titans_jax.tpu.compile import compile_step
from titans_jax.tpu.topology import find_topology

pytestmark = [pytest.mark.tpu_compiler, pytest.mark.slow]

pytest.importorskip("libtpu", reason="libtpu, which holds the TPU compiler, is not installed")


@pytest.mark.skipif("TITANS_COMPILE" not in os.environ, reason="takes minutes a model; TITANS_COMPILE=1 runs it")
@pytest.mark.parametrize("name", ["transformer_170m", "lmm_340m", "mac_340m", "moneta_h_760m", "mag_1b", "mal_1b"])
def test_config_fits_the_topology_it_names(name):
    config = shipped_configs()[name]
    report = compile_step(config, find_topology(config.mesh.topology))
    print(f"{name} {report.topology}: {report.headroom / 2**30:.2f} GiB of headroom, {report.compile_seconds:.0f} s")
    assert report.headroom > 0
