"""The peer of `titans bench peer`: titans-pytorch's memory layer and its MAC, with its defaults except for sizes.

It runs in an environment that has PyTorch, and imports nothing from titans_jax. A case has the fields of `peer.Case`.
"""

from collections.abc import Callable
from typing import Any

import torch
from titans_pytorch import MemoryAsContextTransformer, MemoryMLP, NeuralMemory
from torch import nn

MOST_DECODED = 1024
"""The most tokens that may be decoded one by one."""


def memory(case: dict[str, Any]) -> tuple[nn.Module, Callable[[], Any]]:
    """A memory layer, and its forward and backward pass; sizes as `titans_jax.bench.peer.Case`."""
    layer = NeuralMemory(
        dim=case["num_heads"] * case["head_dim"],
        dim_head=case["head_dim"],
        heads=case["num_heads"],
        chunk_size=case["chunk_size"],
        batch_size=case["chunk_size"] if case["moves_anchors"] else None,
        model=MemoryMLP(dim=case["head_dim"], depth=2, expansion_factor=case["expansion"]),
    )
    x = torch.randn(case["batch"], case["time"], case["num_heads"] * case["head_dim"], requires_grad=True)

    def run() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x)[0].square().sum().backward()

    return layer, run


def transformer(case: dict[str, Any]) -> MemoryAsContextTransformer:
    """A MAC model over bytes."""
    return MemoryAsContextTransformer(
        num_tokens=case["vocab_size"],
        dim=case["num_heads"] * case["head_dim"],
        depth=case["depth"],
        heads=case["num_heads"],
        dim_head=case["head_dim"],
        segment_len=case["segment"],
        neural_memory_segment_len=case["chunk_size"],
        neural_memory_batch_size=case["chunk_size"] if case["moves_anchors"] else None,
        num_persist_mem_tokens=case["num_persistent"],
        neural_memory_model=MemoryMLP(dim=case["head_dim"], depth=2, expansion_factor=case["expansion"]),
        neural_memory_kwargs={"dim_head": case["head_dim"], "heads": case["num_heads"]},
    )


def train(case: dict[str, Any]) -> tuple[nn.Module, Callable[[], Any]]:
    """A MAC model, and a training step of AdamW."""
    model = transformer(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():  # all heads' memories share one array as their start, which cannot be updated
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    tokens = torch.randint(0, 256, (case["batch"], case["time"] + 1))

    def run() -> None:
        model(tokens, return_loss=True).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, run


def decode(case: dict[str, Any]) -> tuple[nn.Module, Callable[[], Any]]:
    """A MAC model, and a call that decodes one more token of one row after `time` tokens, as its own `sample` does."""
    model = transformer(case).eval()
    tokens, cache = torch.randint(0, 256, (1, case["time"])), None
    longest = model.seq_len_with_longterm_mem(case["time"] + MOST_DECODED)
    with torch.no_grad():
        axes = model.axial_pos_emb.maybe_derive_outer_dim(longest, (model.neural_memory_segment_len,))
        positions = model.axial_pos_emb(axes, return_factorized=True)

    def run() -> None:  # the first call, without a cache, reads all tokens
        nonlocal tokens, cache
        with torch.no_grad():
            logits, cache = model(
                tokens, disable_flex_attn=True, cache=cache, return_cache=True, factorized_pos_emb=positions
            )
        tokens = torch.cat((tokens, logits[:, -1:].argmax(dim=-1)), dim=-1)

    run()
    return model, run


def make(case: dict[str, Any]) -> tuple[int, Callable[[], Any]]:
    """The number of parameters of a case's model, and the call to time."""
    torch.manual_seed(0)
    model, call = {"memory": memory, "train": train, "decode": decode}[case["kind"]](case)
    return sum(parameter.numel() for parameter in model.parameters()), call
