#!/usr/bin/env bash
# Makes .venv in this checkout, or reuses it, with airtune installed for development.
# scripts/quickstart.sh and scripts/test.sh call it; with nothing to do it takes no time.
#
#   PYTHON         the Python to build on (3.11 or newer; default: python3)
#   AIRTUNE_TORCH  what pip shall install as torch (default: the release that the tests run with)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
venv=.venv
done_mark="$venv/airtune-is-installed"

if [[ -e "$done_mark" && ! pyproject.toml -nt "$done_mark" ]]; then
    exit 0
fi

if [[ ! -x "$venv/bin/python" ]]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        { echo "airtune needs Python 3.11 or newer; set PYTHON to one (got: $("$python" --version))" >&2; exit 1; }
    echo "making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi

# Once for all calls: errors only, no chatter about pip itself, no question to answer.
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input install -qq "$@"; }

# torch goes first and by itself, so that a build which the environment offers (pip's find-links or index) is taken;
# with one in place the other requirements do not bring in a second.
if ! "$venv/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
    echo "installing ${AIRTUNE_TORCH:-torch==2.13.0}"
    # shellcheck disable=SC2086  # several words are several requirements or options
    pip ${AIRTUNE_TORCH:-torch==2.13.0}
fi

echo "installing airtune and its tools (minutes, the first time)"
pip -e '.[dev]'
touch "$done_mark"
