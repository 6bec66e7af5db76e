"""Games of several turns: of Gymnasium, of TextArena, and on OpenEnv servers."""
