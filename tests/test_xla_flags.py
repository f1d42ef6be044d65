"""What XLA is told: the flag that keeps some versions of it from ending the process."""

import os
import textwrap

import pytest

from tests.child import run
from titans_jax import xla_flags
from titans_jax.xla_flags import FUSIONS, avoid_faulty_reductions


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
