"""Rewards: the functions that come with mtpctl, and the processes in which they and a user's own run.

`rewarder` is what callers use, `pool` keeps the processes, `worker` is what runs in them. The other modules hold one function each, of
the signature of a user's own: `score(response, problem, sample, **args)`. None needs torch.
"""
