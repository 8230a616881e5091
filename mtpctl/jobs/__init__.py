"""The jobs behind the commands: offline rollout, evaluation, the dry run, manual weight syncs and serving."""
