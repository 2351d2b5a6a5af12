"""Refuses comments in Python and shell code: names and docstrings explain it."""

from __future__ import annotations

import subprocess
import sys
import tokenize
from pathlib import Path

DIRECTIVES = (
    "#!",
    "# noqa",
    "# type:",
    "# pyright:",
    "# mypy:",
    "# SPDX",
    "# Copyright",
    "# fmt:",
    "# ruff:",
    "# pragma:",
)


def python_comments(path: Path) -> list[str]:
    """`file:line: text` of every comment in a Python file that is no directive."""
    with tokenize.open(path) as source:
        tokens = tokenize.generate_tokens(source.readline)
        return [
            f"{path}:{token.start[0]}: {token.string}"
            for token in tokens
            if token.type == tokenize.COMMENT and not token.string.startswith(DIRECTIVES)
        ]


def shell_comments(path: Path) -> list[str]:
    """`file:line: text` of every whole-line comment in a shell script or Makefile that is no directive."""
    lines = enumerate(path.read_text().splitlines(), 1)
    return [
        f"{path}:{number}: {line.strip()}"
        for number, line in lines
        if line.lstrip().startswith("#") and not line.lstrip().startswith(DIRECTIVES)
    ]


def main() -> int:
    """Print what is found; 1 when anything is."""
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], capture_output=True, text=True, check=True
    )
    found = []
    for path in map(Path, tracked.stdout.split()):
        if path.suffix == ".py":
            found += python_comments(path)
        elif path.suffix == ".sh" or path.name in ("Makefile", "run"):
            found += shell_comments(path)
    print("\n".join(found) or "no comments in code")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
