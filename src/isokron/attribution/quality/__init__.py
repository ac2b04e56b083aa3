"""How far scores can be trusted."""
