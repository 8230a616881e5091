"""The one numerical bound that losses, corrections and metrics share."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut to ± this before `exp`: e²⁰ = 4.9e8 is far beyond every clip, and its square still fits fp32."""
