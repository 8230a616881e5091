"""The records of a run: its directory, its metrics, the live panel, the report. Runs in the controller; needs no torch."""
