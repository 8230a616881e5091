"""What a model is trained on: problems (generated or read from files), the tokenizer, the cursor over them.
Runs in the controller; needs no torch.
"""
