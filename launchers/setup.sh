#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
venv=${1:-.venv}
flavour=${HSMOE_FLAVOUR:-auto}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '==> %s\n' "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

if [ "$flavour" = auto ]; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then flavour=cuda; else flavour=cpu; fi
fi
[ -f "$root/requirements/$flavour.txt" ] || fail "HSMOE_FLAVOUR=$flavour: needs cpu, cuda or auto"

export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
[ -n "$UV_FIND_LINKS" ] || unset UV_FIND_LINKS
if ! command -v uv >/dev/null; then
  tools="$venv.uv"
  if [ ! -x "$tools/bin/uv" ]; then
    say "uv is not here: fetching it with pip"
    python3 -m venv "$tools"
    "$tools/bin/python" -m pip install --quiet uv
  fi
  PATH="$(cd "$tools/bin" && pwd):$PATH"
fi

say "environment $venv, requirements/$flavour.txt"
[ -x "$venv/bin/python" ] || uv venv --quiet --python '>=3.10,<3.12' "$venv"
uv pip install --quiet --python "$venv/bin/python" -r "$root/requirements/$flavour.txt" -r "$root/requirements/dev.txt"
uv pip install --quiet --python "$venv/bin/python" --no-deps --editable "$root"
say "installed: $("$venv/bin/python" -W ignore -c 'import torch; print("torch", torch.__version__)')"
