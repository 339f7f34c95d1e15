#!/usr/bin/env bash
# The tests, on a fresh machine too. Arguments go to pytest: `scripts/test.sh tests/test_config.py -k recipe`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
# The models are tiny: more threads spend their time waiting for one another, and on a busy machine most of it.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m pytest "$@"
