"""A block: memory and feed-forward side by side, x += memory(norm(x)) + feed_forward(norm(x))."""

from titans_jax import layers, models
from titans_jax.config import Config, ModelConfig


@models.register_block()
class Parallel(models.Block):
    has_memory = True

    def __init__(self, config, *, rngs):
        self.norm = layers.RMSNorm(config, config.dim, rngs=rngs)
        self.memory = layers.NeuralMemory(config, rngs=rngs)
        self.feed_forward = layers.FeedForward(config, rngs=rngs)

    def __call__(self, x, state=None, documents=None):
        y, state, report = self.memory(self.norm(x), state, documents)
        return x + y + self.feed_forward(self.norm(x)), state, report

    def init_state(self, batch, max_length=None):
        return self.memory.init_state(batch)


config = Config(model=ModelConfig(pattern=("parallel",)))
