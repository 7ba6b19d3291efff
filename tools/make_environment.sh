#!/bin/sh
# make_environment.sh PYTHON VENV REQUIREMENT: makes (or brings up to date) the virtual environment and installs
# this checkout into it, editable, with uv where there is one. All output goes to stderr: stdout belongs to the
# command that make runs next.
set -eu
exec 1>&2
python=$1 venv=$2 requirement=$3

fail() { echo "xserv: $*"; exit 1; }

command -v "$python" >/dev/null 2>&1 || fail "no '$python' on PATH: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || fail "'$python' is $("$python" --version 2>&1); xserv needs Python 3.11 or newer: make PYTHON=python3.11"

echo "xserv: installing $requirement into $venv (once; a minute or so)"
if command -v uv >/dev/null 2>&1; then
    [ -x "$venv/bin/python" ] || uv venv --quiet --python "$python" "$venv"
    uv pip install --quiet --python "$venv/bin/python" --editable "$requirement"
else
    "$python" -c 'import venv, ensurepip' 2>/dev/null \
        || fail "'$python' lacks the venv module: install it (Debian, Ubuntu: apt install python3-venv), or install uv"
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"  # none, or half made
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$requirement"
fi
