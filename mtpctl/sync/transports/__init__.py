"""How buckets travel: one module each. A transport writes on the sender's side and reads on the receiver's."""

from mtpctl.sync.transports.base import BucketReader, BucketWriter, open_reader

__all__ = ["BucketReader", "BucketWriter", "open_reader"]
