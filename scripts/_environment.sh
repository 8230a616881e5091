# Sourced by the scripts beside it: makes .venv with what pyproject.toml names, once, and again when that file changes.
# A GPU machine (nvidia-smi answers) gets the extra `gpu`, any other `cpu`.

find_python() {
    local candidate
    for candidate in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python3; do
        if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "error: Python 3.12 is needed, on PATH as python3.12 or under pyenv (pyenv install 3.12)" >&2
    return 3
}

ensure_environment() {
    local extra=cpu stamp python
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then extra=gpu; fi
    stamp="$extra $(cksum < "$root/pyproject.toml")"
    if [ -x "$root/.venv/bin/mtpctl" ] && [ "$(cat "$root/.venv/mtpctl.stamp" 2>/dev/null)" = "$stamp" ]; then return; fi
    python=$(find_python)
    echo "Installing about 6.5 GB into .venv (extra: $extra). This takes one to three minutes if the packages are cached …" >&2
    [ -x "$root/.venv/bin/python" ] || "$python" -m venv "$root/.venv"
    "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check 'uv>=0.7'
    # A run starts nine processes or more; each would compile all that it imports where Python may not write bytecode.
    (cd "$root" && .venv/bin/python -m uv pip install --compile-bytecode --python .venv/bin/python --group docs --editable ".[$extra,dev]" 2>&1 |
        grep --line-buffered -vE '^ [-+~] ' >&2)  # its list of 250 packages
    echo "$stamp" > "$root/.venv/mtpctl.stamp"
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ensure_environment
