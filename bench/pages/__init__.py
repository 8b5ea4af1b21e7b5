"""One pass and one memory of pages, simulated: against two passes, slots, no sharing, and caches of one sort."""
