"""Every code cell of every notebook runs, in order, as it stands."""

import json
from pathlib import Path

import jax
import matplotlib
import pytest

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebook_runs(file):
    matplotlib.use("Agg")
    # A reader's session, without the strictness of the tests.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        namespace = {"__name__": "__main__"}
        for cell in json.loads(file.read_text())["cells"]:
            lines = "".join(cell["source"]).splitlines()
            if cell["cell_type"] == "code":
                exec("\n".join(line for line in lines if not line.startswith("%")), namespace)
    matplotlib.pyplot.close("all")
