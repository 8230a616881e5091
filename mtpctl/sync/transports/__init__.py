"""How buckets travel: one module each. A transport writes on the sender's side and reads on the receiver's."""
