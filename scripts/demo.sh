#!/usr/bin/env bash
# The demo, from nothing: install, fetch a small model, profile it with a draft on seven kinds of prompts, report.
# Leaves its run in runs/demo. Repeat it at will: what is done is kept, and an interrupted run is finished.
set -euo pipefail
cd "$(dirname "$0")/.."

./scripts/install.sh
echo "== demo model"
.venv/bin/python scripts/fetch_demo_models.py models

echo "== profile: SmolLM2-135M-Instruct against itself without six layers, 112 prompts (about 3 minutes on 2 cores)"
resume=()
if [ -f runs/demo/manifest.json ]; then
  resume=(--resume)
fi
.venv/bin/alphaprof profile profiles/demo.yaml --out runs/demo "${resume[@]}"

echo "== report (also in runs/demo/report.json)"
.venv/bin/alphaprof report runs/demo --format json --out runs/demo/report.json
.venv/bin/alphaprof report runs/demo
