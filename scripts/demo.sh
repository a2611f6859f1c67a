#!/usr/bin/env bash
# The demo, from nothing: install, fetch a small model, profile it with two drafts on seven kinds of prompts, on greedy and
# on sampled text, report. Leaves its runs in runs/demo and runs/demo-sampled. Repeat it at will: what is done is kept, and
# an interrupted run is finished.
set -euo pipefail
cd "$(dirname "$0")/.."

./scripts/install.sh
echo "== demo model"
.venv/bin/python scripts/fetch_demo_models.py models

profile() { # PROFILE RUN [OPTIONS]: a new run, or the rest of an interrupted one
  .venv/bin/alphaprof profile "$1" --out "$2" "${@:3}" --resume
}

echo "== profile, greedy text: SmolLM2-135M-Instruct with two drafts, 112 prompts (about 2 minutes on 2 cores)"
profile profiles/demo.yaml runs/demo
echo "== profile, sampled text: 4 prompts of each kind (more than a minute)"
profile profiles/demo-sampled.yaml runs/demo-sampled --limit 4

echo "== the two drafts against each other, document by document"
.venv/bin/alphaprof compare runs/demo:skip runs/demo:ngram --rules strict --gamma 4
for run in runs/demo-sampled runs/demo; do
  echo "== report of $run (also in $run/report.json, and with figures in $run/report.html)"
  .venv/bin/alphaprof report "$run" --format json --out "$run/report.json"
  .venv/bin/alphaprof report "$run" --format html --out "$run/report.html"
  .venv/bin/alphaprof report "$run"
done
