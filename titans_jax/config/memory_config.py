"""The configuration of a memory: the part of an experiment's configuration (`schema.py`) that this library is about.

Nothing here needs jax.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MemoryConfig:
    """The associative memory of a memory layer; one independent memory per head."""

    preset: str = "titans"
    """The memory rule with its gates, by name; `titans models` prints all presets. A `titans_jax.memory.presets.Preset`
    object given here is registered, and the field becomes its name."""
    architecture: str | None = None
    """The network of the memory, by name (a wrong name is answered with a list of all); None is the preset's own.
    `residual_mlp` is x + LN(MLP(x)); `linear` is x @ W. `polynomial_mlp(degree=2)` puts products of a key's channels
    in front: a larger and slower memory, with which small models read text 0.19 bits better after as many tokens."""
    depth: int = 2
    """Fast matrices of an MLP memory (L_M of the paper), 1 to 4. Ignored by other memories."""
    expansion: int = 4
    """Hidden width of an MLP memory, as a multiple of head_dim."""
    bias: str | None = None
    """Attentional bias by name, such as `huber`; None is the preset's own. Arguments may follow, here as for
    `architecture` and `retention`: `huber(delta=0.5, constant=True)`."""
    retention: str | None = None
    """Retention gate by name, such as `elastic_net` or `alpha_divergence(alpha=0.3)`; None is the preset's own."""
    momentum: bool | None = None
    """True: steps with momentum (the paper's past surprise, eta). False: plain gradient steps. None is the preset's
    own."""
    forget: Literal["auto", "preset", "always", "never"] = "auto"
    """Whether the memory forgets at every token (alpha of the paper). preset: as the preset does; TTT keeps everything.
    auto: as the preset does, but always where forgetting leads to the learned start (`forget_to`), without which TTT's
    loss rises beyond the training length."""
    channel_retention: Literal["none", "key", "value", "both"] | None = None
    """Which channels have forget gates of their own, beside the head's: those of keys, of values, both or none. None is
    the preset's own."""
    shared_gates: bool = False
    """One set of gates for all fast matrices of a memory (Titans v1), not one for each."""
    channel_steps: Literal["none", "key", "value", "both"] | None = None
    """Which channels have their own factor of the step size, twice a sigmoid: those of keys, of values, both or none.
    None is the preset's own. Longhorn's paper prints "value"."""
    p: float = 3.0
    """Exponent of Moneta's L_p bias, and of `bias` "lp". Ignored by others."""
    q: float = 4.0
    """Exponent of Moneta's L_q retention, and of `retention` "norm_power". Ignored by others."""
    steps: int = 2
    """Inner steps per token of delta_product. Ignored by other presets."""
    mimo_rank: int = 4
    """Number of keys, queries and values per token of mamba3_mimo; with 1 it is mamba3. Ignored by other presets."""
    omega_window: int | None = None
    """Number of latest tokens whose losses omeganet, atlas and dla descend together, at most `chunk_size`. None is 16,
    or `chunk_size` where that is shorter, and 1 for dla. Without effect on other presets."""
    gate_rank: int | None = 32
    """Rank of the low-rank maps that compute channel-wise gates; None: each gate has a full map, dim to dim."""
    gate_maps: Literal["shared", "own"] = "shared"
    """shared: channel-wise gates share the map from dim to `gate_rank`. own: each gate has its own, as in the
    papers."""
    chunk_size: int = 16
    """Tokens whose inner gradients are all taken at the memory of the chunk's start, the anchor. Part of the model:
    another value gives other numbers. Presets with a linear memory are exact at every token, whatever the chunk
    size."""
    form: Literal["auto", "fused", "chunked", "associative", "recurrent"] = "auto"
    """Which implementation runs the rule in training. `auto` is `fused`, one kernel, on TPUs for rules that it runs and
    speeds up, else `chunked`. Never changes the numbers beyond rounding."""
    max_step_size: float = 3.0
    """theta_max, the largest step: the step size of Titans is theta_max * sigmoid(gate), in units of `step_unit`."""
    step_unit: Literal["error", "head_dim"] = "error"
    """What a step size of 1 means. error: a write to a fresh memory, one at its start, removes all of its token's
    error, whatever the memory. head_dim: a step of 1 / head_dim, as in TTT (memory/README.md, Gates)."""
    share_steps: bool = True
    """Tokens of a chunk with similar keys share their step, so that together they do not overshoot; False: each token
    takes its own step, as in the papers. Never shared: steps without `max_step_size`, with `step_unit` "head_dim",
    several per token or one per chunk (atlas, lact), and those of the global memory of `local_chunks`."""
    start: Literal["learned", "fixed", "zero"] | None = None
    """The memory's weights before the first token, of every head: learned; fixed, which means drawn at random and never
    trained; or zero, only for a single matrix without a norm. None is the preset's own: learned, or zero for linear
    recurrent models."""
    orthogonal_start: bool = True
    """Draw orthogonal matrices as the memory's start, so that a write removes about as much of an error whatever its
    direction. False: with independent normal entries, with which a write to a small head removes twice as much from one
    direction as in the mean, and one byte again and again makes rare starts unstable (memory/what_was_tried.md,
    Orthogonal starts)."""
    forget_to: Literal["start", "zero"] = "start"
    """Where forgetting leads. start: back to the learned start, where there is one; this keeps a memory with a norm on
    its output stable at any length. zero: to zero weights, as the papers print it."""
    bound_slope: bool = True
    """Limit steps so that no text makes the memory unstable, not even one byte again and again; with orthogonal
    starts this held in all 24 that were tried of each of Titans, Yaad, Moneta and TTT-MLP. With a norm on the memory's
    output, steps are smaller where the norm is steeper than at a fresh memory, and a bias that grows faster than a
    square (moneta's, unless `bias` names it) does so up to an error of 1. In a linear memory, a step removes at most
    all of its token's error, or with `chunk_size` 1 less than twice the error. False: no limit, as in the papers.
    Memories of several matrices without a norm ignore it."""
    scale_keys: bool | None = None
    """Multiply what a memory's hidden layer reads, a key or query of norm 1, by sqrt(head_dim). Hidden units then start
    with inputs of a root mean square of 1; without, of 1 / sqrt(head_dim), where gelu is almost a straight line and a
    memory of several matrices almost a linear one. Small models read text 0.08 bits better with it, and a wider hidden
    layer then helps (memory/README.md, Gates). None: True, but for weights made of logits (Memora), with which it read
    text worse. False: keys as they are, as in the papers. Memories without a hidden layer, or without a norm on their
    output, ignore it."""
    key_start: Literal["induction", "random"] = "induction"
    """How keys start in training. induction: keys with their own projection start as the queries of one token before;
    tied keys (`tie_keys`) and values start from the token alone in the first head, from all taps of the convolution in
    the last, and evenly in between; in the block hope, half of the heads start as induction heads. random: all as
    drawn; always so without a convolution, with several keys per token, or with gates as keys."""
    normalize_values: bool | None = None
    """Scale the values of every head to a root mean square of 1, the size of the reads of a memory with a norm on its
    output. Larger values make the loss steeper, so steps with momentum then start at a sixth of `max_step_size` (with
    more than 16 tokens a chunk an eighth), those of Moneta and on logits but Memora's at an eighth, others of several
    matrices at a third, not at half of it. None: True with such a norm. False: values as projected, as in the papers.
    """
    value_skip: bool | None = None
    """Add a token's own values, times a learned factor per head that starts at 1/2, to the memory's read, so that a
    model sees the last few tokens whatever the memory holds (Mamba-2's D; the papers' memories have none). Mamba-3's
    memories have a skip of their own, which starts at 1. None: True where values are normalised (`normalize_values`),
    for weights made of logits (Memora) and for a linear memory with a learned start, except where a token has several
    values."""
    tie_keys: bool | None = None
    """Use the query of the token before as a token's key, so that training cannot move the two apart and a read returns
    what followed tokens like the query's. False: keys have their own projection, as in the papers. None: True with
    `value_skip` if the memory has a norm on its output, or is linear with a learned start, and keys are not gates."""
    skip_projection: bool | None = None
    """Give the values that `value_skip` adds their own projection, so that the memory's values need to serve the memory
    alone, and a model with `tie_keys` has as many parameters as without. None: True with both `tie_keys` and
    `value_skip`."""
    prediction_gate: bool | None = None
    """Let the gate on the memory's output see, for the last 4 tokens, how near the token's value came to what the
    memory had predicted: with `tie_keys` a token's read predicts the next token's value. None: True with `tie_keys`.
    False: the gate sees the token alone, as in the papers."""
    forget_bias: float | tuple[float, ...] | None = None
    """Initial logit of every gate called "forget": at first it forgets sigmoid(forget_bias) of a token, and a matrix
    with gates for channels beside the head's own forgets as much again for each. Two numbers are those of the first and
    the last head, with even steps between. None: -7 and -2 (for the global memory of `local_chunks` -log(chunk_size -
    1), at most -5), or the preset's own where forgetting leads to zero."""
    caching: str | None = None
    """Memory Caching: how the memories kept at the ends of segments are read together with the running one, by name:
    `residual`, `average`, `gated`, `soup` or `sparse(k=4)`; None keeps none. For lmm, mag, mal and retrofit. The state
    grows by one memory with every segment, or with every doubling of their number (`cache_segmentation`)."""
    cache_segment: int = 256
    """Tokens of a segment of `caching`, a multiple of the rule's chunk. Packed documents start at multiples of this."""
    cache_segmentation: Literal["constant", "logarithmic"] = "constant"
    """Which kept memories a token reads with `caching`. constant: those of all segments before it. logarithmic: after s
    segments, those at the ends of the pieces into which the binary expansion of s cuts them (13 = 8 + 4 + 1, so those
    after 8, 12 and 13), at most log2(s) + 1. Not with `cache_restart`."""
    cache_restart: bool = False
    """Begin every segment of `caching` with the memory of a document's start; False: with the memory that the segment
    before left."""
    cache_counted: bool = True
    """Scores of `caching` are counted: the logarithm of the number of kept memories that are read is subtracted from
    each of theirs, so that where all scores are equal they answer as much together as the running memory alone,
    however long the text. False: as the paper has it, so that the running memory's share falls with every segment."""
    log_linear_levels: int = 0
    """Log-linear attention: split a memory that is linear in its values into this many parts, by how long ago they were
    written. The binary expansion of a token's number cuts the tokens before it into pieces of 1, 2, 4, .. tokens; each
    part holds the piece of one such size, or nothing, and the last part also everything older. A token reads every part
    with a scale of its own. 10 levels tell all pieces of 1,024 tokens apart; 0 keeps one memory. For lmm, mag, mal and
    retrofit."""
    continuum_chunks: tuple[int, ...] = (16, 64, 256)
    """Levels of the continuum memory of hope and hope_attention: after how many tokens each level's weights change, the
    fastest level first, each number a multiple of the one before. Packed documents start at multiples of the last."""
    continuum_order: Literal["sequential", "independent"] = "sequential"
    """sequential: each level of a continuum memory reads the output of the level before. independent: all levels read
    the layer's input, and their outputs are summed with learned weights."""
    local_chunks: tuple[int, ...] = ()
    """TNT: the chunk sizes of local memories, one memory each. They begin anew every `shard` tokens, so that all shards
    of a row are computed at once. The memory of `chunk_size` is then the global one, with a long chunk such as 2048,
    and is read as it was at its chunk's start. () has no local memories. For lmm, mag, mal and retrofit."""
    shard: int = 2048
    """Tokens of a shard, a multiple of each of `local_chunks`, and a multiple or a divisor of `chunk_size`. Packed
    documents start at multiples of both."""
    activation: bool = True
    """SiLU on queries, keys and values after their convolution (Titans v1; the paper's later text does not say)."""

    def __post_init__(self) -> None:
        if not isinstance(self.preset, str):
            from titans_jax.config.rules import register  # its rule is an object of titans_jax.memory: jax is there

            object.__setattr__(self, "preset", register(self.preset))
