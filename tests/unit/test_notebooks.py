"""The notebooks of `examples`: each is its source, executed, with a picture and without an error."""

import base64
import json
from pathlib import Path

import pytest
from tools import notebooks

NAMES = sorted(path.stem for path in notebooks.SOURCES.glob("*.py"))
EXAMPLES = notebooks.ROOT / "examples"


@pytest.fixture(params=NAMES)
def made(request):
    return request.param, json.loads((EXAMPLES / f"{request.param}.ipynb").read_text())["cells"]


def test_a_source_has_cells_of_two_kinds():
    text = "# %% [markdown]\n# # Title\n#\n# text\n\n# %%\nx = 1\n\n# %%\nprint(x)\n"
    assert notebooks.cells(text) == [("markdown", "# Title\n\ntext"), ("code", "x = 1"), ("code", "print(x)")]


def test_a_notebook_has_the_cells_of_its_source(made):
    name, cells = made
    source = notebooks.cells((notebooks.SOURCES / f"{name}.py").read_text())
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in cells] == source


def test_a_notebook_is_executed_small_and_shows_the_gallerys_picture(made):
    name, cells = made
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert {output["output_type"] for output in outputs} <= {"display_data", "stream"}
    (picture,) = (o["data"]["image/png"] for o in outputs if o["output_type"] == "display_data")
    png = base64.b64decode(picture)
    assert png == Path(notebooks.ROOT / "docs" / f"{name}.png").read_bytes()
    assert len(png) < 60_000
    assert f"]({name}.png)" in (notebooks.ROOT / "docs" / "gallery.md").read_text()


def test_what_notebooks_show_is_what_their_texts_say():
    shown = {
        name: "".join(
            "".join(output["text"])
            for cell in json.loads((EXAMPLES / f"{name}.ipynb").read_text())["cells"]
            for output in cell.get("outputs", ())
            if output["output_type"] == "stream"
        )
        for name in NAMES
    }
    assert float(shown["one_loss_curve"].rpartition(":")[2]) < 1e-5
    assert "exit code -9 after step 38" in shown["killed_and_resumed"]
    assert "the same bits: True" in shown["killed_and_resumed"]
    assert len(shown["what_lies_where"].splitlines()) == 3
