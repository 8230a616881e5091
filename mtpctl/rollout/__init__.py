"""Responses from engines that speculate with the MTP head being trained: the `Generator` protocol, vLLM, SGLang, and a pool."""
