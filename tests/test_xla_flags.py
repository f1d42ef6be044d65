"""What XLA is told: not to end the process, and not to compile for minutes."""

import os
import textwrap
from importlib.metadata import PackageNotFoundError

import pytest

from tests.child import run
from titans_jax import xla_flags
from titans_jax.xla_flags import FUSIONS, TRITON, avoid_faulty_reductions, avoid_tuning_products


@pytest.mark.parametrize(
    "version, before, after",
    [
        ("0.10.2", None, f"{FUSIONS}=-reduce"),
        ("0.11.1", "--a=1", f"--a=1 {FUSIONS}=-reduce"),
        ("0.11.1", f"{FUSIONS}=eltwise", f"{FUSIONS}=eltwise"),
        ("0.12.0.1", "--a=1", "--a=1"),
        ("0.10.1", None, None),
    ],
)
def test_only_faulty_versions_are_told_and_a_choice_stays(monkeypatch, version, before, after):
    monkeypatch.setattr(xla_flags, "version", lambda package: version)
    monkeypatch.delenv("XLA_FLAGS")
    if before is not None:
        monkeypatch.setenv("XLA_FLAGS", before)
    avoid_faulty_reductions()
    assert os.environ.get("XLA_FLAGS") == after


@pytest.mark.parametrize(
    "installed, before, after",
    [
        ({"jaxlib": "0.11.2", "jax-cuda13-plugin": "0.11.2"}, "--a=1", f"--a=1 {TRITON}=false"),
        ({"jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.2"}, "", f"{TRITON}=false"),
        ({"jaxlib": "0.11.2", "jax-cuda13-plugin": "0.11.2"}, f"{TRITON}=true", f"{TRITON}=true"),
        ({"jaxlib": "0.11.2"}, "", ""),
        ({"jaxlib": "0.12.0", "jax-cuda13-plugin": "0.12.0"}, "", ""),
        ({}, "", ""),
    ],
)
def test_products_are_not_tuned_where_there_is_a_cuda_plugin(monkeypatch, installed, before, after):
    def version(package):
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(xla_flags, "version", version)
    monkeypatch.setenv("XLA_FLAGS", before)
    avoid_tuning_products()
    assert os.environ["XLA_FLAGS"] == after


@pytest.mark.processes
@pytest.mark.slow
def test_the_reduction_that_ends_processes_does_not():
    """The example of jax issue 40412, after an import of the package."""
    program = """
        import titans_jax
        import jax, jax.numpy as jnp
        shape = (3, 1, 2, 2, 8, 8, 8)
        found = jax.jit(lambda a, b: jnp.sum(a * b, axis=3))(jnp.ones(shape), jnp.full(shape, 2.0))
        print(float(found.sum()))
    """
    total = 3 * 1 * 2 * 2 * 8 * 8 * 8 * 2.0
    assert float(run(textwrap.dedent(program), XLA_FLAGS="")) == total
