"""What the commands run: offline rollout, evaluation, the dry run, manual weight syncs and serving."""
