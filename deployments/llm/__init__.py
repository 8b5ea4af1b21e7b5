"""Language models, whose live requests share one decode loop (Flover)."""
