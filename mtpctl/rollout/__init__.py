"""Responses from engines that speculate with the MTP head being trained: the `Generator` protocol, engines as Ray actors, a pool.
An engine's own code lies in the package of its name.
"""
