"""Generation with engines that speculate with the MTP head being trained: the `Generator` protocol, engines as Ray actors, a pool.
Code for vLLM and SGLang is in the subpackages `vllm` and `sglang`.
"""
