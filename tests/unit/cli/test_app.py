"""The list of commands, which is what people see who type `unisono` first."""

from typer.testing import CliRunner

from unisono.cli._app import app


def test_the_list_of_commands_has_room_on_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    listed = CliRunner().invoke(app, ["--help"]).output.partition("Commands:\n")[2].splitlines()
    assert len(listed) >= 9
    assert not [line for line in listed if not line.endswith(".") or line.endswith("...")]
