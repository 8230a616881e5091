"""The command line: thin modules that parse, call a job of `mtpctl.jobs`, and print.

Heavy packages are imported only once a command runs.
"""
