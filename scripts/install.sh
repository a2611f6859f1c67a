#!/usr/bin/env bash
# Make .venv with alphaprof and the tested versions of everything that it needs. Does nothing when that is done already.
# Another environment: VENV (its folder), CONSTRAINTS (a file of versions), EXTRAS (of pyproject.toml) and PYTHON name it.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
constraints=${CONSTRAINTS:-constraints.txt}
extras=${EXTRAS:-gguf,html,dev}
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "error: $python is older than Python 3.11" >&2
  echo "hint: set PYTHON to a newer one, e.g. PYTHON=python3.12 $0" >&2
  exit 1
fi

wanted=$({ cat pyproject.toml "$constraints"; echo "$extras"; } | sha256sum)
if [ "$(cat "$venv/.installed" 2>/dev/null)" = "$wanted" ]; then
  echo "== $venv is up to date"
  exit 0
fi
echo "== making $venv with $("$python" --version) and installing alphaprof (a few minutes, about 2 GB on disk with a CPU build of torch)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$constraints" --editable ".[$extras]"
echo "$wanted" > "$venv/.installed"
