"""The command `attnx`. Only `main` stands here, so that its imports wait until it is called."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line; the exit status is 0, 1 (something is wrong) or 2 (wrong use)."""
    from attnx.cli._app import app

    app(prog_name="attnx")
