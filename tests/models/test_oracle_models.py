"""Every block, and memories of every kind inside one, against the numpy model."""

import jax
import numpy as np
import pytest
import small_models as small
from model_oracle import Model

CASES = [small.config(kind) for kind in small.KINDS] + [
    small.config("lmm", "window", depth=4, tie_embeddings=True, embedding_scale=3.5),
    small.config(
        "mag",
        num_persistent=0,
        merge="product",
        memory={"momentum": False, "architecture": "linear", "activation": False},
    ),
    small.config("mac", num_persistent=0, conv_size=1, memory={"architecture": "mlp", "depth": 3}),
    small.config("mac", mac_write="attention", merge="product", memory={"forget_to": "zero"}),
    small.config("mac", depth=1, mac_long_term=3),
    small.config("mac", depth=1, mac_long_term=5, num_persistent=0),
    small.config("mac", depth=1, attention_conv=True),
    small.config("mac", depth=1, attention_conv=True, mac_long_term=3),
    small.config("attention", "window", attention_conv=True, conv_size=3),
    small.config("lmm", memory=small.SHARED),
    small.config("mal", depth=1, memory={"architecture": "linear", "start": "zero"}),
    small.config("lmm", depth=1, memory={"shared_gates": True}),
    small.config("mac", depth=1, memory=small.SHARED | {"shared_gates": True, "depth": 3, "momentum": False}),
    small.config("mac", memory=small.SHARED | {"momentum": False}),
    small.config("mag", memory={"caching": "gated", "cache_segment": 8}),
    small.config("mal", memory={"caching": "soup", "cache_segment": 4, "cache_restart": True}),
    small.config("mag", memory={"caching": "sparse(k=1)", "cache_segment": 4, "cache_segmentation": "logarithmic"}),
    small.config("mal", conv_size=6, memory={"architecture": "gated_mlp", "form": "associative"}),
]


def name(config):
    literal = "-literal" * (config.memory.forget_to == "zero")
    shared = "-shared" * (config.memory.step_unit == "error")
    one_set = "-one_set" * config.memory.shared_gates
    kept = "" if config.memory.caching is None else f"-{config.memory.caching}"
    asked = "" if config.mac_long_term is None else f"-{config.mac_long_term}"
    convolved = "-conv" * config.attention_conv
    return f"{'+'.join(config.pattern)}-{config.memory.architecture}{literal}{shared}{one_set}{kept}{asked}{convolved}"


@pytest.mark.slow_but_for(
    "mac-None",
    "mag-linear",
    "lmm+window-None",
    "retrofit-None",
    "mac-None-shared",
    "mac-None-3",
    "mal-linear",
    "lmm-None-one_set",
)
@pytest.mark.parametrize("config", CASES, ids=name)
def test_logits_equal_the_numpy_model(config):
    with jax.enable_x64(True):
        model, tokens = small.build(config), small.tokens()
        oracle = Model(config, small.params_by_path(model))
        expected = np.stack([oracle.logits(np.array(row)) for row in tokens])
        np.testing.assert_allclose(small.forward(model, tokens), expected, rtol=1e-9, atol=1e-9 * abs(expected).max())
