#!/bin/sh
# make_environment.sh PYTHON VENV REQUIREMENT: makes (or brings up to date) the virtual environment and installs
# this checkout into it, editable, with uv where there is one. All output goes to stderr: stdout belongs to the
# command that make runs next. On a terminal one line shows what is being done; elsewhere there are a few lines.
set -eu
exec 1>&2
python=$1 venv=$2 requirement=$3
log=
trap '[ -z "$log" ] || rm -f "$log"' EXIT

fail() { echo "xserv: $*"; exit 1; }

# Runs a command that prints a line for each thing that it does. Its whole output is shown if it fails.
watched() {
    log=$(mktemp)
    { "$@" 2>&1 || echo "xserv-failed"; } | {
        count=0
        while IFS= read -r line; do
            printf '%s\n' "$line" >> "$log"
            case $line in
                Collecting*|"Requirement already"*) count=$((count + 1)); doing="$count packages found: ${line#* }" ;;
                *Downloading*|*Using\ cached*) doing="$count packages found: ${line#"${line%%[! ]*}"}" ;;
                *Building*|*Preparing*) doing="building xserv" ;;
                Installing\ collected*) doing="installing $(printf '%s\n' "$line" | tr ',' '\n' | wc -l) packages" ;;
                *) continue ;;
            esac
            if [ -t 2 ]; then printf '\r\033[Kxserv: %.70s' "$doing"
            elif [ "${doing#installing}" != "$doing" ]; then echo "xserv: $doing"; fi
        done
        [ ! -t 2 ] || printf '\r\033[K'
    }
    if grep -q '^xserv-failed$' "$log"; then
        grep -v '^xserv-failed$' "$log"
        fail "installing $requirement into $venv failed; the lines above say why"
    fi
    rm -f "$log"
    log=
}

command -v "$python" >/dev/null 2>&1 || fail "no '$python' on PATH: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || fail "'$python' is $("$python" --version 2>&1); xserv needs Python 3.11 or newer: make PYTHON=python3.11"

echo "xserv: installing $requirement into $venv (once; a minute or so)"
if command -v uv >/dev/null 2>&1; then
    [ -x "$venv/bin/python" ] || uv venv --quiet --python "$python" "$venv"
    uv pip install --python "$venv/bin/python" --editable "$requirement"  # shows its own progress
else
    "$python" -c 'import venv, ensurepip' 2>/dev/null \
        || fail "'$python' lacks the venv module: install it (Debian, Ubuntu: apt install python3-venv), or install uv"
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then  # none, or half made
        echo "xserv: making $venv with $("$python" --version)"
        "$python" -m venv --clear "$venv"
    fi
    watched "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off --editable "$requirement"
fi
echo "xserv: installed"
