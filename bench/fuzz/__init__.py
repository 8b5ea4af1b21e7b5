"""Whatever a stranger may send: that it is answered, soon, and in little memory."""
