"""Models under what Flax will have as defaults: modules as trees, not as graphs."""

import child
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]

COMING = {"NNX_GRAPH_MODE": "false", "NNX_GRAPH_UPDATES": "false"}
SUBSET = """
import sys
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "mac", *(
    "tests/models/" + name for name in (
        "test_language_model.py::test_logits_do_not_depend_on_later_tokens",
        "test_oracle_models.py",
        "test_streaming.py::test_prompt_then_tokens_equals_the_whole",
        "test_flops.py",
    )
)]))
"""
START = """
import jax
from flax import nnx
from titans_jax.config import MemoryConfig, ModelConfig
from titans_jax.models import LanguageModel
config = ModelConfig(pattern=("lmm", "mac", "mag", "mal"), memory=MemoryConfig(expansion=2), dim=16, depth=4,
                     num_heads=2, head_dim=8, vocab_size=32, hidden_dim=24)
params = nnx.to_pure_dict(nnx.state(LanguageModel(config, rngs=nnx.Rngs(0))))
for path, leaf in jax.tree.leaves_with_path(params):
    print(jax.tree_util.keystr(path), leaf.shape, float(leaf.astype("float32").sum()))
"""


@pytest.mark.exhaustive  # the next test sees the parameters
def test_models_pass_their_tests(pytestconfig, monkeypatch):
    monkeypatch.chdir(pytestconfig.rootpath)
    assert "passed" in child.run(SUBSET, **COMING)


def test_parameters_have_the_same_names_and_start_values():
    """So that a checkpoint of one is a checkpoint of the other."""
    assert child.run(START, **COMING) == child.run(START) != ""
