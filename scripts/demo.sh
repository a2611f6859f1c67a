#!/usr/bin/env bash
# The demo, from nothing: install, fetch a small model, profile it with two drafts on seven kinds of prompts, on greedy and
# on sampled text, report. Leaves its runs in runs/demo and runs/demo-sampled. Repeat it at will: what is done is kept, and
# an interrupted run is finished.
#
#     ./scripts/demo.sh --train
#
# instead trains a draft head for a small story teller on texts of its own, and compares it with a published head and
# prompt lookup on prompts that it has not seen (two minutes on two idle cores). Leaves runs/stories, runs/stories-head and
# runs/stories-new.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  "") model=smollm2 ;;
  --train) model=stories15m ;;
  *) echo "usage: ./scripts/demo.sh [--train]" >&2; exit 2 ;;
esac

NEXT="== next: . .venv/bin/activate   (puts alphaprof on the path)"

./scripts/install.sh
echo "== demo model"
.venv/bin/python scripts/fetch_demo_models.py models "$model"

profile() { # PROFILE RUN [OPTIONS]: a new run, or the rest of an interrupted one
  .venv/bin/alphaprof profile "$1" --out "$2" "${@:3}" --resume
}

train() {
  echo "== profile: stories15M goes on with 160 beginnings of stories"
  profile profiles/stories.yaml runs/stories
  echo "== train a head on four fifths of these texts"
  .venv/bin/alphaprof train profiles/stories.yaml --from runs/stories --out runs/stories-head --resume
  echo "== before and after, on 24 beginnings by another hand: the published head, prompt lookup and the new head"
  profile profiles/stories-new.yaml runs/stories-new
  .venv/bin/alphaprof compare runs/stories-new:head runs/stories-new:published --rules strict --gamma 3
  .venv/bin/alphaprof report runs/stories-new
}
if [ "$model" = stories15m ]; then
  train
  echo "$NEXT"
  exit
fi

echo "== profile, greedy text: SmolLM2-135M-Instruct with two drafts, 112 prompts (about 2 minutes on 2 cores)"
profile profiles/demo.yaml runs/demo
echo "== profile, sampled text: 4 prompts of each kind (more than a minute)"
profile profiles/demo-sampled.yaml runs/demo-sampled --limit 4

for run in runs/demo-sampled runs/demo; do
  .venv/bin/alphaprof report "$run" --format json > "$run/report.json" # --out writes into no run
  .venv/bin/alphaprof report "$run" --format html > "$run/report.html"
done
echo "== reports: sampled text, the verdict; then greedy text (in the browser, with figures: report.html beside each run)"
.venv/bin/alphaprof report runs/demo-sampled | sed '/^$/q'
.venv/bin/alphaprof report runs/demo
echo "$NEXT"
