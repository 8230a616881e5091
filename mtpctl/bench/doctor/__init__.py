"""Check whether this machine can run mtpctl: packages, devices, kernels, transports, Ray, and one round of sampling and scoring.

Needs no torch: what imports a heavy package runs in a process of its own, with a deadline (`part`).
"""
