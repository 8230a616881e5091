"""What a run says about itself: its directory, its metrics, the live panel, the report. Runs in the controller; needs no torch."""
