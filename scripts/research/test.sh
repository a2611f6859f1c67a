#!/usr/bin/env bash
# The tests of the scripts in this folder, which ./scripts/test.sh leaves out. That one installs what they need.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
.venv/bin/python -m pytest -p tests.conftest --numprocesses 2 "$@" scripts/research/tests
