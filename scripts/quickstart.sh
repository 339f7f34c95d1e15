#!/usr/bin/env bash
# From a fresh machine to a fine-tuned model, on a CPU: sets airtune up in .venv, fetches SmolLM2-135M-Instruct
# (93 MB) and teaches it a new name. The results land under the current folder, in runs/quickstart_sft. A second call
# only trains, and wants another folder; arguments go to the run: `scripts/quickstart.sh output_dir=runs/second adapter.r=16`.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="$here/../.venv/bin/python"

"$here/setup.sh"
"$python" "$here/fetch_smollm2.py"
exec "$python" -m airtune.train +recipe=quickstart_sft "$@"
