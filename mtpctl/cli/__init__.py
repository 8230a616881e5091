"""The command line: one thin module a command, and beside it the job that it runs (`rollout_job`, `sync_job`).
Nothing heavy is imported before a command runs.
"""
