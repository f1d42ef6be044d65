"""Names of TPU slices, and the table of chips."""

import importlib.util

import pytest

from titans_jax import sharding
from titans_jax.config import ConfigError
from titans_jax.ops.chips import GENERATIONS, peak_flops
from titans_jax.tpu.topology import describe, find_topology, slice_shapes


@pytest.mark.parametrize(
    "name, shape, chips",
    [
        ("v5litepod-256", (16, 16), 256),
        ("v5e-32", (4, 8), 32),
        ("v5e:2x4", (2, 4), 8),
        ("v6e-256", (16, 16), 256),
        ("V6E:1x1", (1, 1), 1),
        ("v5p-1024", (8, 8, 8), 512),  # counted in TensorCores
        ("v5p:2x2x1", (2, 2, 1), 4),
        ("tpu7x-8", (2, 2, 1), 4),
    ],
)
def test_both_names_of_a_slice_are_understood(name, shape, chips):
    topology = find_topology(name)
    assert (topology.shape, topology.chips) == (shape, chips)
    assert find_topology(topology.name) == find_topology(topology.ordered_as) == topology
    assert find_topology(name, slices=2).chips == 2 * chips


@pytest.mark.parametrize(
    "name, works",
    [
        ("v5e:3x5", "the nearest is v5e:4x4 (v5litepod-16)"),
        ("v5litepod-30", "the nearest is v5e:4x8 (v5litepod-32)"),
        ("v5p-1000", "the nearest is v5p:8x8x8 (v5p-1024)"),
        ("v6e:4x4x4", "the nearest is v6e:8x8 (v6e-64)"),
        ("v6e", "the nearest is v6e:1x1 (v6e-1)"),
        ("v5q:2x2", "did you mean v5p?"),
        ("h100-8", "use one such as v5e:16x16"),
        ("", "use one such as v5e:16x16"),
    ],
)
def test_a_name_that_is_none_is_refused_with_the_nearest(name, works):
    with pytest.raises(ConfigError) as refusal:
        find_topology(name)
    assert str(refusal.value).startswith(f"there is no topology {name}") and works in str(refusal.value)


def test_table_agrees_with_jaxs_own():
    """Two sources for the same chips: our table, and the one that Pallas sizes its kernels by."""
    from jax.experimental.pallas import tpu as pltpu

    for generation in GENERATIONS.values():
        version = pltpu.ChipVersion(generation.name.removeprefix("tpu"))
        cores = version.num_physical_tensor_cores_per_chip
        info = pltpu.get_tpu_info_for_chip(version, 1)
        assert generation.peak_flops == pytest.approx(cores * info.bf16_ops_per_second, rel=0.01)
        assert 0.9 < generation.hbm / (cores * info.hbm_capacity_bytes) < 1
        assert peak_flops(generation.kind) * generation.devices == generation.peak_flops
        assert 0.9e9 < generation.clock < 2.5e9
        if generation.largest:
            assert slice_shapes(generation)[-1] == generation.largest
    assert peak_flops("cpu") is None


def test_without_libtpu_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"libtpu is not installed.*pip install 'titans-jax\[tpu\]'"):
        describe(find_topology("v5e:2x2"))


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, which describes chips, is not installed"
)
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("name", ["v5litepod-16", "v6e-16", "v6e-256", "v5p-128"])
def test_axes_of_two_fit_every_torus(name):
    """Also where they are a part of an axis of the torus."""
    topology = find_topology(name)
    for axes in ({"tensor": 2}, {"data": 2}, {"data": 2, "tensor": 2}):
        mesh = sharding.make_mesh(**{"data": 1, "fsdp": -1} | axes, devices=describe(topology, schedules=False))
        assert mesh.size == len({device.id for device in mesh.devices.flat}) == topology.chips
        assert {name: mesh.shape[name] for name in axes} == axes
