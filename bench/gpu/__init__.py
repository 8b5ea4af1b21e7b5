"""The first day with a GPU: stages that need torch, Triton and transformers, and neither Ray nor a checkpoint."""
