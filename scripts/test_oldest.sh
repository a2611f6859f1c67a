#!/usr/bin/env bash
# The tests that need no demo model, with the oldest versions that pyproject.toml admits (constraints-oldest.txt): on Python 3.11,
# and on Python 3.12 where it is installed. Each has an environment of its own, .venv-oldest-3.11 and .venv-oldest-3.12.
# Arguments go to pytest, e.g. tests/profiling/test_scoring.py.
set -euo pipefail
cd "$(dirname "$0")/.."

interpreter() {  # the path of Python $1, where it is installed; a shim of pyenv may stand in the PATH without an interpreter
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2> /dev/null || continue
    "$candidate" -c 'import sys; print(sys.executable)'
    return
  done
  return 1
}

# Two processes of one thread each, as in test.sh.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
outcomes=()
failed=0
for version in 3.11 3.12; do
  if ! python=$(interpreter "$version"); then
    outcomes+=("Python $version is not installed: nothing was tested with it")
    [ "$version" = 3.12 ] || failed=1
    continue
  fi
  venv=.venv-oldest-$version
  PYTHON=$python VENV=$venv CONSTRAINTS=constraints-oldest.txt EXTRAS=profile,html,multi-device,test ./scripts/install.sh
  packages='torch|triton|transformers|datasets|numba|numpy|scipy|pandas|pyarrow|pydantic|typer|rich'
  versions="$("$venv/bin/python" --version): $("$venv/bin/python" -m pip freeze | grep -E "^($packages)==" | paste -sd ' ')"
  echo "== tests with $versions"
  # Loops that numba compiles are kept apart: two versions of it would compile each other's anew.
  if NUMBA_CACHE_DIR=$PWD/$venv/numba "$venv/bin/python" -m pytest -m "not demo_model" --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"; then
    outcomes+=("passed with $versions")
  else
    outcomes+=("FAILED with $versions")
    failed=1
  fi
done
printf '== %s\n' "${outcomes[@]}"
exit "$failed"
