#!/usr/bin/env bash
# Everything that a change must pass: install, lint, types, all tests, those on the real demo model included.
set -euo pipefail
cd "$(dirname "$0")/.."

./scripts/install.sh
echo "== demo model"
.venv/bin/python scripts/fetch_demo_models.py models
if ! command -v chromium chromium-browser google-chrome > /dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    echo "== chromium, for the tests of the HTML report"
    log=$(mktemp)
    { apt-get update && apt-get install --yes --no-install-recommends chromium; } > "$log" 2>&1 || tail -5 "$log" >&2
  else
    echo "== no chromium: tests that need a browser are skipped (in CI they fail)" >&2
  fi
fi
echo "== lint"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
echo "== types"
.venv/bin/mypy
echo "== tests"
# Two processes of one thread each: threads of torch that compete for processors take many times as long.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} ALPHAPROF_DEMO_MODEL=models/SmolLM2-135M-Instruct.Q4_1.gguf
.venv/bin/pytest --numprocesses 2 --dist loadfile "$@"
