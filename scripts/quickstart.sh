#!/usr/bin/env bash
# From a fresh machine to a fine-tuned model, on a CPU: sets airtune up in .venv, fetches SmolLM2-135M-Instruct
# (93 MB) and teaches it a new name. A second call only trains. Arguments go to the training run, whose results
# land in the current folder: `scripts/quickstart.sh adapter.r=16 output_dir=runs/rank16`.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="$here/../.venv/bin/python"

"$here/setup.sh"
"$python" "$here/fetch_smollm2.py"
exec "$python" -m airtune.train +recipe=quickstart_sft "$@"
