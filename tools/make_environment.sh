#!/bin/sh
# make_environment.sh PYTHON VENV REQUIREMENT: makes (or brings up to date) the virtual environment and installs
# this checkout into it, editable. It uses uv, brings uv into the environment if there is none, and uses pip if that
# fails. All output goes to stderr: stdout belongs to the command that make runs next. On a terminal one line shows
# what is being done, and for how long; elsewhere there are a few lines.
set -eu
exec 1>&2
python=$1 venv=$2 requirement=$3
log=$(mktemp)
ticker=
trap 'calm; rm -f "$log" "$log.doing"' EXIT

fail() { echo "xserv: $*"; exit 1; }

# Says what is being done from now on; on a terminal again each second, with the seconds that have gone.
doing() {
    [ -t 2 ] || return 0
    printf '%s\n' "$1" > "$log.doing"
    printf '\r\033[Kxserv: %.70s' "$1"
    [ -z "$ticker" ] || return 0
    (
        trap 'exit 0' TERM
        seconds=0
        while sleep 1 > /dev/null 2>&1 & wait $! && kill -0 $$ 2> /dev/null; do  # $$: the script, which may be stopped
            seconds=$((seconds + 1))
            read -r words < "$log.doing"
            printf '\r\033[Kxserv: %.70s, %s s' "$words" "$seconds"
        done
    ) &
    ticker=$!
}

# Ends that, and clears the line.
calm() {
    [ -n "$ticker" ] || return 0
    kill "$ticker" 2>/dev/null || :
    wait "$ticker" 2>/dev/null || :
    ticker=
    printf '\r\033[K'
}

# Runs a command that prints a line for each thing that it does. Its whole output is shown if it fails.
watched() {
    { "$@" 2>&1 || echo "xserv-failed"; } | {
        doing "asking for packages"
        count=0
        while IFS= read -r line; do
            printf '%s\n' "$line" >> "$log"
            case $line in
                Collecting*|"Requirement already"*) count=$((count + 1)); now="$count packages found: ${line#* }" ;;
                *Downloading*|*Using\ cached*) now="$count packages found: ${line#"${line%%[! ]*}"}" ;;
                *Building*|*Preparing*) now="building xserv" ;;
                Installing\ collected*) now="installing $(printf '%s\n' "$line" | tr ',' '\n' | wc -l) packages" ;;
                *) continue ;;
            esac
            doing "$now"
            if [ ! -t 2 ] && [ "${now#installing}" != "$now" ]; then echo "xserv: $now"; fi
        done
        calm
    }
    if grep -q '^xserv-failed$' "$log"; then
        grep -v '^xserv-failed$' "$log"
        fail "installing $requirement into $venv failed; the lines above say why"
    fi
}

command -v "$python" >/dev/null 2>&1 || fail "no '$python' on PATH: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || fail "'$python' is $("$python" --version 2>&1); xserv needs Python 3.11 or newer: make PYTHON=python3.11"

has_pip() { "$1" -m pip --version >/dev/null 2>&1; }

# Makes the environment with uv in it, which installs in a third of pip's time. It has no pip of its own if the Python
# that makes it has one, since unpacking pip takes longer than all of uv. False if no uv is to be had.
bring_uv() {
    doing "making $venv"
    if has_pip "$python"; then
        "$python" -m venv --clear --without-pip "$venv"
        set -- "$python" -m pip --python "$venv/bin/python"
    else
        "$python" -m venv --clear "$venv"
        set -- "$venv/bin/python" -m pip
    fi
    doing "fetching uv"
    "$@" install --quiet --disable-pip-version-check uv >> "$log" 2>&1 || { calm; return 1; }
    calm
}

with_uv() {
    [ -x "$venv/bin/python" ] || "$uv" venv --quiet --python "$python" "$venv"
    "$uv" pip install --python "$venv/bin/python" --editable "$requirement"  # shows its own progress
}

with_pip() {
    has_pip "$venv/bin/python" || "$python" -m venv --clear "$venv"
    watched "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off --editable "$requirement"
}

echo "xserv: installing $requirement into $venv (once; half a minute or so)"
if uv=$(command -v uv); then
    with_uv
elif [ ! -x "$venv/bin/uv" ] && has_pip "$venv/bin/python"; then
    with_pip
else
    uv=$venv/bin/uv
    if [ ! -x "$uv" ]; then  # no environment, or one half made
        "$python" -c 'import venv, ensurepip' 2>/dev/null \
            || fail "'$python' lacks the venv module: install it (Debian, Ubuntu: apt install python3-venv), or install uv"
        echo "xserv: making $venv with $("$python" --version)"
        bring_uv || :
    fi
    # uv does not read pip.conf: pip may reach a mirror that uv does not.
    if [ ! -x "$uv" ] || ! with_uv; then
        echo "xserv: pip installs instead of uv, which takes longer"
        with_pip
    fi
fi
echo "xserv: installed"
