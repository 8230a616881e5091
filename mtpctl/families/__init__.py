"""What is particular to a model family, as data: sizes, tensor names and shapes, MTP conventions.
Runs anywhere; imports nothing but the errors.
"""
