"""Transports of buckets, one module each: a writer on the sender's side, a reader on the receiver's."""
