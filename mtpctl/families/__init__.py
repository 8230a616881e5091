"""The model families as data: sizes, tensor names and shapes, MTP conventions. Imports no other mtpctl package except `errors`."""
