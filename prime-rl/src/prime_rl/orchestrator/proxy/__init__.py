"""An OpenAI-compatible proxy in front of the engines, which records the tokens of every call."""
