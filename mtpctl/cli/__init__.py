"""The command line: one thin module for each command. Long jobs of a command are beside it (`rollout_job`, `sync_job`).

Heavy packages are imported only once a command runs.
"""
