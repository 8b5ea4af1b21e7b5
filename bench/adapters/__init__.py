"""Many LoRA adapters: Chameleon repeated, in simulation and live."""
