"""Trains a recipe inside a test process and returns what the run folder says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Optional


def train(recipe_name: str, arguments: dict[str, Any], overrides: Optional[dict[str, Any]] = None) -> list[dict]:
    """Build and run a recipe as `nemo llm pretrain` does, in a process of its own; returns its metrics lines.

    Args:
        arguments: of the recipe function; `dir` and `name` are required.
        overrides: dotted paths, as on the command line; a number is a place in a list.
    """
    import fiddle as fdl

    from nemo_hsmoe import recipes
    from nemo_hsmoe.plugin.callbacks.metrics import read_metrics

    recipe = getattr(recipes, recipe_name)(**arguments)
    for path, value in (overrides or {}).items():
        *parents, leaf = path.split(".")
        node = recipe
        for parent in parents:
            node = node[int(parent)] if parent.isdigit() else getattr(node, parent)
        setattr(node, leaf, value)
    fdl.build(recipe)()
    return read_metrics(Path(arguments["dir"]) / arguments["name"])


def read_summary(arguments: dict[str, Any]) -> dict:
    """`summary.json` of a finished run."""
    return json.loads((Path(arguments["dir"]) / arguments["name"] / "summary.json").read_text())
