"""The memory core: a neural memory that learns while it reads, as pure functions on arrays.

    rule   = presets.titans(depth=2, expansion=4, chunk_size=16)
    params = init_params(rule, key, head_dim)
    state  = init_state(rule, params)
    reads, state = memorize(rule, params, state, queries, keys, values, gates)
    reads  = retrieve(rule, params, state, queries)

It needs jax and optax only, and takes one head of one sequence; callers vmap over batch and heads. README.md in this
folder has the words, the equations, a token's way through a form, and a map of the files.
"""

from titans_jax.memory.gates import Gates
from titans_jax.memory.interface import (
    FORMS,
    choose_form,
    init_params,
    init_state,
    memorize,
    retrieve,
    start_chunk,
)
from titans_jax.memory.rule import (
    algorithms,
    architectures,
    atlas_presets,
    biases,
    later_presets,
    presets,
    retentions,
)
from titans_jax.memory.rule.architectures import register_architecture
from titans_jax.memory.rule.biases import register_bias
from titans_jax.memory.rule.gate_choices import GateChoices, LearnedGate
from titans_jax.memory.rule.presets import Preset, register_preset
from titans_jax.memory.rule.retentions import register_retention
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import MemoryState, Params, Surprise

__all__ = [
    "FORMS",
    "GateChoices",
    "Gates",
    "LearnedGate",
    "MemoryRule",
    "MemoryState",
    "Params",
    "Preset",
    "Surprise",
    "algorithms",
    "architectures",
    "atlas_presets",
    "biases",
    "choose_form",
    "init_params",
    "init_state",
    "later_presets",
    "memorize",
    "presets",
    "register_architecture",
    "register_bias",
    "register_preset",
    "register_retention",
    "retentions",
    "retrieve",
    "start_chunk",
]
