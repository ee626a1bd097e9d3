"""Make and execute the notebooks of `examples` from `tools/notebooks`: `python -m tools.notebooks NAME ...`

A source has `# %%` above each cell, and `# %% [markdown]` above a text. The pictures are written to `docs`,
too, for the gallery.
"""

import argparse
import base64
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "tools" / "notebooks"
#: Seconds that a cell may take.
LIMIT = 600
#: Executed before the first cell: small pictures.
_FIRST = "%config InlineBackend.rc = {'figure.dpi': 80}"


def cells(text):
    """Return the cells of a source: pairs of a kind, "markdown" or "code", and a text."""
    found = []
    for mark, body in re.findall(r"^# %%([^\n]*)\n(.*?)(?=^# %%|\Z)", text, re.DOTALL | re.MULTILINE):
        if "markdown" in mark:
            found.append(("markdown", re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)))
        else:
            found.append(("code", body.strip()))
    return found


def notebook(path):
    """Return the notebook of a source, not executed."""
    import nbformat

    make = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    parts = [make[kind](text, id=f"cell-{i}") for i, (kind, text) in enumerate(cells(path.read_text()))]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.v4.new_notebook(cells=parts, metadata={"kernelspec": kernel})


def execute(made):
    """Execute a notebook in a new kernel, and leave out what differs in each run."""
    import nbformat
    from nbclient import NotebookClient

    made.cells.insert(0, nbformat.v4.new_code_cell(_FIRST))
    NotebookClient(made, timeout=LIMIT, resources={"metadata": {"path": str(ROOT)}}).execute()
    del made.cells[0]
    for index, cell in enumerate(made.cells):
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.execution_count = index
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
            for output in cell.outputs:
                output.get("data", {}).pop("text/plain", None)


def pictures(made):
    """Return the PNG pictures of a notebook."""
    outputs = (output for cell in made.cells for output in cell.get("outputs", ()))
    return [base64.b64decode(o["data"]["image/png"]) for o in outputs if "image/png" in o.get("data", {})]


def main():
    import nbformat

    names = sorted(path.stem for path in SOURCES.glob("*.py"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all by default: {', '.join(names)}")
    for name in parser.parse_args().names or names:
        made = notebook(SOURCES / f"{name}.py")
        execute(made)
        (ROOT / "examples" / f"{name}.ipynb").write_text(nbformat.writes(made) + "\n")
        (picture,) = pictures(made)
        (ROOT / "docs" / f"{name}.png").write_bytes(picture)
        print(f"{name}: {len(nbformat.writes(made)) // 1000} kB")


if __name__ == "__main__":
    sys.exit(main())
