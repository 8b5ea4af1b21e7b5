"""What is left of a kind's answers when twice as much is asked as it can do."""
