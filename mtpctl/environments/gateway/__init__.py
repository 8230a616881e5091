"""An OpenAI-compatible endpoint in front of the engines, for agents of any framework. Its samples contain the sampled tokens."""
