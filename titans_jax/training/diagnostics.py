"""Whether the memories of a model are alive and of use: warnings drawn from their reports, and the picture memory.png.

A report is that of `LanguageModel.__call__`: for every memory layer, means over tokens, heads and matrices. The gain is
how many bits per byte the validation loss rises when the memories are not written (`models.without_writes`).
"""

from pathlib import Path
from typing import Any

import numpy as np

from titans_jax.config import ModelConfig, gate_choices, memory_rule, step_size_bound
from titans_jax.plots import panels
from titans_jax.training.metrics import read_metrics

KEPT_PER_TOKEN = 0.1
"""With less retention than this, a write has decayed to a thousandth after three tokens, which is the reach of the
convolution."""
STEP_SHARE = 1e-3
"""Below this share of its bound, a mean step size is a sigmoid at -7, whose slope is as small, so it hardly learns."""
STEP_AT_BOUND = 0.99
"""Above this share of its bound, a mean step size is a sigmoid at 4.6: it cannot rise, and learns slowly to fall."""
MOMENTUM = 0.999
"""Above this, a surprise is summed over a thousand tokens: the gate no longer distinguishes old from new."""
INERT_SHARE = 0.005
"""A memory whose explained share is within half a percent of 0 answers all keys alike."""
INERT_UPDATE = 1e-3
"""Weights that moved by less than this part of their norm give the reads of the start, up to bfloat16's rounding
(2^-9)."""
WORSE_THAN_CONSTANT = 3.0
"""Reads that are as large as the values but unrelated to them have twice the loss of the mean, so an inner loss three
times as large comes from reads that are too large. In a young memory whose reads pass a norm it is some hundred times
as large, so it counts as an explosion only where the ratio has doubled (`DOUBLED`) since the last report."""
DOUBLED = 2.0
FAR_WORSE_THAN_CONSTANT = 1e4
"""Above this ratio it is an explosion whatever the last report was: ten times the ratio of memories of young models,
whose values are nearly 0."""
GROWTH = 100.0
"""Weights whose norm is this many times that of random ones of fan-in scale are far outside the range of training."""
EXPLAINS = 0.1
"""From this explained share on, a memory knows its values well enough that a model which used its reads would gain."""
IGNORED_GAIN = 0.001
"""Bits per byte; a smaller gain is lost in the noise of a few validation batches."""


Diagnostics = dict[str, np.ndarray]


def warnings(diagnostics: Diagnostics, model: ModelConfig, before: Diagnostics | None = None) -> list[str]:
    """One sentence per memory and symptom, with the number that shows it; the constants above give limits and reasons.

    before: the previous report, if there is one.

    Dead: a token keeps less than `KEPT_PER_TOKEN` of the memory, or the step size is below `STEP_SHARE` of its bound.
    Inert: writes change nothing, as the weights move by less than `INERT_UPDATE` of their norm, or explain nothing, as
    the explained share is within `INERT_SHARE` of 0. Saturated: the step size is at its bound or momentum at 1, so the
    gate no longer chooses. Exploding: the inner loss is more than `WORSE_THAN_CONSTANT` times that of the best constant
    read and has doubled since the previous report, or is more than `FAR_WORSE_THAN_CONSTANT` times that; or the norm of
    weights that have a learned start is more than `GROWTH` times that of random ones. Broken: inner loss or norm are
    not finite.
    """
    found = []
    bound = bound_of_steps(model) or float("nan")  # nothing compares with NaN
    share, moved = diagnostics.get("explained_share"), diagnostics.get("update_norm")
    derived = dict(diagnostics)
    if share is not None:
        worse, limit = 1 - share, np.full_like(share, FAR_WORSE_THAN_CONSTANT)
        if before is not None and "explained_share" in before:
            doubled = np.maximum(WORSE_THAN_CONSTANT, DOUBLED * (1 - before["explained_share"]))
            limit = np.minimum(limit, doubled)
        derived["worse"] = np.where(worse > limit, worse, 0)
    if moved is not None:
        norm = diagnostics["weight_norm"]
        derived["moved"] = moved / np.where(np.isfinite(norm), np.maximum(norm, 1e-30), np.nan)
    rule = memory_rule(model.memory)
    if rule.learned_start:
        random = sum(outputs for _, outputs in rule.shapes(model.head_dim)) ** 0.5
        derived["growth"] = diagnostics.get("weight_norm", np.zeros(0)) / random
    checks = (
        ("retention", lambda x: x < KEPT_PER_TOKEN, "is dead: it keeps {:.3g} of itself per token"),
        ("step_size", lambda x: x < STEP_SHARE * bound, "is dead: its mean step size is {:.3g}"),
        ("moved", lambda x: x < INERT_UPDATE, "is inert: its writes move its weights by {:.2g} of their norm"),
        ("explained_share", lambda x: abs(x) < INERT_SHARE, "is inert: its writes explain {:.2g} of the values"),
        ("step_size", lambda x: x > STEP_AT_BOUND * bound, "is saturated: its mean step size is {:.3g}, at its bound"),
        ("momentum", lambda x: x > MOMENTUM, "is saturated: its mean momentum is {:.6g}"),
        ("worse", lambda x: x > 0, "is exploding: its inner loss is {:.3g} times that of the best constant"),
        ("growth", lambda x: GROWTH < x < np.inf, "is exploding: its weights are {:.3g} times as large as random ones"),
        ("inner_loss", lambda x: ~np.isfinite(x), "is broken: its inner loss is {}"),
        ("weight_norm", lambda x: ~np.isfinite(x), "is broken: its weight norm is {}"),
    )
    for name, bad, sentence in checks:
        for layer, value in enumerate(derived.get(name, ())):
            if bad(value):
                found.append(f"the memory of memory layer {layer} " + sentence.format(value))
    return found


