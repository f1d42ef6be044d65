"""The configuration of a memory: the part of an experiment's (`schema.py`) that this library is about.

Nothing here needs jax.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MemoryConfig:
    """The associative memory of a memory layer; one independent memory per head."""

    preset: str = "titans"
    """The rule with its gates, by name; `titans models` prints them all. A `titans_jax.memory.presets.Preset` given
    here is registered, and the field is its name."""
    architecture: str | None = None
    """What the memory computes, by name (a wrong one is answered with all there are); None is the preset's own.
    `residual_mlp` is x + LN(MLP(x)); `linear` is x @ W."""
    depth: int = 2
    """Fast matrices of an MLP memory (L_M of the paper), 1 to 4. Ignored by other memories."""
    expansion: int = 4
    """Hidden width of an MLP memory over head_dim."""
    bias: str | None = None
    """Attentional bias by name, such as `huber`; None is the preset's own. Arguments may follow, here as for
    `architecture` and `retention`: `huber(delta=0.5, constant=True)`."""
    retention: str | None = None
    """Retention gate by name, such as `elastic_net` or `alpha_divergence(alpha=0.3)`; None is the preset's own."""
    momentum: bool | None = None
    """Keep past surprise (eta of the paper), or take plain gradient steps; None is the preset's own."""
    forget: Literal["auto", "preset", "always", "never"] = "auto"
    """Whether tokens forget (alpha of the paper). auto: as the preset does, and where forgetting leads to the learned
    start always, without which TTT's loss rises beyond the training length; preset: TTT keeps everything."""
    channel_retention: Literal["none", "key", "value", "both"] | None = None
    """Which channels are forgotten one by one, beside what a head forgets: those of keys, of values, both or none; None
    is the preset's own."""
    shared_gates: bool = False
    """One set of gates for all fast matrices of a memory (Titans v1), not one for each."""
    channel_steps: Literal["none", "key", "value", "both"] | None = None
    """Which channels have a factor of the step size of their own, twice a sigmoid: those of keys, of values, both or
    none; None is the preset's own. "value" is the letter of Longhorn's paper."""
    p: float = 3.0
    """Exponent of Moneta's L_p bias, and of `bias` "lp"."""
    q: float = 4.0
    """Exponent of Moneta's L_q retention, and of `retention` "norm_power"."""
    steps: int = 2
    """Inner steps per token of delta_product. Ignored by other presets."""
    mimo_rank: int = 4
    """Keys, queries and values per token of mamba3_mimo; with 1 it is mamba3. Ignored by other presets."""
    omega_window: int | None = None
    """Tokens whose losses omeganet and atlas descend together, at most `chunk_size`; None is 16, or `chunk_size` where
    that is shorter, and for dla 1. Ignored by other presets."""
    gate_rank: int | None = 32
    """Width that channel-wise gates are computed through; None is a full map, dim to dim, for each."""
    gate_maps: Literal["shared", "own"] = "shared"
    """Whether channel-wise gates share the map to `gate_rank`, or have one each, the papers' letter."""
    chunk_size: int = 16
    """Tokens whose inner gradients share one anchor. Part of the model: another value gives other numbers. Presets with
    a matrix memory are exact at every token and ignore it."""
    form: Literal["auto", "fused", "chunked", "associative", "recurrent"] = "auto"
    """Which implementation runs the rule in training: `auto` is `fused`, one kernel, on TPUs, and `chunked` elsewhere.
    Never changes the numbers beyond rounding."""
    max_step_size: float = 3.0
    """theta_max, the largest step: the step size of Titans is theta_max * sigmoid(gate), in units of `step_unit`."""
    step_unit: Literal["error", "head_dim"] = "error"
    """What a step size of 1 is: the one with which a write to a fresh memory removes all of its token's error, whatever
    the memory; or 1 / head_dim, as in TTT (memory/README.md, Gates)."""
    share_steps: bool = True
    """Tokens of a chunk whose keys are near each other share their step, so that together they do not overshoot; False
    is the papers' letter. Steps without `max_step_size`, in another unit than "error", or several a token, are never
    shared."""
    start: Literal["learned", "fixed", "zero"] | None = None
    """The memory's weights before the first token, of every head: learned; fixed, drawn and never trained; or zero,
    for a matrix without a norm. None is the preset's own: learned, or zero for linear recurrent models."""
    forget_to: Literal["start", "zero"] = "start"
    """Where forgetting leads: back to the learned start, where there is one, which keeps a memory behind a norm stable
    at any length; or to zero weights, the papers' letter."""
    bound_slope: bool = True
    """Steps are smaller where the norm behind a memory is steeper than at a fresh one, and those of a linear memory no
    larger than its error, or twice its error at a chunk of 1, so that no text, not even one byte again and again, makes
    it unstable; False is the papers' letter. Memories of several matrices without a norm ignore it."""
    key_start: Literal["induction", "random"] = "induction"
    """How training starts. induction: keys that are not tied (`tie_keys`) as queries of one token before; tied ones,
    and values, with what a token alone says in the first head, with all taps of the convolution in the last, evenly in
    between. random: all as drawn, as always without a convolution, or where a token has several keys, or gates as keys.
    """
    normalize_values: bool | None = None
    """Give the values of every head a root mean square of 1, which is that of what a memory behind a norm says of a
    token. As the loss is as steep as its values are large, steps with momentum then start at an eighth of
    `max_step_size`, not at half of it. None: where there is such a norm, but for weights made of logits (Memora), which
    one byte again and again makes unstable in mac then; False is the papers' letter."""
    value_skip: bool | None = None
    """Add to what a memory says a token's own values, times a learned number of every head that starts at 1/2, so that
    a model sees the letters around a token whatever the memory holds (Mamba-2's D; the papers' memories have none).
    Mamba-3's memories have their own, from 1. None: as `normalize_values`, and for a linear memory with a learned
    start; not where a token has several values."""
    tie_keys: bool | None = None
    """A token's key is the query of the token before, which training cannot part, so that a memory says what followed a
    query's like; False, the papers' letter, projects it. None: behind a norm, or for a linear memory with a learned
    start, with `value_skip`."""
    skip_projection: bool | None = None
    """What `value_skip` adds has a projection of its own, so that values can be what a memory needs, and a model with
    `tie_keys` has as many parameters as without. None: with `tie_keys` and `value_skip`."""
    forget_bias: float | tuple[float, ...] | None = None
    """Where the logits of gates called "forget" start: a token forgets sigmoid of it at first. Two numbers are those of
    the first and the last head, with even steps between. None: -7 and -2, or the preset's own where forgetting leads
    to zero."""
    caching: str | None = None
    """Memory Caching: how the memories kept at the ends of segments are read together with the running one, by name:
    `residual`, `average`, `gated`, `soup` or `sparse(k=4)`; None keeps none. For lmm, mag and mal. Its state grows by a
    memory every segment, or every doubling of their number (`cache_segmentation`)."""
    cache_segment: int = 256
    """Tokens of a segment of `caching`, a multiple of the rule's chunk. Packed documents start at multiples of it."""
    cache_segmentation: Literal["constant", "logarithmic"] = "constant"
    """Which ends of segments a token reads with `caching`: all before it; or, after s segments, those of the pieces
    that the binary expansion of s cuts them into (8, 12 and 13 of 13), at most log2(s) + 1. Not with
    `cache_restart`."""
    cache_restart: bool = False
    """Begin every segment of `caching` with the memory of a document's start; False goes on from the last one."""
    log_linear_levels: int = 0
    """Log-linear attention: keep a memory that is linear in its values in so many parts, by how long ago they were
    written: of a token's past the last 1, 2, 4, .. tokens or none of them, as the token's number is in binary, and all
    that are older together. A token reads every part by a scale of its own. 10 tell all pieces of 1,024 tokens
    apart; 0 keeps one memory. For lmm, mag and mal."""
    continuum_chunks: tuple[int, ...] = (16, 64, 256)
    """Levels of the continuum memory of hope and hope_attention: the tokens after which each one changes, the fastest
    first, each a multiple of the one before. Packed documents start at multiples of the last."""
    continuum_order: Literal["sequential", "independent"] = "sequential"
    """A level of a continuum memory reads the one before it, or all read its input and their answers are summed with
    learned weights."""
    local_chunks: tuple[int, ...] = ()
    """TNT: the chunks of local memories, one memory each, which begin anew every `shard` tokens, all shards of a row at
    once. The memory of `chunk_size`, then a long one such as 2048, is read as it was at its chunk's start. () has none.
    For lmm, mag and mal."""
    shard: int = 2048
    """Tokens of a shard of `local_chunks`, a multiple of each; of it and `chunk_size` one divides the other, and packed
    documents start at multiples of both."""
    activation: bool = True
    """SiLU on queries, keys and values after their convolution (Titans v1; the later text is silent)."""

    def __post_init__(self) -> None:
        if not isinstance(self.preset, str):
            from titans_jax.config.rules import register  # its rule is an object of titans_jax.memory: jax is there

            object.__setattr__(self, "preset", register(self.preset))
