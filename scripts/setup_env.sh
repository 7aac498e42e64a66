#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes the Python environment of this checkout: .venv in the repository root, or the folder named by VERL_VENV.
# A second call with unchanged requirement files does nothing and takes a fraction of a second.
#
#   bash scripts/setup_env.sh            make or update the environment
#   bash scripts/setup_env.sh --hash     print the hash of the requirement files (to name a cache) and exit
#
# Environment: PYTHON     the Python 3.12 to build from (default: python3.12, then pyenv's versions, then uv)
#              VERL_VENV  where the environment lives (default: .venv in the repository root)
# Exit code 2: no usable Python 3.12, or VERL_VENV points at something that is not ours to change.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VERL_VENV:-$ROOT/.venv}"
[[ "$VENV" == /* ]] || VENV="$PWD/$VENV"
NEEDED="3.12"
REQUIREMENTS=("$ROOT/requirements.txt" "$ROOT/requirements-mcore.txt" "$ROOT/requirements-test.txt")
STAMP="$VENV/.verl-stamp"        # written last: the environment is complete
BUILDING="$VENV.building"        # exists while an install runs; found at the start, it tells of one that broke off

fail() {
    echo "setup_env: $*" >&2
    exit 2
}

hash_stdin() {
    if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi | cut -c1-16
}

requirements_hash() {
    cat "${REQUIREMENTS[@]}" | hash_stdin
}

# Full version of an interpreter, or nothing when it does not start (a pyenv shim without that version, a dangling link).
version_of() {
    "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null || true
}

# A Python can be used when it is 3.12 and can make virtual environments (Debian ships ensurepip apart).
usable() {
    [[ "$(version_of "$1")" == "$NEEDED".* ]] && "$1" -c 'import ensurepip, venv' 2>/dev/null
}

# An interpreter the user names must be right; it is never silently replaced by another one.
check_named_python() {
    local found
    found="$(version_of "$PYTHON")"
    [[ -n "$found" ]] || fail "PYTHON=$PYTHON does not start; set PYTHON to a Python $NEEDED, or unset it to search for one."
    [[ "$found" == "$NEEDED".* ]] || fail "PYTHON=$PYTHON is Python $found, but Python $NEEDED is needed."
    usable "$PYTHON" || fail "PYTHON=$PYTHON lacks the ensurepip module (on Debian and Ubuntu: apt install python$NEEDED-venv)."
}

find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        command -v "$PYTHON"
        return
    fi
    for candidate in "$(command -v "python$NEEDED" || true)" \
        "${PYENV_ROOT:-$HOME/.pyenv}/versions/$NEEDED"*/bin/python "$HOME/.pyenv/versions/$NEEDED"*/bin/python; do
        if [[ -x "$candidate" ]] && usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    if command -v uv >/dev/null; then
        uv python find "$NEEDED" >/dev/null 2>&1 || uv python install "$NEEDED" >&2 || true
        candidate="$(uv python find "$NEEDED" 2>/dev/null || true)"
        if [[ -x "$candidate" ]] && usable "$candidate"; then
            echo "$candidate"
            return
        fi
    fi
    fail "no Python $NEEDED with venv support was found (looked at \$PYTHON, python$NEEDED, pyenv's versions and uv);" \
        "install one, or name it: PYTHON=/path/to/python$NEEDED bash $0"
}

wanted_stamp() {
    echo "$(requirements_hash) $(version_of "$VENV/bin/python")"
}

is_complete() {
    [[ -f "$STAMP" && ! -f "$BUILDING" && -x "$VENV/bin/python" && "$(cat "$STAMP")" == "$(wanted_stamp)" ]]
}

# Puts the checkout on the environment's path, so that workers started in any folder can import verl. Done on every call: an
# environment kept in a cache may have served another checkout before.
link_checkout() {
    local link="$VENV/lib/python$NEEDED/site-packages/verl-checkout.pth"
    [[ -f "$link" && "$(cat "$link")" == "$ROOT" ]] || echo "$ROOT" >"$link"
}

# Building an environment empties its folder, so a folder with something else in it is refused.
check_folder() {
    local found
    [[ -e "$VENV" && ! -f "$BUILDING" && ! -f "$STAMP" ]] || return 0
    if [[ ! -f "$VENV/pyvenv.cfg" && -n "$(ls -A "$VENV")" ]]; then
        fail "$VENV exists and is not a virtual environment; set VERL_VENV to another folder."
    fi
    found="$(version_of "$VENV/bin/python")"
    if [[ -n "$found" && "$found" != "$NEEDED".* ]]; then
        fail "$VENV is an environment of Python $found, but Python $NEEDED is needed; remove it or set VERL_VENV."
    fi
}

# Makes the folder ready for pip: kept when it is a healthy 3.12 environment, built anew when it is a leftover of ours.
prepare_venv() {
    local python found
    found="$(version_of "$VENV/bin/python")"
    if [[ "$found" == "$NEEDED".* && ! -f "$BUILDING" ]]; then
        touch "$BUILDING"
        return
    fi
    python="$(find_python)"
    touch "$BUILDING"
    echo "setup_env: making $VENV with $python ($(version_of "$python"))"
    "$python" -m venv --clear "$VENV"
}

install_all() {
    local pip=("$VENV/bin/python" -m pip --disable-pip-version-check) errors
    prepare_venv
    rm -f "$STAMP"
    echo "setup_env: installing the pinned packages into $VENV (a few minutes, about 6 GB)"
    "${pip[@]}" install -qq -r "$ROOT/requirements.txt" -r "$ROOT/requirements-test.txt"
    "${pip[@]}" install -qq --no-deps -r "$ROOT/requirements-mcore.txt"
    errors="$("$VENV/bin/python" -c 'import megatron.core, ray, tensordict, torch, transformers' 2>&1)" || {
        echo "$errors" >&2
        echo "setup_env: the packages are installed but do not import; run the script again, it starts afresh." >&2
        exit 1
    }
    wanted_stamp >"$STAMP"
    rm -f "$BUILDING"
    echo "setup_env: done"
}

if [[ "${1:-}" == "--hash" ]]; then
    requirements_hash
    exit 0
fi
[[ $# -eq 0 ]] || fail "unknown argument '$1'; the only one is --hash."
[[ -z "${PYTHON:-}" ]] || check_named_python

if ! is_complete; then
    check_folder
    mkdir -p "$(dirname "$VENV")"
    # Two calls at once (two CI jobs on one machine) must not install into the same folder: the second waits and then finds it done.
    if command -v flock >/dev/null; then
        exec 9>"$VENV.lock"
        flock 9
    fi
    is_complete || install_all
fi
link_checkout
