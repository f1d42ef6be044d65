"""What every test runs under: the CPU, strict dtype and rank promotion."""

import fnmatch
import hashlib
import os
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Compilation is most of what these tests cost. Unoptimised code halves it, and without the fusions that XLA
    # compiles by MLIR it is a third of that (the quickstart's train step, CPU-seconds: 43, 23 and 6). A program that
    # LLVM gets in one part, not in 32 for as many threads, takes an eighth less.
    quickly = ["--xla_backend_optimization_level=0"]
    if version("jaxlib").startswith(("0.10.", "0.11.")):  # later ones may not know them, and XLA ends at such a flag
        quickly += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *quickly]).strip()

import jax  # noqa: E402
import pytest  # noqa: E402

# A test that mixes dtypes or ranks by accident fails: so would a TPU program that silently widens to float32.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.devices()  # jax starts with one device, whichever test comes first: training would ask for one per core

# Every compiled program maps memory of its own, and Linux ends a process with more than 65,530 maps in a segmentation
# fault inside XLA; this suite compiles enough for that.
MOST_MAPS = 20_000


# Of a test's slow parameters, so many are run by default; the rest, full products of forms, rules and blocks, take more
# than an hour and are for `pytest -m exhaustive`.
MOST_SLOW_PARAMETERS = 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`slow_but_for("a", "b-c")` is slow for all parameters but those whose ids match one of these."""
    slow = {}
    for item in items:
        for mark in item.iter_markers("slow_but_for"):
            if not any(fnmatch.fnmatchcase(item.callspec.id, pattern) for pattern in mark.args):
                item.add_marker("slow")
        if item.get_closest_marker("slow") and hasattr(item, "callspec"):
            slow.setdefault(item.nodeid.split("[")[0], []).append(item)
    for parameters in slow.values():
        # Which ones differs from test to test, so that together they meet every form, rule and block.
        parameters.sort(key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
        for item in parameters[MOST_SLOW_PARAMETERS:]:
            item.add_marker("exhaustive")


@pytest.fixture(autouse=True, scope="module")
def bounded_programs():
    """Forget compiled programs between modules once there are many."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory):
    """Many tests compile the same programs: all workers keep theirs in one folder."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # whose own folder is one level below
        folder = folder.parent
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
