"""Check whether this machine can run mtpctl: packages, devices, kernels, transports, Ray, and the agreement of vLLM with the trainer.

Imports no torch: checks that need heavy packages run in separate processes, with deadlines (`mtpctl.doctor.parts`).
"""
