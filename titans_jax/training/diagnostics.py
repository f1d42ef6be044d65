"""Whether the memories of a model are alive, from their gates, inner loss and size (`LanguageModel.__call__`)."""

import numpy as np

from titans_jax.config import ModelConfig, gate_choices, step_size_bound


def warnings(diagnostics: dict[str, np.ndarray], model: ModelConfig) -> list[str]:
    """One sentence per memory that has died or saturated, with the number that shows it.

    Criteria, on means over tokens and heads. Dead: less than a tenth of the memory survives a token (retention < 0.1),
    or the step size is below a thousandth of its bound, so nothing is written. Saturated: the step size is above 99 %
    of its bound, or momentum is above 0.999, so its gate no longer chooses; or inner loss or weights are not finite.
    """
    found = []
    bounded = gate_choices(model.memory).bounded
    bound = step_size_bound(model) if bounded else float("nan")  # nothing compares with NaN
    checks = (
        ("retention", lambda x: x < 0.1, "is dead: it keeps {:.3g} of itself per token"),
        ("step_size", lambda x: x < 1e-3 * bound, "is dead: its mean step size is {:.3g}"),
        ("step_size", lambda x: x > 0.99 * bound, "is saturated: its mean step size is {:.3g}, at its bound"),
        ("momentum", lambda x: x > 0.999, "is saturated: its mean momentum is {:.6g}"),
        ("inner_loss", lambda x: ~np.isfinite(x), "is broken: its inner loss is {}"),
        ("weight_norm", lambda x: ~np.isfinite(x), "is broken: its weight norm is {}"),
    )
    for name, bad, sentence in checks:
        for layer, value in enumerate(diagnostics.get(name, ())):
            if bad(value):
                found.append(f"the memory of memory layer {layer} " + sentence.format(value))
    return found
