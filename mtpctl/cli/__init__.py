"""The command line: thin modules that parse arguments, call a job of `mtpctl.jobs`, and print its result.

Heavy packages are imported only once a command runs.
"""
