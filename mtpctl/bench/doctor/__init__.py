"""Is this machine fit to run: the pinned stack, devices, kernels, transports, Ray, and one round of sample and score.

Needs no torch: whatever imports a heavy package runs in a process of its own, with a deadline (`part`).
"""
