#!/usr/bin/env bash
# Install, lint, check types and run tests. Six minutes on two cores (November 2026), the installation apart.
#   --all    the slow tests too, and those of object stores: what a change must pass, and what continuous integration runs
#   --quick  what shows most mistakes within 90 seconds: structure, rules, profile files, and what lies between the models and the reports
# Other arguments go to pytest, e.g. tests/theory.
set -euo pipefail
cd "$(dirname "$0")/.."

mode=
case ${1:-} in --all | --quick) mode=$1; shift ;; esac

./scripts/install.sh
if [ "$mode" != --quick ]; then
  echo "== demo models"
  .venv/bin/python scripts/fetch_demo_models.py models smollm2 stories15m
  export ALPHAPROF_DEMO_MODELS=models
  if ! command -v chromium chromium-browser google-chrome > /dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
      echo "== chromium, for the tests of the HTML report"
      log=$(mktemp)
      { apt-get update && apt-get install --yes --no-install-recommends chromium; } > "$log" 2>&1 || tail -5 "$log" >&2
    else
      echo "== no chromium: tests that need a browser are skipped (in CI they fail)" >&2
    fi
  fi
fi
echo "== lint"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
echo "== types"
.venv/bin/mypy
echo "== tests"
case $mode in
  --all) chosen=() ;;
  --quick)
    chosen=(-m "not models and not demo_model and not slow and not cluster")
    case " $*" in
      *" tests/"*) ;;
      *) set -- "$@" tests/test_{architecture,rules}.py tests/{config,costs,run,theory,totals} ;;
    esac
    ;;
  *) chosen=(-m "not slow and not cluster") ;;
esac
# Two processes of one thread each: threads of torch that compete for processors take many times as long.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Hundreds of processes of alphaprof are started: what Python compiled is kept.
unset PYTHONDONTWRITEBYTECODE
.venv/bin/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "${chosen[@]}" "$@"
