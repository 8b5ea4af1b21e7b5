"""What a cascade of language models saves, and what it spoils."""
