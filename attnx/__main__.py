"""`python -m attnx`: the same as the command `attnx`, for where scripts are not on the path."""

from __future__ import annotations

from attnx.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
