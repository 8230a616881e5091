"""The numerical bound that losses, corrections and metrics share."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before `exp`: e²⁰ = 4.9e8 is beyond every clip, and its square is within fp32."""
