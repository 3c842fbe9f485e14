"""Methods and scores by name, the board, a user's own model, baselines and papers."""

from uqlab.study import baselines, bring, methods, published, scoreboard, scores

__all__ = ["baselines", "bring", "methods", "published", "scoreboard", "scores"]
