"""Files of results: what stands in them, and that drawing needs no display and leaves matplotlib's state alone."""

import csv
import dataclasses
import json

from titans_jax import plots


@dataclasses.dataclass
class Row:
    name: str
    value: float | None


def test_rows_of_dataclasses_and_of_dictionaries(tmp_path):
    rows = [Row("a, b", 1.5), Row("c", None)]
    for given in (rows, [dataclasses.asdict(row) for row in rows]):
        plots.save_csv(given, tmp_path / "new" / "rows.csv")
        with (tmp_path / "new" / "rows.csv").open(newline="") as file:
            assert list(csv.DictReader(file)) == [{"name": "a, b", "value": "1.5"}, {"name": "c", "value": ""}]


def test_dataclasses_become_json_objects(tmp_path):
    plots.save_json({"rows": [Row("a", 1.0)]}, tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text()) == {"rows": [{"name": "a", "value": 1.0}]}
    plots.save_json({"losses": [float("nan"), float("-inf"), 2.0]}, tmp_path / "rows.json")
    assert "".join((tmp_path / "rows.json").read_text().split()) == '{"losses":[null,null,2.0]}'


def test_a_figure_is_saved_when_its_block_ends(tmp_path):
    with plots.figure(tmp_path / "new" / "line.png", width=3, height=2, dpi=100) as axes:
        axes.plot([1, 2], [3, 4])
    png = (tmp_path / "new" / "line.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert (int.from_bytes(png[16:20]), int.from_bytes(png[20:24])) == (300, 200)
