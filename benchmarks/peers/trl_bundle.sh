#!/usr/bin/env bash
# Build TRL 1.16.0 with vLLM 0.26.0 and transformers 5.24.0 as pieces of 52 MB, for a GPU host that has Python 3.12 and torch 2.11.0+cu130.
# These are the versions that pip resolves for trl[vllm] and torch 2.11.0. vLLM 0.26.0 requires torch==2.11.0, so its wheel fits the host.
# usage: trl_bundle.sh OUT [SITE]    SITE: keep the unpacked packages in this folder
#
# - flash-attn is only published as source. Its Python part is installed without the extension, which flash_attn_shim/ replaces.
# - Left out: verl_overrides.txt, FlashAttention 2 of vLLM (Hopper uses 3), DeepGEMM (FP8 only), OpenCV, video codecs, vLLM's Rust frontend.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
site=${2:-$(mktemp -d)/site}
root=$(cd "$here/../.." && pwd)
uv=$(command -v uv || echo "$root/.venv/bin/uv")
python=$(ls "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python3 2>/dev/null | head -1 || true)
"$uv" pip install -q --no-config --target "$site" --python "${python:-3.12}" --override "$here/verl_overrides.txt" \
    "trl[vllm]==1.16.0" vllm==0.26.0 transformers==5.24.0 liger-kernel einops
wheels=$(mktemp -d)
# setup.py of flash-attn imports torch, so it is built with the environment of the project.
FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE \
    "$root/.venv/bin/python" -m pip wheel -q --no-deps --no-build-isolation flash-attn==2.8.3 -w "$wheels"
"$uv" pip install -q --no-config --target "$site" --python "${python:-3.12}" --no-deps "$wheels"/flash_attn-*.whl
cp "$here/flash_attn_shim/flash_attn_2_cuda.py" "$site/"
cd "$site"
rm -rf opencv* cv2 sympy* PyNvVideoCodec external samples bin hopper vllm/vllm-rs vllm/third_party/deep_gemm \
    vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so
find . \( -name '*.a' -o -name '*.pyi' \) -delete
find . -name __pycache__ -type d -prune -exec rm -rf {} +
rm -f "$out"/t.*
tar cf - . | gzip -1 | split -b 52000000 - "$out/t."
[ -n "${2:-}" ] || rm -rf "$(dirname "$site")"
rm -rf "$wheels"
ls -l "$out"
