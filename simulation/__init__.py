"""The same policies in virtual time: what `pliant simulate` and the benches share."""
