"""How buckets travel: one module each. A transport writes on the sender's side and reads on the receiver's."""

from mtpctl.sync.transports.base import PUSHED, BucketReader, BucketWriter, Readers, Sent, cancel, open_reader

__all__ = ["PUSHED", "BucketReader", "BucketWriter", "Readers", "Sent", "cancel", "open_reader"]
