"""Checks whether this machine can run mtpctl: packages, devices, kernels, transports, Ray, and agreement between vLLM and the trainer.

Does not import torch: checks that need heavy packages run in separate processes with deadlines (`mtpctl.doctor.parts`).
"""
