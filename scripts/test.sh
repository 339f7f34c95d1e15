#!/usr/bin/env bash
# The tests, on a fresh machine too. Arguments go to pytest: `scripts/test.sh tests/test_config.py -k recipe`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
exec .venv/bin/python -m pytest "$@"
