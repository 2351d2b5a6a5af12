"""The `hsmoe` command."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False)


@app.callback()
def hsmoe() -> None:
    """Tools around the hsmoe recipes; training itself is `nemo llm pretrain --factory RECIPE`."""


@app.command()
def report(
    recipe: Annotated[str, typer.Argument(help="hsmoe_5b, hsmoe_33b, hsmoe_1b or hsmoe_tiny")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a recipe's parameters beside the specification's figures."""
    from nemo_hsmoe.model.report import parameter_report
    from nemo_hsmoe.model.sizes import config_for

    figures = parameter_report(config_for(recipe)).as_dict()
    if as_json:
        print(json.dumps(figures, indent=1))
        return
    specified = figures["specified"]
    rows = [
        (name, count, specified["breakdown"].get(name)) for name, count in figures["breakdown"].items()
    ] + [
        ("total", figures["total"], specified["total"]),
        ("active per token", figures["active"], specified["active"]),
    ]  # fmt: skip
    print(f"{recipe:<20}{'parameters':>16}{'specified':>16}")
    for name, count, given in rows:
        print(f"{name:<20}{count:>16,}{'' if given is None else format(given, ','):>16}")
    print(f"active share {figures['active_fraction']:.1%}; the embedding is a look-up and does not count as active")


def main() -> None:
    """Run the command; what a user can mend is told in one line, with exit code 1."""
    from nemo_hsmoe.runtime.errors import ConfigurationError

    try:
        app()
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
