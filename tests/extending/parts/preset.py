"""A preset with gates of its own: DeltaNet whose key channels forget, at first a hundredth, and whose steps reach 3/2.

titans train preset.py
"""

import jax

from titans_jax import memory
from titans_jax.config import Config, MemoryConfig, ModelConfig

gates = memory.GateChoices(
    key=memory.LearnedGate(jax.nn.log_sigmoid, start=4.6),
    step_size=memory.LearnedGate(lambda logit: 1.5 * jax.nn.sigmoid(logit), start=-1.0),
)


@memory.register_preset(gates=gates)
def forgetful_deltanet():
    return memory.presets.deltanet()


config = Config(model=ModelConfig(pattern=("lmm",), memory=MemoryConfig(preset="forgetful_deltanet")))
