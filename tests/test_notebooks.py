"""Every code cell of every notebook runs, in order, as it stands: but for sizes, which a cell's metadata gives here.

The cell tagged "parameters" sets them (papermill's word); its "test" holds the values that stand in their place here.
"""

import json
from pathlib import Path

import jax
import matplotlib.pyplot
import pytest

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebook_runs(file, tmp_path, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # A reader's session, without the strictness of the tests.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        namespace = {"__name__": "__main__"}
        for cell in json.loads(file.read_text())["cells"]:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), namespace)
                namespace |= cell["metadata"].get("test", {})
    matplotlib.pyplot.close("all")
