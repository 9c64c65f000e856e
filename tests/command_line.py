"""The command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from peftlab.cli.app import app


def invoke(*arguments: object) -> Result:
    """Run a command and return its result; an exception other than an exit is raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, Exception) and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
