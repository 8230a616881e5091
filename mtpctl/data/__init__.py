"""Training data: problems (generated or read from files), tokenizers, and the cursor that draws problems.

Runs in the controller; needs no torch.
"""
