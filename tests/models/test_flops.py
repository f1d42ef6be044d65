"""FLOPs against counts made by hand."""

import dataclasses

import pytest

from titans_jax.config import MemoryConfig, ModelConfig
from titans_jax.models import BLOCKS, Block, forward_flops_per_token, training_flops_per_token
from titans_jax.models.flops import attention_flops, mean_causal_keys, memory_flops

MODEL = ModelConfig(
    dim=64, depth=2, num_heads=2, head_dim=32, vocab_size=100, hidden_dim=96, segment=8, window=4, num_persistent=3
)


@pytest.mark.parametrize("time, window", [(1, 1), (7, 7), (7, 3), (3, 7), (10, 1)])
def test_mean_causal_keys_counts_visible_pairs(time, window):
    pairs = sum(1 for query in range(time) for key in range(query + 1) if query - key < window)
    assert mean_causal_keys(time, window) == pytest.approx(pairs / time)


def test_memory_of_two_matrices():
    """By hand: 88 d^2 + 20 C d for two layers of expansion 4 with momentum."""
    model = dataclasses.replace(MODEL, memory=MemoryConfig(depth=2, expansion=4, chunk_size=16))
    assert memory_flops(model) == 88 * 32**2 + 20 * 16 * 32


@pytest.mark.parametrize(
    "memory, forward, back, between",
    [
        # weights in d^2; those behind the first matrix in d^2; sum of in + out in d
        (MemoryConfig(architecture="linear"), 1, 0, 2),
        (MemoryConfig(depth=1), 1, 0, 2),
        (MemoryConfig(depth=3, expansion=2), 8, 6, 10),
        (MemoryConfig(architecture="gated_mlp", expansion=4), 12, 4, 15),
    ],
)
@pytest.mark.parametrize("momentum", [True, False])
def test_memory_of_other_architectures(memory, forward, back, between, momentum):
    model = dataclasses.replace(MODEL, memory=dataclasses.replace(memory, momentum=momentum, chunk_size=4))
    states = 2 if momentum else 1
    by_hand = 2 * 32**2 * (forward + back + 2 * states * forward) + 2 * 4 * between * 32
    assert memory_flops(model) == by_hand


def test_tokens_of_a_window_are_keys_of_the_next_chunk_too():
    """By hand, without momentum: 31 keys for 16 queries; keys forward 8, back 4 and written 8, queries 8, in d^2."""
    model = dataclasses.replace(MODEL, memory=MemoryConfig(preset="omeganet", chunk_size=16, omega_window=16))
    assert memory_flops(model) == 2 * (20 * 31 * 32**2 // 16 + 8 * 32**2 + 10 * 31 * 32)


def test_a_step_of_a_whole_chunk():
    """By hand: keys forward 8, back 4 and written 8, of 31 tokens; queries 8, in d^2; and of two matrices d x 4d five
    times X X^T, its square, and that times X."""
    model = dataclasses.replace(MODEL, memory=MemoryConfig(preset="atlas", chunk_size=16, omega_window=16))
    orthogonal = 2 * 5 * (4 + 1 + 4) * 32**3
    assert memory_flops(model) == 2 * (8 * 32**2 + (20 * 31 * 32**2 + orthogonal) // 16)


def test_transformer():
    time = 10
    projections, keys = 4 * 2 * 64 * 64, 5.5
    block = projections + 2 * keys * 64 + 2 * keys * 64 + 3 * 2 * 64 * 96
    model = dataclasses.replace(MODEL, pattern=("attention",))
    assert forward_flops_per_token(model, time) == pytest.approx(2 * block + 2 * 64 * 100)
    assert training_flops_per_token(model, time) == pytest.approx(3 * forward_flops_per_token(model, time))


def test_blocks_are_sums_of_their_parts():
    time = 16
    window = attention_flops(MODEL, 3 + mean_causal_keys(time, 4)) - attention_flops(MODEL, 0)
    projections, square = 4 * 2 * 64 * 64, 2 * 64 * 64
    lmm = BLOCKS["lmm"].forward_flops(MODEL, time)
    assert BLOCKS["mal"].forward_flops(MODEL, time) == pytest.approx(lmm + projections + window)
    assert BLOCKS["mag"].forward_flops(MODEL, time) == pytest.approx(lmm + projections + window)
    # Segments of 8: persistent tokens, h and x up to the token itself.
    segment = 4 * 64 * (3 + 2 * 4.5)
    read = 2 * 2 * (32 * 128 + 128 * 32)
    assert BLOCKS["mac"].forward_flops(MODEL, time) == pytest.approx(lmm + projections + segment + 3 * square + read)
    letter = dataclasses.replace(MODEL, merge="product")
    for block in ("mag", "mac"):
        more = BLOCKS[block].forward_flops(letter, time) - BLOCKS[block].forward_flops(MODEL, time)
        assert more == pytest.approx(square)


def test_maps_of_channel_wise_gates():
    """By hand, five gates: of rank 4 from one shared map or from five, or full."""

    def counted(**memory):
        memory = MemoryConfig(preset="yaad", **memory)
        return BLOCKS["lmm"].forward_flops(dataclasses.replace(MODEL, memory=memory), 16)

    shared = counted(gate_rank=4)
    assert counted(gate_rank=4, gate_maps="own") - shared == 2 * 4 * 64 * 4
    assert counted(gate_rank=None) - shared == 2 * 5 * 64 * 64 - 2 * 4 * 64 * 6


def test_long_term_tokens_are_read_once_a_segment():
    """By hand: 5 reads with keys and values in each of 3 segments, the last one of 4 tokens, in 20 tokens."""
    square, read = 2 * 64 * 64, 2 * 2 * (32 * 128 + 128 * 32)
    per_token = BLOCKS["mac"].forward_flops(MODEL, 20) - 3 * square - read - 4 * 64 * 4.5
    fewer = BLOCKS["mac"].forward_flops(dataclasses.replace(MODEL, mac_long_term=5), 20)
    assert fewer == pytest.approx(per_token + 4 * 64 * 5 + 5 * 3 / 20 * (2 * square + read))


def test_a_window_caps_the_cost_of_length():
    assert BLOCKS["window"].forward_flops(MODEL, 10**6) == pytest.approx(
        BLOCKS["window"].forward_flops(MODEL, 10**5), rel=1e-4
    )
    assert BLOCKS["attention"].forward_flops(MODEL, 10**6) > 5 * BLOCKS["attention"].forward_flops(MODEL, 10**5)


def test_mamba_by_hand():
    """128 channels of 16 entries, whose steps are made of 4 numbers: projections, taps, and 6 operations an entry."""
    maps = 2 * (2 * 64 * 128 + 128 * (4 + 2 * 16) + 4 * 128 + 128 * 64)
    mamba = maps + 2 * 4 * 128 + 6 * 16 * 128
    assert BLOCKS["mamba"].forward_flops(MODEL, 10) == mamba
    assert BLOCKS["samba"].forward_flops(MODEL, 10) == mamba + 3 * 2 * 64 * 96


def test_a_block_that_does_not_count_is_two_operations_for_every_parameter():
    class Uncounted(BLOCKS["attention"]):
        forward_flops = Block.__dict__["forward_flops"]

    norms, matrices = 2 * 64, 4 * 64 * 64 + 3 * 64 * 96
    assert Uncounted.forward_flops(MODEL, 10) == 2 * (norms + matrices)
