"""The benchmarks of `mtpctl bench`, for users to run on their own hardware. Scripts for published figures are in `benchmarks/`."""
