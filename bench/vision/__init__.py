"""Token adaptation: OTAS repeated, in simulation and live."""
