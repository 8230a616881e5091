"""An OpenAI-compatible endpoint before the engines, for agents in whatever framework, whose samples keep the tokens that were sampled."""
