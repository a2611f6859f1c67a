#!/usr/bin/env bash
# Everything that a change must pass: install, lint, types, all tests, those on the real demo model included.
set -euo pipefail
cd "$(dirname "$0")/.."

./scripts/install.sh
echo "== demo model"
.venv/bin/python scripts/fetch_demo_models.py models
echo "== lint"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
echo "== types"
.venv/bin/mypy
echo "== tests"
ALPHAPROF_DEMO_MODEL=models/SmolLM2-135M-Instruct.Q4_1.gguf .venv/bin/pytest "$@"
