"""For all tests."""

from hypothesis import settings

# How long an example takes says how busy the machine is; what hangs is pytest-timeout's business.
settings.register_profile("mtpctl", deadline=None)
settings.load_profile("mtpctl")