MEANS = {
    "retention": "kept of the memory per token",
    "momentum": "momentum",
    "step_size": "step size",
    "update_norm": "norm of the update",
    "weight_norm": "norm of the weights",
}
"""The diagnostics whose means over the layers are printed, and their names in words."""


def harmful(gain: float) -> list[str]:
    """A sentence if writing makes the model worse, by `IGNORED_GAIN` at least."""
    if not gain <= -IGNORED_GAIN:
        return []
    return [f"the memories do harm: the validation loss is {-gain:.5f} bits per byte lower without their writes"]


def ignored(explained_share: np.ndarray | None, gain: float) -> list[str]:
    """A sentence if some memory knows its values (`EXPLAINS`) but the model gains nothing by it (`IGNORED_GAIN`)."""
    knows = [] if explained_share is None else np.flatnonzero(explained_share > EXPLAINS)
    if len(knows) == 0 or not abs(gain) < IGNORED_GAIN:
        return []
    share = float(np.max(explained_share))
    return [
        f"the memories are ignored: they explain up to {share:.0%} of their values, but the validation loss is only "
        f"{gain:.5f} bits per byte higher without their writes"
    ]


def bound_of_steps(model: ModelConfig) -> float | None:
    """The largest step size that a gate can give, where it has a bound."""
    return step_size_bound(model) if gate_choices(model.memory).bounded else None


def plot_memory(run_dir: Path, model: ModelConfig) -> None:
    """Draw `run_dir`/memory.png over the steps: the gain, and a panel for each diagnostic with a line per layer."""
    lines = list(read_metrics(run_dir))
    gains = [(x["step"], x["memory_gain"]) for x in lines if x["kind"] == "validation" and "memory_gain" in x]
    reports = [line for line in lines if line["kind"] == "memory"]
    bound = bound_of_steps(model)
    words = {"explained_share": "explained share", "inner_loss": "inner loss"} | MEANS
    panels_of = {name: (title, 1.0) for name, title in words.items()}
    if bound:
        panels_of["step_size"] = ("step size over its bound", bound)
    with panels(run_dir / "memory.png", 8, width=14, height=6.4, dpi=110) as axes:
        first, *others = axes
        first.plot(*(zip(*gains, strict=True) if gains else ((), ())), "o-", color="tab:red", markersize=4)
        first.axhline(0, color="black", linewidth=0.8)
        first.set_title("memory gain (bits per byte)", fontsize=11)
        for panel, (name, (title, unit)) in zip(others, panels_of.items(), strict=True):
            points = [(line["step"], np.array(line[name], float) / unit) for line in reports if name in line]
            panel.set_title(title, fontsize=11)
            if points:
                _draw_layers(panel, *zip(*points, strict=True))
                _fit_axis(panel, name, np.stack([values for _, values in points]))
            else:
                panel.text(0.5, 0.5, "none", ha="center", va="center", transform=panel.transAxes, color="gray")
        for panel in axes:
            panel.grid(alpha=0.3)
            if panel.get_yscale() == "linear":
                panel.ticklabel_format(axis="y", useOffset=False)
            panel.tick_params(labelsize=9)
            panel.locator_params(axis="x", nbins=5, integer=True)
        for panel in axes[4:]:
            panel.set_xlabel("step")
        handles, labels = max((panel.get_legend_handles_labels() for panel in others), key=lambda both: len(both[0]))
        figure = first.figure
        figure.suptitle(run_dir.name)
        if 1 < len(handles) <= 12:
            figure.legend(handles, labels, loc="outside right center", title="memory\nlayer", fontsize=9)
        elif handles:
            figure.text(0.995, 0.985, f"{len(handles)} memory layers, dark (first) to light", ha="right", va="top")


def _draw_layers(panel: Any, steps: tuple[int, ...], values: tuple[np.ndarray, ...]) -> None:
    """A line for every layer, dark to light with depth."""
    from matplotlib import colormaps

    for layer, numbers in enumerate(np.stack(values, axis=1)):
        color = colormaps["viridis"](0.9 * layer / max(1, len(values[0]) - 1))
        panel.plot(steps, numbers, "o-", color=color, markersize=3, linewidth=1.3, label=str(layer))


def _fit_axis(panel: Any, name: str, values: np.ndarray) -> None:
    """Keep the later points readable: a young memory's loss is a hundred times that of a trained one."""
    low, high = np.nanmin(values, initial=np.inf), np.nanmax(values, initial=-np.inf)
    if name == "explained_share" and low < -1 < high:
        panel.set_ylim(-1.05, 1.05)
        panel.set_title("explained share (where above -1)", fontsize=11)
    elif name == "inner_loss" and 0 < 10 * low < high < np.inf:
        panel.set_yscale("log")
