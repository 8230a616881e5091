"""The asynchronous controller: stages, sample buffer, staleness admission, trainer actors."""
