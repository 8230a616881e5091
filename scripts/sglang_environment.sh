#!/usr/bin/env bash
# An environment of its own for SGLang 0.5.21, which cannot share vLLM's (other transformers, xgrammar and outlines).
# usage: scripts/sglang_environment.sh DIR        then, in the recipe: rollout.engine: sglang, rollout.python: DIR/bin/python
# Needs uv and Python 3.12; about 9 GB. Ray has the version of mtpctl's own environment: actors of both talk to each other.
set -euo pipefail
[ $# -eq 1 ] || { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }
dir=$1
here=$(cd "$(dirname "$0")/.." && pwd)
version() { sed -n "s/^ *\"$1==\([^\"]*\)\".*/\1/p" "$here/pyproject.toml" | head -1; }
uv venv --quiet --python 3.12 "$dir"
# --no-config: tool.uv of the checkout has mtpctl's versions of torch and transformers, which SGLang does not accept.
# cuda-tile serves kernels that no model here uses, and has no wheel on the package index.
uv pip install --quiet --no-config --python "$dir/bin/python" --override <(echo "cuda-tile ; sys_platform == 'never'") \
    sglang==0.5.21 "ray==$(version ray)" pydantic pyyaml safetensors
uv pip install --quiet --no-config --python "$dir/bin/python" --no-deps --editable "$here"
"$dir/bin/python" -c 'import mtpctl.rollout.sglang.plugin, ray, sglang; print("SGLang", sglang.__version__, "with Ray", ray.__version__)'
